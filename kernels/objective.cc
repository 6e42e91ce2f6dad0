// SPDX-License-Identifier: Apache-2.0
// Names and checks of objectives, and the estimate of their slope (objective.h).
#include "kernels/objective.h"

#include <algorithm>
#include <cmath>

#include "kernels/errors/field_error.h"

namespace lossd::kernels {
namespace {

// A ratio rho that is not clipped is expected to stay below this value.
constexpr double kLargeRatio = 64.0;
// The derivatives of the estimators k2 and k3 are expected to stay below this value.
constexpr double kLargeDivergenceSlope = 8.0;

// The rule for a parameter that the kind does not use, e.g. "be 0 with reinforce".
std::string NoUse(ObjectiveKind kind) { return absl::StrCat("be 0 with ", Name(kind)); }

absl::Status ValidateClip(const Objective& objective) {
  const ObjectiveKind kind = objective.kind;
  if (!HasClip(kind)) {
    if (objective.clip_low != 0.0f) return errors::FieldError("clip_low", NoUse(kind), objective.clip_low);
    if (objective.clip_high != 0.0f) return errors::FieldError("clip_high", NoUse(kind), objective.clip_high);
  }
  if (!(objective.clip_low >= 0.0f && objective.clip_low <= 1.0f)) {
    return errors::FieldError("clip_low", "be in [0, 1]", objective.clip_low);
  }
  if (!(std::isfinite(objective.clip_high) && objective.clip_high >= 0.0f)) {
    return errors::FieldError("clip_high", "be finite and >= 0", objective.clip_high);
  }
  if (objective.dual_clip == 0.0f) return absl::OkStatus();
  if (kind != ObjectiveKind::kPpo) return errors::FieldError("dual_clip", NoUse(kind), objective.dual_clip);
  if (!(std::isfinite(objective.dual_clip) && objective.dual_clip > 1.0f)) {
    return errors::FieldError("dual_clip", "be 0 (none), or finite and > 1", objective.dual_clip);
  }
  return absl::OkStatus();
}

}  // namespace

absl::string_view Name(ObjectiveKind kind) {
  switch (kind) {
    case ObjectiveKind::kCrossEntropy:
      return "cross_entropy";
    case ObjectiveKind::kReinforce:
      return "reinforce";
    case ObjectiveKind::kImportanceSampling:
      return "importance_sampling";
    case ObjectiveKind::kPpo:
      return "ppo";
    case ObjectiveKind::kCispo:
      return "cispo";
    case ObjectiveKind::kDft:
      return "dft";
  }
  return "";
}

absl::string_view Name(KlEstimator kl) {
  switch (kl) {
    case KlEstimator::kK3:
      return "k3";
    case KlEstimator::kK1:
      return "k1";
    case KlEstimator::kK2:
      return "k2";
  }
  return "";
}

absl::Status Validate(const Objective& objective) {
  const ObjectiveKind kind = objective.kind;
  if (kind > kLastObjective) {
    return errors::FieldError("kind", "be an objective of this version", static_cast<int>(kind));
  }
  if (absl::Status status = ValidateClip(objective); !status.ok()) return status;
  if (objective.kl > KlEstimator::kK3) {
    return errors::FieldError("kl", "be k1, k2 or k3", static_cast<int>(objective.kl));
  }
  if (!(std::isfinite(objective.kl_coef) && objective.kl_coef >= 0.0f)) {
    return errors::FieldError("kl_coef", "be finite and >= 0", objective.kl_coef);
  }
  if (!std::isfinite(objective.entropy_bonus)) {
    return errors::FieldError("entropy_bonus", "be finite", objective.entropy_bonus);
  }
  if (objective.active()) return absl::OkStatus();
  if (objective.kl_coef != 0.0f) return errors::FieldError("kl_coef", NoUse(kind), objective.kl_coef);
  if (objective.entropy_bonus != 0.0f) {
    return errors::FieldError("entropy_bonus", NoUse(kind), objective.entropy_bonus);
  }
  return absl::OkStatus();
}

double LargestSlope(const Objective& objective, const ObjectiveNumbers<double>& row) {
  double slope = 1.0;
  if (NeedsOldLogprob(objective.kind)) {
    // l <= 0, so the ratio is at most exp(-l_old).
    slope = std::min(std::exp(std::min(-row.old_logprob, double{kLargestLogRatio})), kLargeRatio);
    if (HasClip(objective.kind) && (objective.kind == ObjectiveKind::kCispo || row.advantage > 0.0)) {
      slope = std::min(slope, 1.0 + double{objective.clip_high});
    } else if (objective.dual_clip != 0.0f) {
      slope = std::min(slope, double{objective.dual_clip});
    }
  }
  if (NeedsAdvantage(objective.kind)) slope *= std::fabs(row.advantage);
  if (!objective.needs_reference()) return slope;
  return slope + double{objective.kl_coef} * (objective.kl == KlEstimator::kK1 ? 1.0 : kLargeDivergenceSlope);
}

}  // namespace lossd::kernels
