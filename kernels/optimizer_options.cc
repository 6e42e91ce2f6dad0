// SPDX-License-Identifier: Apache-2.0
#include "kernels/optimizer_options.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/errors/field_error.h"

namespace lossd::kernels {
namespace {

absl::Status OutOfRange(absl::string_view field, absl::string_view range, double value) {
  return errors::FieldError(field, absl::StrCat("be ", range), value);
}

bool FiniteNonNegative(double value) { return std::isfinite(value) && value >= 0.0; }

bool IsDecayRate(double value) { return value >= 0.0 && value < 1.0; }

absl::Status ValidateAdamW(const OptimizerOptions& options) {
  if (!IsDecayRate(options.beta1)) return OutOfRange("beta1", "in [0, 1)", options.beta1);
  if (!IsDecayRate(options.beta2)) return OutOfRange("beta2", "in [0, 1)", options.beta2);
  if (!FiniteNonNegative(options.epsilon)) {
    return OutOfRange("epsilon", "finite and >= 0", options.epsilon);
  }
  return absl::OkStatus();
}

absl::Status ValidateSgd(const OptimizerOptions& options) {
  if (!FiniteNonNegative(options.momentum)) {
    return OutOfRange("momentum", "finite and >= 0", options.momentum);
  }
  if (!std::isfinite(options.dampening)) return OutOfRange("dampening", "finite", options.dampening);
  if (!options.nesterov) return absl::OkStatus();
  if (options.momentum == 0.0) return OutOfRange("momentum", "> 0 with nesterov", options.momentum);
  if (options.dampening != 0.0) return OutOfRange("dampening", "0 with nesterov", options.dampening);
  return absl::OkStatus();
}

}  // namespace

absl::Status Validate(const OptimizerOptions& options) {
  if (!FiniteNonNegative(options.learning_rate)) {
    return OutOfRange("learning_rate", "finite and >= 0", options.learning_rate);
  }
  if (!FiniteNonNegative(options.weight_decay)) {
    return OutOfRange("weight_decay", "finite and >= 0", options.weight_decay);
  }
  if (!std::isfinite(options.grad_multiplier)) {
    return OutOfRange("grad_multiplier", "finite", options.grad_multiplier);
  }
  switch (options.kind) {
    case OptimizerOptions::Kind::kAdamW:
      return ValidateAdamW(options);
    case OptimizerOptions::Kind::kSgd:
      return ValidateSgd(options);
  }
  return OutOfRange("kind", "an OptimizerOptions::Kind", static_cast<int>(options.kind));
}

OptimizerState RequiredState(const OptimizerOptions& options) {
  if (options.kind == OptimizerOptions::Kind::kAdamW) return OptimizerState::kAdam;
  return options.momentum > 0.0 ? OptimizerState::kMomentum : OptimizerState::kNone;
}

}  // namespace lossd::kernels
