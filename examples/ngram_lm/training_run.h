// SPDX-License-Identifier: Apache-2.0
// A whole training (RunTraining): steps until the time or the number of steps is over, with a learning-rate
// schedule and a look at held-out text now and then. Also what a person sees of it: ProgressLine and
// RenderPlot.
#ifndef LOSSD_EXAMPLES_NGRAM_LM_TRAINING_RUN_H_
#define LOSSD_EXAMPLES_NGRAM_LM_TRAINING_RUN_H_

#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "examples/ngram_lm/trainer.h"

namespace lossd::ngram_lm {

struct ProgressState {
  int64_t step = 0;
  double loss = 0;  // nats a token
  double tokens_per_second = 0;
  absl::Duration left;  // until the end of training
};

// "step   120   loss 5.432   perplexity   228.6    9812 tokens/s   1:34 left"
std::string FormatProgress(const ProgressState& state);

// A line that says how training goes: rewritten in place on a terminal, now and then a new line elsewhere.
// Writes to a stream that it does not own. Not thread-safe.
class ProgressLine {
 public:
  explicit ProgressLine(FILE* out);

  // Shows the state, unless the last one was shown only a moment ago.
  void Update(const ProgressState& state);
  // A line of its own that stays.
  void Print(const std::string& line);
  // Removes the line that is rewritten in place.
  void Clear();

 private:
  FILE* const out_;
  const bool in_place_;
  absl::Time next_;
};

// A point of a curve.
struct Point {
  double x = 0;
  double y = 0;
};

struct PlotOptions {
  int width = 64;   // characters, without axis and labels
  int height = 14;  // lines, without axis and labels
  std::string title;
  std::string x_label;
};

struct PlotData {
  std::vector<Point> curve;  // joined by lines; at least one point
  std::vector<Point> marks;  // single points, drawn as 'o'
  double reference = 0;      // a dotted level, drawn if reference_label is not empty
  std::string reference_label;
};

// The plot as UTF-8 lines of braille characters (two by four dots each), each line ending with a newline. All
// coordinates must be finite. Thread-safe.
std::string RenderPlot(const PlotData& data, const PlotOptions& options);

struct RunOptions {
  int64_t steps = 0;                        // in all, restored ones included; 0: as many as fit into `time`
  absl::Duration time = absl::Seconds(90);  // without `steps`
  float learning_rate = 4e-3f;              // of stage one, at its peak
  double head_learning_rate = 8e-3;         // of the head, at its peak
  int evaluations = 8;                      // looks at held-out text on the way
  int64_t evaluation_tokens = 8192;         // for each of them
};

struct RunResult {
  std::vector<Point> train;     // step, loss averaged over a few steps
  std::vector<Point> held_out;  // step, loss
  int64_t steps = 0;            // in all
  int64_t tokens = 0;           // trained on in this run
  absl::Duration elapsed;
};

// Multiplies the learning rates when `done` in [0, 1] of the training is over: a short linear warm-up, then
// half a cosine down to 0.05.
double RateMultiplier(double done);

// Told of each step's number, from 1, and its loss (nats a token, before the update). An error ends the
// training.
using StepObserver = std::function<absl::Status(int64_t step, double loss)>;

// Trains from where the trainer stands; progress goes to `out`. held_out must not be empty.
absl::StatusOr<RunResult> RunTraining(const RunOptions& options, absl::Span<const int32_t> held_out,
                                      Trainer* trainer, FILE* out, const StepObserver& on_step = nullptr);

}  // namespace lossd::ngram_lm

#endif  // LOSSD_EXAMPLES_NGRAM_LM_TRAINING_RUN_H_
