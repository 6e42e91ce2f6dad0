// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/optimizer.h"

#include <cmath>

namespace lossd::kernels {
namespace {

void UpdateAdamW(const OptimizerOptions& options, int64_t update, double decay, const ParamRange& range) {
  const double correction1 = 1.0 - std::pow(options.beta1, static_cast<double>(update));
  const double correction2 = 1.0 - std::pow(options.beta2, static_cast<double>(update));
  const float keep = static_cast<float>(1.0 - options.learning_rate * decay);
  const float rate = static_cast<float>(options.learning_rate / correction1);
  const float root = static_cast<float>(1.0 / std::sqrt(correction2));
  const float epsilon = static_cast<float>(options.epsilon);
  const float multiplier = static_cast<float>(options.grad_multiplier);
  const float beta1 = static_cast<float>(options.beta1);
  const float beta2 = static_cast<float>(options.beta2);
  const float rest1 = static_cast<float>(1.0 - options.beta1);
  const float rest2 = static_cast<float>(1.0 - options.beta2);
#pragma omp simd
  for (int64_t i = 0; i < range.n; ++i) {
    const float g = multiplier * range.gradient[i];
    const float m = beta1 * range.moment1[i] + rest1 * g;
    const float v = beta2 * range.moment2[i] + rest2 * g * g;
    range.moment1[i] = m;
    range.moment2[i] = v;
    // A parameter without any gradient so far stays, even with epsilon 0.
    const float step = m == 0.0f ? 0.0f : rate * m / (std::sqrt(v) * root + epsilon);
    range.value[i] = keep * range.value[i] - step;
    range.gradient[i] = 0.0f;
  }
}

// A value of -infinity, which masks a class, stays without decay: 0 times it would be NaN.
void UpdatePlainSgd(const OptimizerOptions& options, double decay, const ParamRange& range) {
  const float rate = static_cast<float>(options.learning_rate);
  const float weight_decay = static_cast<float>(decay);
  const float multiplier = static_cast<float>(options.grad_multiplier);
#pragma omp simd
  for (int64_t i = 0; i < range.n; ++i) {
    const float decayed = weight_decay == 0.0f ? 0.0f : weight_decay * range.value[i];
    range.value[i] -= rate * (multiplier * range.gradient[i] + decayed);
    range.gradient[i] = 0.0f;
  }
}

// The first update sets the buffer to the gradient, without dampening.
void UpdateMomentumSgd(const OptimizerOptions& options, int64_t update, double decay,
                       const ParamRange& range) {
  const float rate = static_cast<float>(options.learning_rate);
  const float weight_decay = static_cast<float>(decay);
  const float multiplier = static_cast<float>(options.grad_multiplier);
  const float momentum = update == 1 ? 0.0f : static_cast<float>(options.momentum);
  const float rest = update == 1 ? 1.0f : static_cast<float>(1.0 - options.dampening);
  const float gradient_share = options.nesterov ? 1.0f : 0.0f;
  const float buffer_share = options.nesterov ? static_cast<float>(options.momentum) : 1.0f;
#pragma omp simd
  for (int64_t i = 0; i < range.n; ++i) {
    const float decayed = weight_decay == 0.0f ? 0.0f : weight_decay * range.value[i];
    const float g = multiplier * range.gradient[i] + decayed;
    const float buffer = momentum * range.moment1[i] + rest * g;
    range.moment1[i] = buffer;
    range.value[i] -= rate * (gradient_share * g + buffer_share * buffer);
    range.gradient[i] = 0.0f;
  }
}

}  // namespace

void UpdateParams(const OptimizerOptions& options, int64_t update, bool is_vector, const ParamRange& range) {
  const double decay = is_vector && !options.decay_vectors ? 0.0 : options.weight_decay;
  if (options.kind == OptimizerOptions::Kind::kAdamW) {
    UpdateAdamW(options, update, decay, range);
  } else if (options.momentum > 0.0) {
    UpdateMomentumSgd(options, update, decay, range);
  } else {
    UpdatePlainSgd(options, decay, range);
  }
}

}  // namespace lossd::kernels
