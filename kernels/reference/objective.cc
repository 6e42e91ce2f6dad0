// SPDX-License-Identifier: Apache-2.0
// Parts of the loss of a row in double precision, by the formulas of docs/math.md: the objective, soft
// targets, and the divergence from a teacher.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "kernels/reference/reference.h"

namespace lossd::kernels::reference {

// ---- Objectives ----
// The objectives by the formulas of their papers, with derivatives with respect to the log-probability of the
// target. The backends use kernels/objective.h. The reference does not use it, so that tests compare two
// implementations.

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// exp(x), or NaN if the result is too large for fp32.
double BoundedExp(double x) { return x > double{kLargestLogRatio} ? kNan : std::exp(x); }

// The policy part of a loss. It is a function of l = log p_y, and of `stopped`, the value of l in terms
// without a gradient.
struct Policy {
  double loss = 0.0;
  double derivative = 0.0;  // of the loss with respect to l
  double total = 0.0;       // of the loss with respect to l and `stopped` together
  bool clipped = false;
};

// ratio: exp(l - old log p_y). stopped_ratio: the same with `stopped` in the place of l. Both may be NaN, if
// they are too large for fp32; the loss and the derivative are then NaN.
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
      const bool free = loss == whole;  // no limit counts; else the loss is constant in l
      const double derivative = std::isnan(ratio) ? kNan : free ? whole : 0.0;
      return {loss, derivative, derivative, !free};
    }
    case ObjectiveKind::kCispo: {
      const double weight = std::isnan(stopped_ratio) ? kNan : std::clamp(stopped_ratio, low, high);
      const bool free = weight == stopped_ratio;  // the weight is not clipped, so it depends on `stopped`
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
  // An error of a log-probability is a relative error of an exponential of it; so the sizes of
  // log-probabilities count as terms.
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

// ---- Soft targets, class by class ----

SoftTargets SoftTargetsOf(const LossOptions& options, const Softmax& soft, const Rows& rows, size_t n) {
  SoftTargets targets;
  if (options.rest == Rest::kNoTargets) return targets;
  const size_t v_count = soft.z.size();
  targets.weight.assign(v_count, 0.0);
  targets.named.assign(v_count, 0);
  double sum = 0.0;
  const auto count = static_cast<size_t>(rows.target_count);
  for (size_t i = n * count; i < (n + 1) * count; ++i) {
    if (rows.target_classes[i] < 0) continue;
    const auto v = static_cast<size_t>(rows.target_classes[i]);
    targets.weight[v] += rows.target_weights[i];
    targets.named[v] = 1;
    sum += rows.target_weights[i];
  }
  if (options.rest == Rest::kRenormalized) {
    for (double& q : targets.weight) q /= sum;
    sum = 1.0;
  }
  // A smaller rest is a rounding error of weights that add up to 1 (kernels/soft_targets.h).
  if (options.rest == Rest::kOneClass && 1.0 - sum >= kLeastRest) targets.rest = 1.0 - sum;
  targets.total = sum + targets.rest;
  targets.tail = 0.0;
  for (size_t v = 0; v < v_count; ++v) {
    if (targets.named[v] == 0) targets.tail += std::exp(soft.log_p[v]);
  }
  return targets;
}

double SoftTargets::Loss(const Softmax& soft) const {
  double loss = rest > 0.0 ? -rest * std::log(tail) : 0.0;
  for (size_t v = 0; v < weight.size(); ++v) {
    if (weight[v] > 0.0) loss -= weight[v] * soft.log_p[v];
  }
  return loss;
}

double SoftTargets::Slope(const Softmax& soft, size_t v) const {
  const double p = std::exp(soft.log_p[v]);
  if (named[v] != 0) return total * p - weight[v];
  return rest > 0.0 ? (total - rest / tail) * p : total * p;
}

double SoftTargets::Magnitude(const Softmax& soft, size_t v) const {
  const double p = std::exp(soft.log_p[v]);
  if (named[v] != 0) return total * p + weight[v];
  return rest > 0.0 ? (total + rest / tail) * p : total * p;
}

// ---- Divergences, as they are defined ----

namespace {

// log softmax(z / temperature).
std::vector<double> LogSoftmax(const std::vector<double>& z, double temperature) {
  const double top = *std::max_element(z.begin(), z.end());
  double sum = 0.0;
  for (const double logit : z) sum += std::exp((logit - top) / temperature);
  std::vector<double> log_p;
  for (const double logit : z) log_p.push_back((logit - top) / temperature - std::log(sum));
  return log_p;
}

// p log(p / other); 0 if p is 0.
double Times(double log_p, double log_other) {
  const double p = std::exp(log_p);
  return std::isinf(log_p) ? 0.0 : p * (log_p - log_other);
}

// log(exp(a) + exp(b)).
double LogOfSum(double a, double b) {
  const double top = std::max(a, b);
  if (std::isinf(top)) return top;
  return top + std::log(std::exp(a - top) + std::exp(b - top));
}

// The term f(p, q) of one class in a divergence (`value`), q times the term's derivative with respect to q
// (by_student), and p times its derivative with respect to p (by_teacher). p is the teacher's probability, q
// the student's.
struct ClassTerm {
  double value = 0.0;
  double by_student = 0.0;
  double by_teacher = 0.0;
};

ClassTerm TermOf(const Distillation& distillation, double log_p, double log_q) {
  const double p = std::exp(log_p);
  const double q = std::exp(log_q);
  switch (distillation.divergence) {
    case Divergence::kNone:
      return {};
    case Divergence::kForwardKl:
      return {.value = Times(log_p, log_q), .by_student = -p, .by_teacher = Times(log_p, log_q) + p};
    case Divergence::kReverseKl:
      return {.value = Times(log_q, log_p), .by_student = Times(log_q, log_p) + q, .by_teacher = -q};
    case Divergence::kJensenShannon: {
      const double beta = static_cast<double>(distillation.beta);
      const double log_m = LogOfSum(std::log(beta) + log_p, std::log(1.0 - beta) + log_q);
      return {.value = beta * Times(log_p, log_m) + (1.0 - beta) * Times(log_q, log_m),
              .by_student = (1.0 - beta) * Times(log_q, log_m),
              .by_teacher = beta * Times(log_p, log_m)};
    }
    case Divergence::kTotalVariation: {
      const double sign = q > p ? 0.5 : q < p ? -0.5 : 0.0;
      return {.value = 0.5 * std::fabs(p - q), .by_student = sign * q, .by_teacher = -sign * p};
    }
  }
  return {};
}

}  // namespace

// With y = z / temperature and D = sum_v f(p_v, q_v): dD/dy_k = q_k (f_k - sum_v q_v f_v), where f_v is the
// derivative of f with respect to q at class v. TermOf gives q f.
RowDivergence ComputeDivergence(const Distillation& distillation, const Softmax& student,
                                const Softmax& teacher) {
  const double temperature = static_cast<double>(distillation.temperature);
  const std::vector<double> log_q = LogSoftmax(student.z, temperature);
  const std::vector<double> log_p = LogSoftmax(teacher.z, temperature);
  std::vector<ClassTerm> terms;
  RowDivergence row;
  double mean = 0.0;
  double mean_teacher = 0.0;
  for (size_t v = 0; v < log_q.size(); ++v) {
    terms.push_back(TermOf(distillation, log_p[v], log_q[v]));
    row.value += terms[v].value;
    mean += terms[v].by_student;
    mean_teacher += terms[v].by_teacher;
  }
  for (size_t v = 0; v < log_q.size(); ++v) {
    const double q = std::exp(log_q[v]);
    const double p = std::exp(log_p[v]);
    row.gradient.push_back((terms[v].by_student - q * mean) / temperature);
    row.magnitude.push_back((std::fabs(terms[v].by_student) + q * (1.0 + std::fabs(mean)) + p) / temperature);
    row.slope +=
        std::fabs(terms[v].by_student - q * mean) + std::fabs(terms[v].by_teacher - p * mean_teacher);
  }
  return row;
}

}  // namespace lossd::kernels::reference
