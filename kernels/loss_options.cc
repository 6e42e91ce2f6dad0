#include "kernels/loss_options.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace lossd::kernels {
namespace {

absl::Status OutOfRange(absl::string_view field, absl::string_view range, float value) {
  return absl::InvalidArgumentError(absl::StrCat(field, " must be ", range, ", got ", value));
}

}  // namespace

absl::string_view Name(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kExact:
      return "exact";
    case Algorithm::kFiltered:
      return "filtered";
    case Algorithm::kAuto:
      return "auto";
    case Algorithm::kCut:
      return "cut";
  }
  return "";
}

float DefaultFilterEpsilon(Algorithm algorithm) {
  return algorithm == Algorithm::kCut ? 0.0f : LossOptions().filter_epsilon;
}

absl::Status Validate(const LossOptions& options) {
  if (!std::isfinite(options.logit_scale) || options.logit_scale == 0.0f) {
    return OutOfRange("logit_scale", "finite and not 0", options.logit_scale);
  }
  if (!std::isfinite(options.softcap) || options.softcap < 0.0f) {
    return OutOfRange("softcap", "finite and >= 0 (0: none)", options.softcap);
  }
  if (!(options.label_smoothing >= 0.0f && options.label_smoothing <= 1.0f)) {
    return OutOfRange("label_smoothing", "in [0, 1]", options.label_smoothing);
  }
  if (!std::isfinite(options.z_loss) || options.z_loss < 0.0f) {
    return OutOfRange("z_loss", "finite and >= 0", options.z_loss);
  }
  if (!(options.filter_epsilon >= 0.0f && options.filter_epsilon < 1.0f)) {
    return OutOfRange("filter_epsilon", "in [0, 1)", options.filter_epsilon);
  }
  if (!(options.max_dropped_mass >= 0.0f && options.max_dropped_mass <= 1.0f)) {
    return OutOfRange("max_dropped_mass", "in [0, 1]", options.max_dropped_mass);
  }
  return absl::OkStatus();
}

absl::string_view WhyNotFiltered(const LossOptions& options, bool any_grad_entropy) {
  const bool cut_exactly = options.algorithm == Algorithm::kCut && options.filter_epsilon == 0.0f;
  if (options.algorithm == Algorithm::kExact || cut_exactly) return "exact was asked for";
  if (any_grad_entropy) return "the gradient of an entropy is not proportional to probabilities";
  if (options.label_smoothing > 0.0f && options.softcap > 0.0f) {
    return "label smoothing under a softcap has no closed form";
  }
  return "";
}

Algorithm GradientsOf(const LossOptions& options, absl::string_view why_exact) {
  if (!why_exact.empty()) return Algorithm::kExact;
  return options.algorithm == Algorithm::kCut ? Algorithm::kFiltered : options.algorithm;
}

}  // namespace lossd::kernels
