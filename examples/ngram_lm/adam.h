// SPDX-License-Identifier: Apache-2.0
// Adam (Kingma and Ba, 2015, algorithm 1) over a flat array of parameters, with bias correction.
// Not thread-safe.
#ifndef LOSSD_EXAMPLES_NGRAM_LM_ADAM_H_
#define LOSSD_EXAMPLES_NGRAM_LM_ADAM_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/types/span.h"

namespace lossd::ngram_lm {

class Adam {
 public:
  struct Options {
    float beta1 = 0.9f;
    float beta2 = 0.99f;
    float epsilon = 1e-8f;
  };

  // What it remembers between steps.
  struct State {
    int64_t steps = 0;
    std::vector<float> moment1;  // [size]
    std::vector<float> moment2;  // [size]
  };

  Adam(size_t size, const Options& options);

  const State& state() const { return state_; }
  // Goes on from a state of an optimizer of the same size.
  void Restore(State state) { state_ = std::move(state); }

  // One step: parameters [size] move against gradients [size].
  void Step(float learning_rate, absl::Span<const float> gradients, absl::Span<float> parameters);

 private:
  const Options options_;
  State state_;
};

}  // namespace lossd::ngram_lm

#endif  // LOSSD_EXAMPLES_NGRAM_LM_ADAM_H_
