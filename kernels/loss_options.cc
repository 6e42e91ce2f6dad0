#include "kernels/loss_options.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace lossd::kernels {
namespace {

absl::Status OutOfRange(absl::string_view field, absl::string_view range, float value) {
  return absl::InvalidArgumentError(absl::StrCat(field, " must be ", range, ", got ", value));
}

}  // namespace

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
  return absl::OkStatus();
}

}  // namespace lossd::kernels
