// SPDX-License-Identifier: Apache-2.0
// Objectives replace the cross-entropy in a row's loss. An objective is a function of the log-probability of
// the row's target and of inputs that the trainer sends with each row. Objective has the parameters of an
// objective, ObjectiveNumbers the inputs of a row, and EvaluateObjective computes the function.
//
// The CPU and the GPU evaluate the same function from this file. To add an objective, add a value of
// ObjectiveKind, a case of Name, its needs (NeedsAdvantage, NeedsOldLogprob, HasClip, DefaultClip) and a case
// of EvaluateObjective. CONTRIBUTING.md lists the other files.
//
// Everything here is plain data and pure functions; thread-safe.
#ifndef LOSSD_KERNELS_OBJECTIVE_H_
#define LOSSD_KERNELS_OBJECTIVE_H_

#include <cmath>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#ifdef __CUDACC__
#define LOSSD_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define LOSSD_HOST_DEVICE inline
#endif

namespace lossd::kernels {

// The policy part of a row's loss. The values are those of lossd.v1.ObjectiveKind. Symbols as in
// docs/math.md: l is the log-probability of the target, A the advantage, rho = exp(l - l_old) the ratio, and
// sg(x) is x without a gradient.
enum class ObjectiveKind : uint8_t {
  kCrossEntropy,        // -l, with label smoothing and class weights: none of the objectives below
  kReinforce,           // -A l
  kImportanceSampling,  // -rho A
  kPpo,                 // max(-rho A, -clip(rho) A); with a dual clip at most -c A where A < 0
  kCispo,               // -sg(clip(rho)) A l
  kDft,                 // -sg(exp l) l
};
inline constexpr ObjectiveKind kLastObjective = ObjectiveKind::kDft;

// Estimators of the divergence from a reference, with d = l_ref - l.
enum class KlEstimator : uint8_t {
  kK1,  // -d
  kK2,  // d^2 / 2
  kK3,  // exp d - 1 - d
};

// An objective and its parameters.
struct Objective {
  ObjectiveKind kind = ObjectiveKind::kCrossEntropy;
  // kPpo and kCispo: the ratio is clipped to [1 - clip_low, 1 + clip_high]. clip_low is in [0, 1], clip_high
  // >= 0.
  float clip_low = 0.0f;
  float clip_high = 0.0f;
  float dual_clip = 0.0f;  // kPpo: c > 1; 0: none
  KlEstimator kl = KlEstimator::kK3;
  // >= 0: factor of the divergence from the reference, which is added to the loss
  float kl_coef = 0.0f;
  float entropy_bonus = 0.0f;  // finite: factor of the row's entropy, which is subtracted

  // Whether an objective replaces the cross-entropy.
  LOSSD_HOST_DEVICE bool active() const { return kind != ObjectiveKind::kCrossEntropy; }
  LOSSD_HOST_DEVICE bool needs_reference() const { return kl_coef != 0.0f; }
  friend bool operator==(const Objective&, const Objective&) = default;
};

absl::string_view Name(ObjectiveKind kind);  // "cross_entropy", "reinforce", "importance_sampling", ...
absl::string_view Name(KlEstimator kl);      // "k1", "k2", "k3"

// Which inputs a kind of objective needs with each row, and whether it clips the ratio.
LOSSD_HOST_DEVICE constexpr bool NeedsAdvantage(ObjectiveKind kind) {
  return kind != ObjectiveKind::kCrossEntropy && kind != ObjectiveKind::kDft;
}
LOSSD_HOST_DEVICE constexpr bool NeedsOldLogprob(ObjectiveKind kind) {
  return kind == ObjectiveKind::kImportanceSampling || kind == ObjectiveKind::kPpo ||
         kind == ObjectiveKind::kCispo;
}
LOSSD_HOST_DEVICE constexpr bool HasClip(ObjectiveKind kind) {
  return kind == ObjectiveKind::kPpo || kind == ObjectiveKind::kCispo;
}

// The default clip_low and clip_high of a kind: the ratio in [0.8, 1.2] for PPO, and in [0, 5] for CISPO.
struct ClipRange {
  float low = 0.0f;
  float high = 0.0f;
};
constexpr ClipRange DefaultClip(ObjectiveKind kind) {
  if (kind == ObjectiveKind::kPpo) return {0.2f, 0.2f};
  if (kind == ObjectiveKind::kCispo) return {1.0f, 4.0f};
  return {};
}

// INVALID_ARGUMENT if a parameter is outside its range, or is set but not used by the kind.
absl::Status Validate(const Objective& objective);

// The inputs of an objective that the trainer sends with one row. Inputs that the objective does not need are
// ignored.
template <typename Real>
struct ObjectiveNumbers {
  Real advantage = 0;
  Real old_logprob = 0;
  Real ref_logprob = 0;
};

// An estimate of the largest derivative of a row's loss with respect to the log-probability of its target,
// made before this log-probability is known. Backends use it to choose units in which gradients neither
// overflow nor vanish.
double LargestSlope(const Objective& objective, const ObjectiveNumbers<double>& row);

// The objective evaluated for one row, without the entropy bonus, which the caller adds.
template <typename Real>
struct ObjectiveTerm {
  Real loss = 0;   // before row weight and scale
  Real slope = 0;  // minus the derivative of `loss` with respect to the log-probability
  Real ratio = 0;  // rho; 0 if the objective has none
  // (rho - 1) - log rho, the k3 estimate of the divergence of the policy from the old policy; 0 without a
  // ratio
  Real old_kl = 0;
  Real ref_kl = 0;       // the estimate of the divergence from the reference; 0 without kl_coef
  bool clipped = false;  // the ratio was clipped
};

// Sums of ObjectiveTerm over the rows of a slice, a stream or a step, without rows of weight 0.
struct ObjectiveSums {
  int64_t rows = 0;
  int64_t clipped_rows = 0;
  double ratio = 0.0;
  double old_kl = 0.0;
  double ref_kl = 0.0;

  ObjectiveSums& operator+=(const ObjectiveSums& more) {
    rows += more.rows;
    clipped_rows += more.clipped_rows;
    ratio += more.ratio;
    old_kl += more.old_kl;
    ref_kl += more.ref_kl;
    return *this;
  }
  template <typename Real>
  void Add(const ObjectiveTerm<Real>& row) {
    ++rows;
    clipped_rows += row.clipped ? 1 : 0;
    ratio += static_cast<double>(row.ratio);
    old_kl += static_cast<double>(row.old_kl);
    ref_kl += static_cast<double>(row.ref_kl);
  }
};

// A ratio, or exp(d) of k3, above exp(88) overflows fp32: the row's loss is then NaN, and its slice fails.
inline constexpr float kLargestLogRatio = 88.0f;

// Evaluates the objective for a row whose target has the log-probability -nll. Real: float or double.
template <typename Real>
LOSSD_HOST_DEVICE ObjectiveTerm<Real> EvaluateObjective(const Objective& objective, Real nll,
                                                        const ObjectiveNumbers<Real>& row) {
  constexpr Real kNotFinite = static_cast<Real>(NAN);
  constexpr Real kLargest = static_cast<Real>(kLargestLogRatio);
  const Real advantage = row.advantage;
  ObjectiveTerm<Real> term;
  if (NeedsOldLogprob(objective.kind)) {
    const Real log_ratio = -nll - row.old_logprob;
    term.ratio = log_ratio <= kLargest ? std::exp(log_ratio) : kNotFinite;
    // For a target of probability 0 all other terms are 0, but old_kl is infinite. Such a row makes its slice
    // fail.
    term.old_kl = log_ratio <= kLargest ? std::expm1(log_ratio) - log_ratio : kNotFinite;
  }
  const Real low = Real(1) - static_cast<Real>(objective.clip_low);
  const Real high = Real(1) + static_cast<Real>(objective.clip_high);
  switch (objective.kind) {
    case ObjectiveKind::kCrossEntropy:
      term.slope = Real(1);
      term.loss = nll;
      break;
    case ObjectiveKind::kReinforce:
      term.slope = advantage;
      term.loss = advantage * nll;
      break;
    case ObjectiveKind::kImportanceSampling:
      term.slope = term.ratio * advantage;
      term.loss = -term.slope;
      break;
    case ObjectiveKind::kPpo: {
      Real counted = term.ratio;
      if (advantage > Real(0) && term.ratio > high) counted = high;
      if (advantage < Real(0) && term.ratio < low) counted = low;
      const Real most = static_cast<Real>(objective.dual_clip);
      if (advantage < Real(0) && most > Real(0) && term.ratio > most) counted = most;
      term.clipped = counted != term.ratio && term.ratio == term.ratio;
      term.loss = -counted * advantage;
      term.slope = term.clipped ? Real(0) : term.ratio * advantage;
      break;
    }
    case ObjectiveKind::kCispo: {
      Real counted = term.ratio;
      if (counted > high) counted = high;
      if (counted < low) counted = low;
      term.clipped = counted != term.ratio && term.ratio == term.ratio;
      term.slope = counted * advantage;
      term.loss = term.slope * nll;
      break;
    }
    case ObjectiveKind::kDft:
      term.slope = std::exp(-nll);
      term.loss = term.slope * nll;
      break;
  }
  if (!objective.needs_reference()) return term;
  const Real d = row.ref_logprob + nll;
  Real derivative = Real(-1);
  switch (objective.kl) {
    case KlEstimator::kK1:
      term.ref_kl = -d;
      break;
    case KlEstimator::kK2:
      term.ref_kl = d * d / Real(2);
      derivative = d;
      break;
    case KlEstimator::kK3:
      derivative = d <= kLargest ? std::expm1(d) : kNotFinite;
      term.ref_kl = derivative - d;
      break;
  }
  term.loss += static_cast<Real>(objective.kl_coef) * term.ref_kl;
  term.slope += static_cast<Real>(objective.kl_coef) * derivative;
  return term;
}

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_OBJECTIVE_H_
