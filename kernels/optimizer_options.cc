// SPDX-License-Identifier: Apache-2.0
#include "kernels/optimizer_options.h"

#include <cmath>

#include "kernels/errors/field_error.h"

namespace lossd::kernels {
namespace {

bool FiniteNonNegative(double value) { return std::isfinite(value) && value >= 0.0; }

bool IsDecayRate(double value) { return value >= 0.0 && value < 1.0; }

absl::Status ValidateAdamW(const OptimizerOptions& options) {
  if (!IsDecayRate(options.beta1)) return errors::FieldError("beta1", "be in [0, 1)", options.beta1);
  if (!IsDecayRate(options.beta2)) return errors::FieldError("beta2", "be in [0, 1)", options.beta2);
  if (!FiniteNonNegative(options.epsilon)) {
    return errors::FieldError("epsilon", "be finite and >= 0", options.epsilon);
  }
  return absl::OkStatus();
}

absl::Status ValidateSgd(const OptimizerOptions& options) {
  if (!FiniteNonNegative(options.momentum)) {
    return errors::FieldError("momentum", "be finite and >= 0", options.momentum);
  }
  if (!std::isfinite(options.dampening))
    return errors::FieldError("dampening", "be finite", options.dampening);
  if (!options.nesterov) return absl::OkStatus();
  if (options.momentum == 0.0)
    return errors::FieldError("momentum", "be > 0 with nesterov", options.momentum);
  if (options.dampening != 0.0)
    return errors::FieldError("dampening", "be 0 with nesterov", options.dampening);
  return absl::OkStatus();
}

}  // namespace

absl::Status Validate(const OptimizerOptions& options) {
  if (!FiniteNonNegative(options.learning_rate)) {
    return errors::FieldError("learning_rate", "be finite and >= 0", options.learning_rate);
  }
  if (!FiniteNonNegative(options.weight_decay)) {
    return errors::FieldError("weight_decay", "be finite and >= 0", options.weight_decay);
  }
  if (!std::isfinite(options.grad_multiplier)) {
    return errors::FieldError("grad_multiplier", "be finite", options.grad_multiplier);
  }
  switch (options.kind) {
    case OptimizerOptions::Kind::kAdamW:
      return ValidateAdamW(options);
    case OptimizerOptions::Kind::kSgd:
      return ValidateSgd(options);
  }
  return errors::FieldError("kind", "be an OptimizerOptions::Kind", static_cast<int>(options.kind));
}

OptimizerState RequiredState(const OptimizerOptions& options) {
  if (options.kind == OptimizerOptions::Kind::kAdamW) return OptimizerState::kAdam;
  return options.momentum > 0.0 ? OptimizerState::kMomentum : OptimizerState::kNone;
}

}  // namespace lossd::kernels
