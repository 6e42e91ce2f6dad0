#include "kernels/cuda/chunk_plan.h"

#include <string>

#include "kernels/cuda/hopper/fused_loss.h"

namespace lossd::kernels::cuda {
namespace {

absl::string_view WhyExact(const LossOptions& options, const RowLossParams& loss, const FilterShape& filter,
                           const DeviceLimits& limits) {
  const absl::string_view reason = WhyNotFiltered(options, loss.any_coef_entropy);
  if (!reason.empty()) return reason;
  if (!loss.write_gradient) return "no gradient is wanted";
  return WhyNotFilteredOnDevice(filter, limits);
}

absl::string_view WhyNotFused(const RowLossParams& loss, bool filtered, int clusters, FusedLoss choice) {
  if (filtered) return "filtered gradients are selected from the logits";
  if (choice == FusedLoss::kNever) return "switched off";
  const absl::string_view reason = hopper::WhyNotFused(loss, clusters);
  if (!reason.empty() || choice == FusedLoss::kWherePossible) return reason;
  return hopper::WhyNotFaster(loss);
}

// What the device has yet to say.
absl::string_view WhatDecides(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kExact:
      break;
    case Algorithm::kFiltered:
      return "exact if there are too many candidates";
    case Algorithm::kAuto:
      return "filtered or exact, by the mass that would be dropped";
  }
  return "";
}

}  // namespace

ChunkPlan PlanChunk(const LossOptions& options, const RowLossParams& loss, const FilterShape& filter,
                    const DeviceLimits& limits, FusedLoss fused_loss) {
  ChunkPlan plan;
  plan.why_exact = WhyExact(options, loss, filter, limits);
  if (plan.why_exact.empty()) plan.algorithm = options.algorithm;
  plan.why_not_fused = WhyNotFused(loss, plan.filtered(), limits.fused_clusters, fused_loss);
  return plan;
}

std::vector<Choice> Describe(const ChunkPlan& plan) {
  return {{.what = "gradients",
           .choice = std::string(Name(plan.algorithm)),
           .reason = std::string(plan.filtered() ? WhatDecides(plan.algorithm) : plan.why_exact)},
          {.what = "loss",
           .choice = plan.fused() ? "in the logits product" : "after the logits product",
           .reason = std::string(plan.why_not_fused)}};
}

}  // namespace lossd::kernels::cuda
