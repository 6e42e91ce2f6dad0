// SPDX-License-Identifier: Apache-2.0
// Soft targets in double precision, from the formulas of docs/math.md, class by class.
#include <algorithm>
#include <cmath>
#include <cstddef>

#include "kernels/reference/reference.h"

namespace lossd::kernels::reference {

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
  // What is less is a rounding error of weights that add up to 1 (kernels/soft_targets.h).
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

}  // namespace lossd::kernels::reference
