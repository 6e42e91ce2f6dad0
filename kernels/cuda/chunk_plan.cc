#include "kernels/cuda/chunk_plan.h"

#include <string>

#include "kernels/cuda/hopper/fused_loss.h"
#include "kernels/cuda/hopper/product_plan.h"
#include "kernels/decision.h"

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

absl::string_view WhyLibrary(const RowLossParams& loss, const DeviceLimits& limits, FusedLoss choice) {
  if (!loss.write_gradient) return "no gradient is wanted";
  if (choice == FusedLoss::kNever) return "switched off";
  const absl::string_view reason = hopper::WhyNoProducts(loss.dtype, limits);
  if (!reason.empty() || choice == FusedLoss::kWherePossible) return reason;
  return hopper::WhyNoFasterProducts(loss.rows);
}

// What the device has yet to say.
absl::string_view WhatDecides(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kExact:
    case Algorithm::kCut:
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
  plan.algorithm = GradientsOf(options, plan.why_exact);
  plan.why_not_fused = WhyNotFused(loss, plan.filtered(), limits.fused_clusters, fused_loss);
  plan.why_library_products = WhyLibrary(loss, limits, fused_loss);
  return plan;
}

ChunkPlan PlanCutChunk(const LossOptions& options, const RowLossParams& loss, const FilterShape& filter,
                       const DeviceLimits& limits, FusedLoss fused_loss) {
  ChunkPlan plan;
  plan.why_exact = WhyExact(options, loss, filter, limits);
  plan.algorithm = GradientsOf(options, plan.why_exact);
  RowLossParams statistics = loss;
  statistics.write_gradient = false;
  plan.why_not_fused = WhyNotFused(statistics, false, limits.fused_clusters, fused_loss);
  plan.why_library_products = "block by block";
  return plan;
}

std::vector<Choice> Describe(const ChunkPlan& plan) {
  const std::string product = plan.own_products() ? "own product" : "library product";
  const std::string why_product(plan.why_library_products);
  std::vector<Choice> choices = {
      GradientsChoice(plan.algorithm, plan.filtered() ? WhatDecides(plan.algorithm) : plan.why_exact),
      {.what = "loss",
       .choice = plan.fused() ? "in the logits product" : "after the logits product",
       .reason = std::string(plan.why_not_fused)},
      {.what = "hidden gradient", .choice = product, .reason = why_product},
      {.what = "weight gradient", .choice = product, .reason = why_product}};
  const auto add_norm = [&choices](absl::string_view what, const NormPlan& norm) {
    choices.push_back({.what = std::string(what),
                       .choice = std::string(Name(norm.rows)),
                       .reason = std::string(norm.reason)});
  };
  if (plan.norm.has_value()) add_norm("norm", *plan.norm);
  if (plan.norm_gradient.has_value()) add_norm("norm gradient", *plan.norm_gradient);
  return choices;
}

}  // namespace lossd::kernels::cuda
