// SPDX-License-Identifier: Apache-2.0
// A whole training: steps until the time or the number of steps is over, with a learning-rate schedule,
// progress and a look at held-out text now and then.
#ifndef LOSSD_EXAMPLES_NGRAM_LM_TRAINING_RUN_H_
#define LOSSD_EXAMPLES_NGRAM_LM_TRAINING_RUN_H_

#include <cstdint>
#include <cstdio>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "examples/ngram_lm/plot.h"
#include "examples/ngram_lm/trainer.h"

namespace lossd::ngram_lm {

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
