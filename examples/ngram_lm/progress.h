// SPDX-License-Identifier: Apache-2.0
// A line that says how training goes: rewritten in place on a terminal, now and then a new line elsewhere.
#ifndef LOSSD_EXAMPLES_NGRAM_LM_PROGRESS_H_
#define LOSSD_EXAMPLES_NGRAM_LM_PROGRESS_H_

#include <cstdint>
#include <cstdio>
#include <string>

#include "absl/time/time.h"

namespace lossd::ngram_lm {

struct ProgressState {
  int64_t step = 0;
  double loss = 0;  // nats a token
  double tokens_per_second = 0;
  absl::Duration left;  // until the end of training
};

// "step   120   loss 5.432   perplexity   228.6    9812 tokens/s   1:34 left"
std::string FormatProgress(const ProgressState& state);

// Writes to a stream it does not own. Not thread-safe.
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

}  // namespace lossd::ngram_lm

#endif  // LOSSD_EXAMPLES_NGRAM_LM_PROGRESS_H_
