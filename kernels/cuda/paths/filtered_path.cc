// SPDX-License-Identifier: Apache-2.0
// The paths of filtered gradients (filtered_path.h): first FilteredStoredPath, then FilteredRecomputedPath.
//
// A chunk has two lists (FilterBuffers). The pool has the candidates of all rows: classes whose probability
// may reach epsilon. It is filled while the logits of the rows are in memory. The kept list has the elements
// of ds that the filter keeps, of rows that are accumulated; FilterRows writes it, and AddKept computes dW
// from it. The device decides when the pool is complete: if the candidates do not fit the pool, the chunk is
// exact.
#include "kernels/cuda/paths/filtered_path.h"

#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/kernels/hopper/fused_loss.h"
#include "kernels/cuda/kernels/hopper/fused_rows.h"
#include "kernels/cuda/kernels/rows.h"
#include "kernels/cuda/paths/path_steps.h"

namespace lossd::kernels::cuda {

FilteredStoredPath::FilteredStoredPath(const PathContext& context)
    : context_(context), exact_(context), staged_(context), filter_(context, buffers_), top_(context) {
  Carver own(context.memory[Region::kFilter]), logits(context.memory[Region::kLogits]);
  buffers_ = FilterBuffers::Carve(FilterShapeOf(context.config, context.sizes), own, logits, logits);
}

absl::Status FilteredStoredPath::Prepare(const ChunkJob& job) {
  LOSSD_RETURN_IF_ERROR(staged_.Prepare(job, Kept::kNothing));
  return exact_.Prepare(job);
}

absl::Status FilteredStoredPath::Select(const ChunkJob& job) const {
  const auto step = [&](const RowBlock& rows, const LogitMatrix& logits) -> absl::Status {
    LOSSD_RETURN_IF_ERROR(top_.Select(job, rows, logits));
    return ToStatus(
        LaunchSelectRows({logits, job.terms, rows.in, rows.out, filter_.Selection(job, rows.begin)},
                         context_.device->compute()),
        "selection kernel");
  };
  return staged_.ForEachBlock(job, Kept::kNothing, step);
}

// Computes row results and dx, filtered or exact. Waits for download_idle, because Region::kHiddenGradient
// first holds logits of the last blocks, and then dx.
absl::Status FilteredStoredPath::Loss(const ChunkJob& job) {
  const cudaStream_t stream = context_.device->compute();
  LOSSD_RETURN_IF_ERROR(filter_.Begin(job));
  LOSSD_RETURN_IF_ERROR(Await(*context_.download_idle, stream));
  LOSSD_RETURN_IF_ERROR(Select(job));
  LOSSD_RETURN_IF_ERROR(filter_.Decide(job));
  return BranchByDecision(
      context_, job, *job.loss_branch,
      [&]() -> absl::Status {
        LOSSD_RETURN_IF_ERROR(ZeroDroppedMass(job, stream));
        LOSSD_RETURN_IF_ERROR(exact_.RowLoss(job, /*selects=*/false));
        return job.wants_hidden_gradient ? exact_.HiddenGemm(job) : absl::OkStatus();
      },
      [&]() -> absl::Status {
        LOSSD_RETURN_IF_ERROR(filter_.PrepareRows(job));
        return filter_.FilterRows(job, job.in, job.out, 0);
      });
}

absl::Status FilteredStoredPath::WeightGradient(const ChunkJob& job) {
  LOSSD_RETURN_IF_ERROR(ZeroDroppedHidden(context_, job));
  LOSSD_RETURN_IF_ERROR(BranchByDecision(
      context_, job, *job.weight_branch, [&] { return exact_.WeightGemm(job); },
      [&] { return filter_.AddKept(job); }));
  context_.accumulators->weight_is_zero = false;
  return absl::OkStatus();
}

std::vector<Choice> FilteredStoredPath::DescribeMemory(const ChunkPlan& plan) const {
  return {FilterChoice(context_)};
}

namespace {

Selection SelectionFor(const ChunkPlan& plan) {
  return plan.fused() ? Selection::kInPass : Selection::kFromLogits;
}

}  // namespace

FilteredRecomputedPath::FilteredRecomputedPath(const PathContext& context)
    : context_(context), exact_(context), filter_(context, buffers_), top_(context) {
  Carver own(context.memory[Region::kFilter]), arena(context.memory[Region::kLogits]);
  buffers_ = FilterBuffers::Carve(FilterShapeOf(context.config, context.sizes), own, arena, arena);
}

FilterBlock FilteredRecomputedPath::ChooseBlock(const ChunkPlan& plan, int64_t padded_rows) const {
  return ChooseFilterBlock(FilterShapeOf(context_.config, context_.sizes), SelectionFor(plan), padded_rows,
                           context_.sizes.arena_bytes);
}

absl::Status FilteredRecomputedPath::Prepare(const ChunkJob& job) {
  LOSSD_RETURN_IF_ERROR(exact_.Prepare(job));
  block_ = ChooseBlock(job.plan, job.padded_rows());
  if (context_.device->options().smallest_blocks) block_ = {kLeastBlockRows};
  if (job.plan.fused()) return absl::OkStatus();
  return ForEachRowBlock(job, block_.rows, [&](const RowBlock& rows) {
    return context_.device->gemms().Prepare(exact_.LogitsGemm(rows.in.padded_rows));
  });
}

// Computes row results, dx and the list of kept elements, block by block. The decision comes after the last
// block, when the selection of all rows is complete. If the candidates overflow their pool, the chunk becomes
// exact and none of this work is used.
absl::Status FilteredRecomputedPath::Loss(const ChunkJob& job) {
  const cudaStream_t stream = context_.device->compute();
  const FilterArena arena =
      FilterArena::Carve(FilterShapeOf(context_.config, context_.sizes), SelectionFor(job.plan), block_,
                         context_.memory[Region::kLogits]);
  LOSSD_RETURN_IF_ERROR(filter_.Begin(job));
  LOSSD_RETURN_IF_ERROR(filter_.PrepareRows(job));
  if (job.wants_hidden_gradient) LOSSD_RETURN_IF_ERROR(Await(*context_.download_idle, stream));
  const auto filter_block = [&](const RowBlock& rows) -> absl::Status {
    LOSSD_RETURN_IF_ERROR(job.plan.fused() ? SelectInPass(job, rows, arena)
                                           : SelectFromLogits(job, rows, arena));
    return filter_.FilterRows(job, rows.in, rows.out, rows.begin);
  };
  LOSSD_RETURN_IF_ERROR(ForEachRowBlock(job, block_.rows, filter_block));
  LOSSD_RETURN_IF_ERROR(filter_.Decide(job));
  return BranchByDecision(
      context_, job, *job.loss_branch,
      [&]() -> absl::Status {
        LOSSD_RETURN_IF_ERROR(ZeroDroppedMass(job, stream));
        return exact_.Statistics(job, /*selects=*/false);
      },
      [] { return absl::OkStatus(); });
}

absl::Status FilteredRecomputedPath::SelectInPass(const ChunkJob& job, const RowBlock& rows,
                                                  const FilterArena& arena) const {
  const cudaStream_t stream = context_.device->compute();
  const hopper::FusedLossParams p = exact_.FusedLoss(job, rows, arena.tiles);
  hopper::CandidateLists lists = arena.lists;
  lists.log2_epsilon = std::log2(job.options().filter_epsilon);
  LOSSD_RETURN_IF_CUDA_ERROR(
      hopper::LaunchFusedCandidates(p, lists, context_.device->limits().fused_clusters, stream),
      "fused loss kernels");
  return ToStatus(hopper::LaunchSelectListed(job.terms, rows.in, p.rows, lists,
                                             filter_.Selection(job, rows.begin), stream),
                  "selection kernel");
}

absl::Status FilteredRecomputedPath::SelectFromLogits(const ChunkJob& job, const RowBlock& rows,
                                                      const FilterArena& arena) const {
  const LogitMatrix logits = exact_.LogitsAt(arena.logits);
  LOSSD_RETURN_IF_ERROR(exact_.ClassBlockLogits(job, rows, 0, logits));
  LOSSD_RETURN_IF_ERROR(top_.Select(job, rows, logits));
  return ToStatus(LaunchSelectRows({logits, job.terms, rows.in, rows.out, filter_.Selection(job, rows.begin)},
                                   context_.device->compute()),
                  "selection kernel");
}

absl::Status FilteredRecomputedPath::HiddenGradient(const ChunkJob& job) { return Gradients(job); }

absl::Status FilteredRecomputedPath::WeightGradient(const ChunkJob& job) {
  return job.wants_hidden_gradient ? absl::OkStatus() : Gradients(job);
}

// An exact chunk: Loss has computed the rules of its rows, and exact_ computes both gradients. A filtered
// chunk: Loss has computed dx, and only dW is left.
absl::Status FilteredRecomputedPath::Gradients(const ChunkJob& job) const {
  const auto add_kept = [&]() -> absl::Status {
    if (!job.layout.accumulate) return absl::OkStatus();
    LOSSD_RETURN_IF_ERROR(ZeroDroppedHidden(context_, job));
    return filter_.AddKept(job);
  };
  LOSSD_RETURN_IF_ERROR(BranchByDecision(
      context_, job, *job.weight_branch, [&] { return exact_.Gradients(job); }, add_kept));
  if (job.layout.accumulate) context_.accumulators->weight_is_zero = false;
  return absl::OkStatus();
}

std::vector<Choice> FilteredRecomputedPath::DescribeMemory(const ChunkPlan& plan) const {
  const FilterBlock block = ChooseBlock(plan, context_.sizes.chunk_rows);
  const std::string listed =
      absl::StrCat("listed by the logits product, ", block.rows, " rows, up to ", block.listed, " of each");
  return {
      {.what = "candidates of filtered gradients",
       .choice = plan.fused() ? listed : absl::StrCat("selected from the logits of ", block.rows, " rows"),
       .reason = std::string(plan.why_not_fused)},
      FilterChoice(context_)};
}

}  // namespace lossd::kernels::cuda
