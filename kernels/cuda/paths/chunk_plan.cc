// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/chunk_plan.h"

#include <string>

#include "kernels/cuda/kernels/hopper/fused_choice.h"
#include "kernels/cuda/kernels/hopper/gradient_gemm_plan.h"
#include "kernels/cuda/paths/sample_plan.h"
#include "kernels/decision.h"

namespace lossd::kernels::cuda {
namespace {

absl::string_view WhyChunkIsExact(const LossOptions& options, const ChunkFacts& chunk,
                                  const PlanLimits& limits) {
  const absl::string_view reason = WhyExact(options, chunk.terms.any_coef_entropy);
  if (!reason.empty()) return reason;
  if (!chunk.wants_gradient) return "no gradient is wanted";
  if (chunk.terms.vocab + chunk.terms.elsewhere == 1 && options.label_smoothing > 0.0f)
    return "one class has no gradient";
  // Of a head that is split, what is kept is listed as samples are.
  return options.gradients == Gradients::kFiltered && !limits.split
             ? WhyNotFilteredOnDevice(limits.filter, limits.device)
             : WhyNotSampledOnDevice(limits.filter, limits.device);
}

absl::string_view WhyChunkIsNotFused(const ChunkFacts& chunk, bool filtered, const PlanLimits& limits) {
  const bool stored = limits.logits == Logits::kStored;
  if (filtered && (stored || limits.split)) return "filtered gradients are selected from the logits";
  if (limits.fused_loss == FusedLoss::kNever) return "switched off";
  const absl::string_view reason = hopper::WhyNotFused(
      chunk.terms, limits.filter.dtype, stored && chunk.wants_gradient, limits.device.fused_clusters);
  if (!reason.empty() || limits.fused_loss == FusedLoss::kWherePossible) return reason;
  return hopper::WhyNotFaster(chunk.padded_rows, limits.filter.vocab);
}

absl::string_view WhyLibraryGemms(const ChunkFacts& chunk, const PlanLimits& limits) {
  if (limits.logits == Logits::kRecomputed) return "block by block";
  if (!chunk.wants_gradient) return "no gradient is wanted";
  if (limits.fused_loss == FusedLoss::kNever) return "switched off";
  const absl::string_view reason = hopper::WhyNoGradientGemms(limits.filter.dtype, limits.device);
  if (!reason.empty() || limits.fused_loss == FusedLoss::kWherePossible) return reason;
  return hopper::WhyNoFasterGradientGemms(chunk.rows);
}

// What the device has yet to say.
absl::string_view WhatDecides(const ChunkPlan& plan) {
  switch (plan.gradients) {
    case Gradients::kExact:
      break;
    case Gradients::kFiltered:
      return "exact if there are too many candidates";
    case Gradients::kSampled:
      return "";
    case Gradients::kAuto:
      return "sampled or exact, by the predicted error";
  }
  return "";
}

}  // namespace

ChunkPlan PlanChunk(const LossOptions& options, const ChunkFacts& chunk, const PlanLimits& limits) {
  ChunkPlan plan;
  plan.why_exact = WhyChunkIsExact(options, chunk, limits);
  plan.gradients = GradientsOf(options, plan.why_exact);
  plan.filters_elements = limits.split && plan.filtered();
  const bool apart = plan.gradients == Gradients::kSampled ||
                     (plan.filters_elements && limits.logits == Logits::kRecomputed);
  plan.uniform_apart = apart && options.label_smoothing > 0.0f && options.softcap == 0.0f;
  plan.why_not_fused = WhyChunkIsNotFused(chunk, plan.filtered(), limits);
  plan.why_library_gemms = WhyLibraryGemms(chunk, limits);
  return plan;
}

std::vector<Choice> Describe(const ChunkPlan& plan) {
  const std::string product = plan.own_gemms() ? "own product" : "library product";
  const std::string why_product(plan.why_library_gemms);
  std::vector<Choice> choices = {
      GradientsChoice(plan.gradients, plan.exact() ? plan.why_exact : WhatDecides(plan)),
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
