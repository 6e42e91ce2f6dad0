// SPDX-License-Identifier: Apache-2.0
// The objectives of docs/math.md for one row, written down once more: by the formula of each paper, in double
// precision, with derivatives with respect to the log-probability of the target. kernels/objective.h is what
// the backends evaluate; nothing of its formulas is used here.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/reference/reference.h"

namespace lossd::kernels::reference {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// exp(x), or NaN where fp32 has no number for it.
double BoundedExp(double x) { return x > double{kLargestLogRatio} ? kNan : std::exp(x); }

// The policy part of a loss, as a function of l = log p_y and of `stopped`, what stands for l where there is
// no gradient.
struct Policy {
  double loss = 0.0;
  double derivative = 0.0;  // of the loss by l
  double total = 0.0;       // of the loss by l and `stopped` together
  bool clipped = false;
};

Policy PolicyOf(const Objective& objective, double l, double stopped, double advantage, double ratio,
                double stopped_ratio) {
  const double low = 1.0 - double{objective.clip_low}, high = 1.0 + double{objective.clip_high};
  switch (objective.kind) {
    case ObjectiveKind::kCrossEntropy:
      return {-l, -1.0, -1.0, false};
    case ObjectiveKind::kReinforce:
      return {-advantage * l, -advantage, -advantage, false};
    case ObjectiveKind::kImportanceSampling:
      return {-ratio * advantage, -ratio * advantage, -ratio * advantage, false};
    case ObjectiveKind::kPpo: {
      const double whole = -ratio * advantage;
      const double clipped = -std::clamp(ratio, low, high) * advantage;
      double loss = std::max(whole, clipped);
      const double most = -double{objective.dual_clip} * advantage;
      if (objective.dual_clip != 0.0f && advantage < 0.0) loss = std::min(loss, most);
      if (std::isnan(ratio)) loss = kNan;
      const bool free = loss == whole;
      const double derivative = std::isnan(ratio) ? kNan : free ? whole : 0.0;
      return {loss, derivative, derivative, !free};
    }
    case ObjectiveKind::kCispo: {
      const double weight = std::isnan(stopped_ratio) ? kNan : std::clamp(stopped_ratio, low, high);
      const bool free = weight == stopped_ratio;
      const double derivative = -weight * advantage;
      return {derivative * l, derivative, derivative * (1.0 + (free ? l : 0.0)), !free};
    }
    case ObjectiveKind::kDft: {
      const double p = std::exp(stopped);
      return {-p * l, -p, -p * (1.0 + l), false};
    }
  }
  return {};
}

}  // namespace

ObjectiveRow ComputeObjective(const Objective& objective, double l, double stopped, double advantage,
                              double old_logprob, double ref_logprob) {
  ObjectiveRow row;
  double stopped_ratio = 0.0;
  if (NeedsOldLogprob(objective.kind)) {
    row.ratio = BoundedExp(l - old_logprob);
    stopped_ratio = BoundedExp(stopped - old_logprob);
    row.old_kl = row.ratio - 1.0 - (l - old_logprob);
  }
  const Policy policy = PolicyOf(objective, l, stopped, advantage, row.ratio, stopped_ratio);
  row.clipped = policy.clipped;
  row.loss = policy.loss;
  row.policy_slope = policy.derivative;
  row.sensitivity = std::fabs(policy.total);
  const bool exponential = NeedsOldLogprob(objective.kind) || objective.kind == ObjectiveKind::kDft;
  row.slope_magnitude =
      std::fabs(policy.derivative) * (exponential ? 1.0 + std::fabs(l) + std::fabs(old_logprob) : 1.0);
  if (objective.kl_coef == 0.0f) return row;
  const double beta = double{objective.kl_coef};
  const double d = ref_logprob - l;
  double derivative = 0.0;
  switch (objective.kl) {
    case KlEstimator::kK1:
      row.ref_kl = l - ref_logprob;
      derivative = 1.0;
      break;
    case KlEstimator::kK2:
      row.ref_kl = 0.5 * d * d;
      derivative = -d;
      break;
    case KlEstimator::kK3:
      row.ref_kl = BoundedExp(d) - 1.0 - d;
      derivative = 1.0 - BoundedExp(d);
      break;
  }
  row.loss += beta * row.ref_kl;
  row.kl_slope = beta * derivative;
  const double of_difference = std::fabs(l) + std::fabs(ref_logprob);
  row.slope_magnitude +=
      beta * (objective.kl == KlEstimator::kK1   ? 1.0
              : objective.kl == KlEstimator::kK2 ? of_difference
                                                 : 1.0 + BoundedExp(d) * (1.0 + of_difference));
  row.sensitivity += beta * std::fabs(derivative);
  return row;
}

}  // namespace lossd::kernels::reference
