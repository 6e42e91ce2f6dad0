// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/heads/head_plan.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/cuda/heads/head_memory.h"
#include "kernels/cuda/kernels/hopper/tiles.h"
#include "kernels/cuda/paths/chunk_plan.h"
#include "kernels/cuda/paths/recomputed_plan.h"

namespace lossd::kernels::cuda {
namespace {

absl::string_view WhyNoMoreRows(const HeadSizes& sizes, int64_t most_rows) {
  if (sizes.chunk_rows >= most_rows) return "more are not allowed";
  const bool in_panels = sizes.fused && sizes.chunk_rows % hopper::kPanelRows == 0;
  return in_panels ? "the workspace holds no more whole panels" : "the workspace holds no more";
}

Choice BlocksChoice(const HeadConfig& config, const HeadSizes& sizes, const ChunkPlan& plan,
                    int multiprocessors) {
  const RecomputedShape shape = RecomputedShapeOf(config, sizes, multiprocessors).For(plan.fused());
  return DescribeBlocks(ChooseRecomputedBlocks(shape, sizes.chunk_rows, sizes.arena_bytes),
                        sizes.arena_bytes);
}

}  // namespace

Choice ChunkChoice(const HeadConfig& config, const HeadSizes& sizes, const MemoryBytes& memory,
                   int64_t max_chunk_rows) {
  int64_t most_rows = max_chunk_rows;
  if (config.logits == Logits::kRecomputed) most_rows = std::min(most_rows, kRecomputedChunkRows);
  return {.what = "chunk",
          .choice = absl::StrCat("up to ", sizes.chunk_rows, " rows"),
          .reason = std::string(WhyNoMoreRows(sizes, most_rows)),
          .workspace_bytes = memory[MemoryKind::kWorkspace]};
}

absl::StatusOr<HeadPlan> PlanHead(const HeadConfig& config, const PlanDevice& device) {
  if (absl::Status status = ValidateOn(config, device.replica.count); !status.ok()) return status;
  const int sms = device.limits.multiprocessors;
  HeadPlan plan;
  plan.sizes = SizesFor(config, device.workspace_bytes, device.max_chunk_rows, sms,
                        device.limits.fused_clusters > 0, device.replica);
  if (absl::Status status = CheckWorkspace(config, plan.sizes, sms); !status.ok()) return status;
  plan.memory = PlanMemory(config, plan.sizes, sms, device.replica);

  ChunkFacts full;
  full.terms.vocab = plan.sizes.vocab;
  full.terms.elsewhere = plan.sizes.all_classes - plan.sizes.vocab;
  full.rows = full.padded_rows = plan.sizes.chunk_rows;
  full.wants_gradient = true;
  const PlanLimits limits = {config.logits, PlannedShapeOf(config, plan.sizes), device.limits,
                             device.fused_loss, plan.sizes.is_split()};
  const ChunkPlan chunk = PlanChunk({.gradients = config.gradients}, full, limits);
  plan.choices = {ChunkChoice(config, plan.sizes, plan.memory, device.max_chunk_rows)};
  if (config.logits == Logits::kRecomputed) {
    plan.choices.push_back(BlocksChoice(config, plan.sizes, chunk, sms));
  }
  std::vector<Choice> kernels = Describe(chunk);
  std::move(kernels.begin(), kernels.end(), std::back_inserter(plan.choices));
  return plan;
}

}  // namespace lossd::kernels::cuda
