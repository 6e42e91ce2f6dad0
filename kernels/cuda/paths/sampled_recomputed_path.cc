#include "kernels/cuda/paths/sampled_recomputed_path.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/kernels/hopper/fused_loss.h"
#include "kernels/cuda/kernels/row_loss.h"
#include "kernels/cuda/kernels/rows.h"
#include "kernels/cuda/paths/decision_branch.h"
#include "kernels/cuda/paths/kept_entries.h"
#include "kernels/cuda/paths/sampled_rows.h"

namespace lossd::kernels::cuda {

SampledRecomputedPath::SampledRecomputedPath(const PathContext& context)
    : context_(context), exact_(context) {
  const FilterShape shape = FilterShapeOf(context.config, context.sizes);
  Carver own(context.memory[Region::kFilter]), none(nullptr), arena(context.memory[Region::kLogits]);
  lists_ = FilterBuffers::Carve(shape, none, arena, arena);
  block_buffers_ = BlockSampleBuffers::Carve(shape, own);
}

void SampledRecomputedPath::Claim(const HeadConfig& config, const HeadSizes& sizes, PathClaims& claims) {
  RecomputedPath::Claim(config, sizes, claims);
  Carver own(nullptr);
  BlockSampleBuffers::Carve(FilterShapeOf(config, sizes), own);
  claims.Claim(Region::kFilter, own.used());
}

FilterShape SampledRecomputedPath::ShapeOf(const ChunkJob& job) const {
  FilterShape shape = FilterShapeOf(context_.config, context_.sizes);
  shape.chunk_rows = job.rows();
  return shape;
}

int64_t SampledRecomputedPath::FirstEntry(const ChunkJob& job, int64_t row) const {
  return ShapeOf(job).entries() / job.rows() * row;
}

absl::Status SampledRecomputedPath::Prepare(const ChunkJob& job) {
  LOSSD_RETURN_IF_ERROR(exact_.Prepare(job));
  const FilterShape shape = FilterShapeOf(context_.config, context_.sizes);
  const FilterBlock block =
      ChooseFilterBlock(shape, SelectionFor(job.plan), job.padded_rows(), context_.sizes.arena_bytes);
  const int64_t most = std::max<int64_t>(block_buffers_.capacity / kPooledRecomputed / 8 * 8, 8);
  block_rows_ = context_.device->options().smallest_blocks ? kLeastBlockRows : std::min(block.rows, most);
  if (LeavesExponentials(job.plan)) return absl::OkStatus();
  return ForEachRowBlock(job, block_rows_, [&](const RowBlock& rows) {
    return context_.device->gemms().Prepare(exact_.LogitsGemm(rows.in.padded_rows));
  });
}

bool SampledRecomputedPath::LeavesExponentials(const ChunkPlan& plan) const {
  return plan.fused() && context_.config.compute_dtype == DType::kBFloat16;
}

SampleList SampledRecomputedPath::ListOf(const ChunkJob& job, const RowBlock& rows) const {
  const int64_t last = std::min(rows.begin + rows.in.rows, job.rows());
  const int64_t share = FirstEntry(job, last) - FirstEntry(job, rows.begin);
  return {.entries = block_buffers_.entries,
          .capacity = static_cast<int32_t>(std::min(block_buffers_.capacity, share)),
          .rows = block_buffers_.rows,
          .counters = block_buffers_.counters,
          .variance = job.variance + rows.begin,
          .square = job.square + rows.begin};
}

absl::Status SampledRecomputedPath::Loss(const ChunkJob& job) {
  LOSSD_RETURN_IF_ERROR(Zero(block_buffers_.counters, sizeof(SampleCounters), context_.device->compute()));
  LOSSD_RETURN_IF_ERROR(PrepareLists(job));
  if (job.wants_hidden_gradient) {
    LOSSD_RETURN_IF_ERROR(Await(*context_.download_idle, context_.device->compute()));
  }
  const auto sample = [&](const RowBlock& rows) -> absl::Status {
    LOSSD_RETURN_IF_ERROR(SampleBlock(job, rows));
    return GatherBlock(job, rows);
  };
  LOSSD_RETURN_IF_ERROR(ForEachRowBlock(job, block_rows_, sample));
  LOSSD_RETURN_IF_ERROR(DecideSampled(context_, job, block_buffers_.counters));
  return BranchByDecision(
      context_, job, *job.loss_branch, [&] { return exact_.Statistics(job); },
      [] { return absl::OkStatus(); });
}

absl::Status SampledRecomputedPath::PrepareLists(const ChunkJob& job) const {
  LOSSD_RETURN_IF_ERROR(Zero(block_buffers_.runs, sizeof(RunCounters), context_.device->compute()));
  if (job.layout.accumulate) {
    LOSSD_RETURN_IF_ERROR(ClearEntries(context_, lists_.kept, ShapeOf(job).entries()));
  }
  const bool sum = job.plan.uniform_apart && job.wants_hidden_gradient;
  return sum ? SumWeights(context_, job, lists_.kept) : absl::OkStatus();
}

absl::StatusOr<LogitMatrix> SampledRecomputedPath::BlockElements(const ChunkJob& job,
                                                                 const RowBlock& rows) const {
  Device& device = *context_.device;
  const FilterArena arena =
      FilterArena::Carve(FilterShapeOf(context_.config, context_.sizes), SelectionFor(job.plan),
                         {block_rows_}, context_.memory[Region::kLogits]);
  const DType compute = context_.config.compute_dtype;
  if (LeavesExponentials(job.plan)) {
    const hopper::FusedLossParams p = exact_.FusedLoss(job, rows, arena.tiles);
    LOSSD_RETURN_IF_CUDA_ERROR(
        hopper::LaunchFusedExponentials(p, arena.logits, device.limits().fused_clusters, device.compute()),
        "fused loss kernels");
    return LogitMatrix{arena.logits, compute, context_.sizes.padded_vocab, context_.sizes.vocab};
  }
  const LogitMatrix logits = exact_.LogitsAt(arena.logits);
  const LogitMatrix gradient = InPlaceOf(logits, compute);
  LOSSD_RETURN_IF_ERROR(exact_.BlockLogits(job, rows, logits));
  const RowLossParams loss = {logits, gradient, job.terms, rows.in, rows.out, !job.plan.uniform_apart};
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchRowLoss(loss, device.limits(), device.compute()), "row loss kernel");
  return gradient;
}

absl::Status SampledRecomputedPath::SampleBlock(const ChunkJob& job, const RowBlock& rows) const {
  const cudaStream_t stream = context_.device->compute();
  absl::StatusOr<LogitMatrix> elements = BlockElements(job, rows);
  if (!elements.ok()) return elements.status();
  LOSSD_RETURN_IF_ERROR(Zero(block_buffers_.counters, offsetof(SampleCounters, highest), stream));
  const SampleRowsParams sample = {.elements = *elements,
                                   .factors = LeavesExponentials(job.plan) ? exact_.factors() : nullptr,
                                   .terms = job.terms,
                                   .in = rows.in,
                                   .lse = rows.out.lse,
                                   .omega = job.omega + rows.begin,
                                   .with_gradient = job.with_gradient + rows.begin,
                                   .threshold = job.options().sample_threshold,
                                   .list = ListOf(job, rows)};
  return ToStatus(LaunchSampleRows(sample, stream), "sampling kernels");
}

absl::Status SampledRecomputedPath::GatherBlock(const ChunkJob& job, const RowBlock& rows) const {
  SampledHiddenParams p = HiddenParamsOf(context_, job, ListOf(job, rows), rows.in, rows.begin);
  if (job.plan.uniform_apart && job.wants_hidden_gradient) p.weight_sum = lists_.kept.weight_sum;
  if (job.layout.accumulate) {
    const int64_t first = FirstEntry(job, rows.begin);
    p.accumulate = job.accumulate + rows.begin;
    p.kept = {lists_.kept.keys + first, lists_.kept.coefs + first, nullptr, RowBits(job.rows()), rows.begin};
  }
  return ToStatus(LaunchSampledHidden(p, context_.device->compute()), "sampled gradient kernel");
}

absl::Status SampledRecomputedPath::WeightGradient(const ChunkJob& job) {
  return job.wants_hidden_gradient ? absl::OkStatus() : Gradients(job);
}

absl::Status SampledRecomputedPath::Gradients(const ChunkJob& job) const {
  LOSSD_RETURN_IF_ERROR(BranchByDecision(
      context_, job, *job.weight_branch, [&] { return exact_.Gradients(job); },
      [&] { return AddKept(job); }));
  if (job.layout.accumulate) context_.accumulators->weight_is_zero = false;
  return absl::OkStatus();
}

absl::Status SampledRecomputedPath::AddKept(const ChunkJob& job) const {
  if (!job.layout.accumulate) return absl::OkStatus();
  LOSSD_RETURN_IF_ERROR(ZeroDroppedHidden(context_, job));
  LOSSD_RETURN_IF_ERROR(AddEntries(context_, job, lists_.kept, ShapeOf(job).entries(), block_buffers_.runs));
  return job.plan.uniform_apart ? AddUniform(context_, job, lists_.kept) : absl::OkStatus();
}

std::vector<Choice> SampledRecomputedPath::DescribeMemory(const ChunkPlan& plan) const {
  const FilterShape shape = FilterShapeOf(context_.config, context_.sizes);
  const FilterBlock block =
      ChooseFilterBlock(shape, SelectionFor(plan), context_.sizes.chunk_rows, context_.sizes.arena_bytes);
  const absl::string_view reason = WhyNotSampledOnDevice(shape, context_.device->limits());
  return {{.what = "sampled gradients",
           .choice = reason.empty() ? absl::StrCat("from the logits of ", block.rows, " rows, up to ",
                                                   kPooledRecomputed, " classes a row on average")
                                    : "never",
           .reason = std::string(reason)}};
}

}  // namespace lossd::kernels::cuda
