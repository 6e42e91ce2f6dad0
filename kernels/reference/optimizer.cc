// SPDX-License-Identifier: Apache-2.0
#include "kernels/reference/optimizer.h"

#include <cmath>

namespace lossd::kernels::reference {
namespace {

void ApplyAdamW(const OptimizerOptions& options, int64_t update, double decay, double gradient, double& value,
                double& moment1, double& moment2) {
  value -= options.learning_rate * decay * value;
  moment1 = options.beta1 * moment1 + (1.0 - options.beta1) * gradient;
  moment2 = options.beta2 * moment2 + (1.0 - options.beta2) * gradient * gradient;
  const double mean = moment1 / (1.0 - std::pow(options.beta1, static_cast<double>(update)));
  const double square = moment2 / (1.0 - std::pow(options.beta2, static_cast<double>(update)));
  if (moment1 != 0.0) value -= options.learning_rate * mean / (std::sqrt(square) + options.epsilon);
}

void ApplySgd(const OptimizerOptions& options, int64_t update, double decay, double gradient, double& value,
              double& buffer) {
  double step = decay == 0.0 ? gradient : gradient + decay * value;  // a value of -infinity stays
  if (options.momentum > 0.0) {
    buffer = update == 1 ? step : options.momentum * buffer + (1.0 - options.dampening) * step;
    step = options.nesterov ? step + options.momentum * buffer : buffer;
  }
  value -= options.learning_rate * step;
}

}  // namespace

void ApplyUpdate(const OptimizerOptions& options, int64_t update, bool is_vector,
                 const std::vector<double>& gradient, std::vector<double>& values,
                 OptimizerMoments& moments) {
  moments.moment1.resize(values.size(), 0.0);
  moments.moment2.resize(values.size(), 0.0);
  const double decay = is_vector && !options.decay_vectors ? 0.0 : options.weight_decay;
  for (size_t i = 0; i < values.size(); ++i) {
    const double g = options.grad_multiplier * gradient[i];
    if (options.kind == OptimizerOptions::Kind::kAdamW) {
      ApplyAdamW(options, update, decay, g, values[i], moments.moment1[i], moments.moment2[i]);
    } else {
      ApplySgd(options, update, decay, g, values[i], moments.moment1[i]);
    }
  }
}

}  // namespace lossd::kernels::reference
