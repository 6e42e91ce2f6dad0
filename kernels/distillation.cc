// SPDX-License-Identifier: Apache-2.0
// Names and checks of distillation options (distillation.h).
#include "kernels/distillation.h"

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"
#include "kernels/head_config.h"

namespace lossd::kernels {
namespace {

constexpr float kLeastReciprocal = std::numeric_limits<float>::min();

bool FiniteAndNotNegative(float value) { return std::isfinite(value) && value >= 0.0f; }

}  // namespace

absl::string_view Name(Divergence divergence) {
  switch (divergence) {
    case Divergence::kNone:
      return "none";
    case Divergence::kForwardKl:
      return "forward_kl";
    case Divergence::kReverseKl:
      return "reverse_kl";
    case Divergence::kJensenShannon:
      return "jensen_shannon";
    case Divergence::kTotalVariation:
      return "total_variation";
  }
  return "";
}

absl::Status Validate(const Distillation& distillation) {
  if (distillation.divergence > Divergence::kTotalVariation) {
    return errors::FieldError("distillation.divergence", "be a known Divergence",
                              static_cast<int>(distillation.divergence));
  }
  if (!distillation.used()) return absl::OkStatus();
  if (!(distillation.beta > 0.0f && distillation.beta < 1.0f)) {
    return errors::FieldError("distillation.beta", "be in (0, 1)", distillation.beta);
  }
  // The reciprocal of a smaller temperature overflows.
  if (!std::isfinite(distillation.temperature) || distillation.temperature < kLeastReciprocal) {
    return errors::FieldError("distillation.temperature", "be finite and >= 1.1754944e-38",
                              distillation.temperature);
  }
  if (!FiniteAndNotNegative(distillation.weight)) {
    return errors::FieldError("distillation.weight", "be finite and >= 0", distillation.weight);
  }
  if (!FiniteAndNotNegative(distillation.target_weight)) {
    return errors::FieldError("distillation.target_weight", "be finite and >= 0", distillation.target_weight);
  }
  const float scale = distillation.teacher_logit_scale;
  if (!std::isfinite(scale) || scale == 0.0f) {
    return errors::FieldError("distillation.teacher_logit_scale", "be finite and not 0", scale);
  }
  const float softcap = distillation.teacher_softcap;
  if (!std::isfinite(softcap) || (softcap != 0.0f && softcap < kLeastReciprocal)) {
    return errors::FieldError("distillation.teacher_softcap", "be 0 (none), or finite and >= 1.1754944e-38",
                              softcap);
  }
  return absl::OkStatus();
}

absl::Status ValidateTeacher(const HeadConfig& student, const HeadConfig& teacher, absl::string_view field) {
  if (teacher.vocab_size != student.vocab_size) {
    return errors::FieldError(field,
                              absl::StrCat("be a head with the student's vocab_size, ", student.vocab_size),
                              absl::StrCat("one with vocab_size ", teacher.vocab_size));
  }
  if (teacher.trainable) return errors::FieldError(field, "be a frozen head", "a trainable one");
  if (teacher.logits == Logits::kNone)
    return errors::FieldError(field, "be a head with logits", "an embedding alone");
  if (student.residency == Residency::kDevice || teacher.residency == Residency::kDevice) {
    return absl::OkStatus();
  }
  return errors::FieldError(field, "live on the device where the student lives in host memory",
                            "a head in host memory", absl::StatusCode::kUnimplemented);
}

}  // namespace lossd::kernels
