// SPDX-License-Identifier: Apache-2.0
#include "kernels/loss_options.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/errors/field_error.h"

namespace lossd::kernels {
namespace {

constexpr float kLeastThreshold = 1e-30f;
constexpr float kLeastSoftcap = std::numeric_limits<float>::min();
constexpr double kLargeLse = 100.0;  // what a log-sum-exp is expected to stay below

}  // namespace

absl::string_view Name(Gradients gradients) {
  switch (gradients) {
    case Gradients::kExact:
      return "exact";
    case Gradients::kFiltered:
      return "filtered";
    case Gradients::kSampled:
      return "sampled";
    case Gradients::kAuto:
      return "auto";
  }
  return "";
}

absl::Status Validate(const LossOptions& options) {
  if (!std::isfinite(options.logit_scale) || options.logit_scale == 0.0f) {
    return errors::FieldError("logit_scale", "be finite and not 0", options.logit_scale);
  }
  // The reciprocal of a smaller number overflows.
  if (!std::isfinite(options.softcap) || (options.softcap != 0.0f && options.softcap < kLeastSoftcap)) {
    return errors::FieldError("softcap", "be 0 (none), or finite and >= 1.1754944e-38", options.softcap);
  }
  if (!(options.label_smoothing >= 0.0f && options.label_smoothing <= 1.0f)) {
    return errors::FieldError("label_smoothing", "be in [0, 1]", options.label_smoothing);
  }
  if (!std::isfinite(options.z_loss) || options.z_loss < 0.0f) {
    return errors::FieldError("z_loss", "be finite and >= 0", options.z_loss);
  }
  if (options.gradients > Gradients::kAuto) {
    return errors::FieldError("gradients", "be exact, filtered, sampled or auto",
                              static_cast<int>(options.gradients));
  }
  if (!(options.filter_epsilon >= 0.0f && options.filter_epsilon < 1.0f)) {
    return errors::FieldError("filter_epsilon", "be in [0, 1)", options.filter_epsilon);
  }
  // Below, the reciprocal is no number of fp32.
  if (!(options.sample_threshold >= kLeastThreshold && options.sample_threshold <= 1.0f)) {
    return errors::FieldError("sample_threshold", "be in [1e-30, 1]", options.sample_threshold);
  }
  if (!std::isfinite(options.max_gradient_error) || options.max_gradient_error < 0.0f) {
    return errors::FieldError("max_gradient_error", "be finite and >= 0", options.max_gradient_error);
  }
  return absl::OkStatus();
}

double LargestSlope(const LossOptions& options, double largest_class_weight) {
  return std::max(1.0, largest_class_weight) + 2.0 * static_cast<double>(options.z_loss) * kLargeLse;
}

absl::string_view WhyExact(const LossOptions& options, bool any_grad_entropy) {
  if (options.gradients == Gradients::kExact) return "exact was asked for";
  if (options.gradients != Gradients::kFiltered) return "";
  if (any_grad_entropy) return "the gradient of an entropy is not proportional to probabilities";
  if (options.label_smoothing > 0.0f && options.softcap > 0.0f) {
    return "label smoothing under a softcap has no closed form";
  }
  return "";
}

Gradients GradientsOf(const LossOptions& options, absl::string_view why_exact) {
  return why_exact.empty() ? options.gradients : Gradients::kExact;
}

}  // namespace lossd::kernels
