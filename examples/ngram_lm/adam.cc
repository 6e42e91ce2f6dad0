// SPDX-License-Identifier: Apache-2.0
#include "examples/ngram_lm/adam.h"

#include <cmath>

namespace lossd::ngram_lm {

Adam::Adam(size_t size, const Options& options)
    : options_(options), state_{0, std::vector<float>(size), std::vector<float>(size)} {}

void Adam::Step(float learning_rate, absl::Span<const float> gradients, absl::Span<float> parameters) {
  ++state_.steps;
  const auto correction1 = static_cast<float>(1 - std::pow(options_.beta1, state_.steps));
  const auto correction2 = static_cast<float>(1 - std::pow(options_.beta2, state_.steps));
  const float rate = learning_rate / correction1;
  const float root_correction2 = std::sqrt(correction2);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const float g = gradients[i];
    float& moment1 = state_.moment1[i];
    float& moment2 = state_.moment2[i];
    moment1 += (1 - options_.beta1) * (g - moment1);
    moment2 += (1 - options_.beta2) * (g * g - moment2);
    parameters[i] -= rate * moment1 / (std::sqrt(moment2) / root_correction2 + options_.epsilon);
  }
}

}  // namespace lossd::ngram_lm
