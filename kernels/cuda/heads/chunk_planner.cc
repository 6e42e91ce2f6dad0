// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/heads/chunk_planner.h"

namespace lossd::kernels::cuda {

ChunkPlanner::ChunkPlanner(const Device& device, const HeadConfig& config, const HeadSizes& sizes,
                           const HeadNorm* norm)
    : limits_{config.logits, PlannedShapeOf(config, sizes), device.limits(), device.options().fused_loss,
              sizes.is_split()},
      norm_(norm) {}

ChunkPlan ChunkPlanner::Plan(const LossOptions& options, const ChunkFacts& facts, DType hidden_dtype) const {
  ChunkPlan plan = PlanChunk(options, facts, limits_);
  norm_->Plan(facts, hidden_dtype, plan);
  return plan;
}

ChunkPlan ChunkPlanner::Next(const Chunk& chunk, const ChunkFacts& facts, ChunkSlot& slot) {
  const LossOptions& options = chunk.options;
  if (slot.trial.has_value()) backoff_.Note(*slot.trial, *slot.host_out.decision);
  slot.trial.reset();
  ChunkPlan plan = Plan(options, facts, chunk.hidden_dtype);
  if (plan.exact() || chunk.independent) return plan;
  if (backoff_.Next(options)) {
    slot.trial = options;
    return plan;
  }
  LossOptions exact = options;
  exact.gradients = Gradients::kExact;
  plan = Plan(exact, facts, chunk.hidden_dtype);
  plan.why_exact = "so were the chunks before it";
  return plan;
}

}  // namespace lossd::kernels::cuda
