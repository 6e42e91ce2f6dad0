#include "examples/ngram_lm/adam.h"

#include <cmath>

namespace lossd::ngram_lm {

Adam::Adam(size_t size, const Options& options) : options_(options), moment1_(size), moment2_(size) {}

void Adam::Step(float learning_rate, absl::Span<const float> gradients, absl::Span<float> parameters) {
  ++steps_;
  const auto correction1 = static_cast<float>(1 - std::pow(options_.beta1, steps_));
  const auto correction2 = static_cast<float>(1 - std::pow(options_.beta2, steps_));
  const float rate = learning_rate / correction1;
  const float root_correction2 = std::sqrt(correction2);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const float g = gradients[i];
    moment1_[i] += (1 - options_.beta1) * (g - moment1_[i]);
    moment2_[i] += (1 - options_.beta2) * (g * g - moment2_[i]);
    parameters[i] -= rate * moment1_[i] / (std::sqrt(moment2_[i]) / root_correction2 + options_.epsilon);
  }
}

}  // namespace lossd::ngram_lm
