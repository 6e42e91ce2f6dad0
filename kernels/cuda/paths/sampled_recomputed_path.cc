// SPDX-License-Identifier: Apache-2.0
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
    : context_(context), exact_(context), merger_(context) {
  Carver own(context.memory[Region::kFilter]), hidden(context.memory[Region::kHiddenGradient]),
      arena(context.memory[Region::kLogits]);
  buffers_ = RecomputedSampleBuffers::Carve(ShapeOfHead(), own, hidden, arena);
}

FilterShape SampledRecomputedPath::ShapeOfHead() const {
  return FilterShapeOf(context_.config, context_.sizes);
}

FilterShape SampledRecomputedPath::ShapeOf(const ChunkJob& job) const {
  FilterShape shape = ShapeOfHead();
  shape.chunk_rows = job.rows();
  return shape;
}

int64_t SampledRecomputedPath::FirstEntry(const ChunkJob& job, int64_t row) const {
  return ShapeOf(job).entries() / job.rows() * row;
}

absl::Status SampledRecomputedPath::Prepare(const ChunkJob& job) {
  LOSSD_RETURN_IF_ERROR(exact_.Prepare(job));
  block_rows_ =
      context_.device->options().smallest_blocks ? kLeastBlockRows : BlockRows(job.plan, job.padded_rows());
  if (LeavesExponentials(job.plan)) return absl::OkStatus();
  return ForEachRowBlock(job, block_rows_, [&](const RowBlock& rows) {
    return context_.device->gemms().Prepare(exact_.LogitsGemm(rows.in.padded_rows));
  });
}

int64_t SampledRecomputedPath::BlockRows(const ChunkPlan& plan, int64_t rows) const {
  return ChooseSampledRows(PlannedShapeOf(context_.config, context_.sizes), ElementsOf(plan), rows,
                           context_.sizes.arena_bytes);
}

bool SampledRecomputedPath::LeavesExponentials(const ChunkPlan& plan) const {
  return plan.fused() && context_.config.compute_dtype == DType::kBFloat16;
}

DType SampledRecomputedPath::ElementsOf(const ChunkPlan& plan) const {
  return LeavesExponentials(plan) ? context_.config.compute_dtype : DType::kFloat32;
}

SampleList SampledRecomputedPath::ListOf(const ChunkJob& job, const RowBlock& rows) const {
  const int64_t first = FirstEntry(job, rows.begin);
  const int64_t last = FirstEntry(job, std::min(rows.begin + rows.in.rows, job.rows()));
  const bool sampled = job.plan.sampled();
  return {.entries = buffers_.listed,
          .first = static_cast<int32_t>(first),
          .capacity = static_cast<int32_t>(last - first),
          .rows = buffers_.rows + rows.begin,
          .counters = buffers_.counters,
          .variance = (sampled ? merger_.variance(job) : job.variance) + rows.begin,
          .square = (sampled ? merger_.square(job) : job.square) + rows.begin};
}

absl::Status SampledRecomputedPath::Loss(const ChunkJob& job) {
  const cudaStream_t stream = context_.device->compute();
  LOSSD_RETURN_IF_ERROR(Await(*context_.download_idle, stream));  // the list lies where dx does
  LOSSD_RETURN_IF_ERROR(Zero(buffers_.counters, sizeof(SampleCounters), stream));
  LOSSD_RETURN_IF_ERROR(Zero(buffers_.runs, sizeof(RunCounters), stream));
  LOSSD_RETURN_IF_ERROR(
      ForEachRowBlock(job, block_rows_, [&](const RowBlock& rows) { return SampleBlock(job, rows); }));
  if (job.plan.filters_elements) {
    LOSSD_RETURN_IF_ERROR(merger_.MergeDroppedMass(job));
    return merger_.DecideListed(job, buffers_.counters);
  }
  LOSSD_RETURN_IF_ERROR(merger_.MergeErrors(job));
  LOSSD_RETURN_IF_ERROR(DecideSampled(context_, job, buffers_.counters));
  if (context_.sizes.is_split()) return absl::OkStatus();  // the rules are there
  return BranchByDecision(
      context_, job, *job.loss_branch, [&] { return exact_.Statistics(job); },
      [] { return absl::OkStatus(); });
}

absl::StatusOr<LogitMatrix> SampledRecomputedPath::BlockElements(const ChunkJob& job,
                                                                 const RowBlock& rows) const {
  Device& device = *context_.device;
  const SampledBlockArena arena = SampledBlockArena::Carve(ShapeOfHead(), ElementsOf(job.plan), block_rows_,
                                                           context_.memory[Region::kLogits]);
  const DType compute = context_.config.compute_dtype;
  if (LeavesExponentials(job.plan) && context_.sizes.is_split()) {
    LOSSD_RETURN_IF_ERROR(exact_.SplitExponentials(job, rows, arena.tiles, arena.elements));
    return LogitMatrix{arena.elements, compute, context_.sizes.padded_vocab, context_.sizes.vocab};
  }
  if (LeavesExponentials(job.plan)) {
    const hopper::FusedLossParams p = exact_.FusedLoss(job, rows, arena.tiles);
    LOSSD_RETURN_IF_CUDA_ERROR(
        hopper::LaunchFusedExponentials(p, arena.elements, device.limits().fused_clusters, device.compute()),
        "fused loss kernels");
    return LogitMatrix{arena.elements, compute, context_.sizes.padded_vocab, context_.sizes.vocab};
  }
  const LogitMatrix logits = exact_.LogitsAt(arena.elements);
  const LogitMatrix gradient = InPlaceOf(logits, compute);
  LOSSD_RETURN_IF_ERROR(exact_.ClassBlockLogits(job, rows, 0, logits));
  if (context_.sizes.is_split()) {
    LOSSD_RETURN_IF_ERROR(
        exact_.SplitElements(job, rows, {logits, gradient, 0}, merger_.dropped_mass() + rows.begin));
    return gradient;
  }
  const RowLossParams loss = {logits, gradient, job.terms, rows.in, rows.out, !job.plan.uniform_apart};
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchRowLoss(loss, device.limits(), device.compute()), "row loss kernel");
  return gradient;
}

absl::Status SampledRecomputedPath::SampleBlock(const ChunkJob& job, const RowBlock& rows) const {
  const cudaStream_t stream = context_.device->compute();
  absl::StatusOr<LogitMatrix> elements = BlockElements(job, rows);
  if (!elements.ok()) return elements.status();
  LOSSD_RETURN_IF_ERROR(Zero(buffers_.counters, offsetof(SampleCounters, highest), stream));
  const SampleRowsParams sample = {.elements = *elements,
                                   .factors = LeavesExponentials(job.plan) ? exact_.factors() : nullptr,
                                   .terms = job.terms,
                                   .in = rows.in,
                                   .lse = rows.out.lse,
                                   .omega = job.omega + rows.begin,
                                   .with_gradient = job.with_gradient + rows.begin,
                                   .threshold = ThresholdOf(job),
                                   .list = ListOf(job, rows)};
  if (job.plan.sampled()) return merger_.Sample(sample);
  return ToStatus(LaunchSampleRows(sample, stream), "selection kernels");
}

absl::Status SampledRecomputedPath::GatherRows(const ChunkJob& job) const {
  const cudaStream_t stream = context_.device->compute();
  const int64_t entries = ShapeOf(job).entries();
  LOSSD_RETURN_IF_CUDA_ERROR(
      cudaMemcpyAsync(buffers_.entries, buffers_.listed, static_cast<size_t>(entries) * sizeof(SampleEntry),
                      cudaMemcpyDeviceToDevice, stream),
      "cudaMemcpyAsync");
  const SampleList list = {.entries = buffers_.entries, .rows = buffers_.rows};
  SampledHiddenParams p = HiddenParamsOf(context_, job, list, job.in, 0);
  if (job.plan.uniform_apart && job.wants_hidden_gradient) {
    LOSSD_RETURN_IF_ERROR(SumWeights(context_, job, buffers_.kept));
    p.weight_sum = buffers_.kept.weight_sum;
  }
  if (job.layout.accumulate) {
    LOSSD_RETURN_IF_ERROR(ClearEntries(context_, buffers_.kept, entries));
    p.accumulate = job.accumulate;
    p.kept = {buffers_.kept.keys, buffers_.kept.coefs, nullptr, RowBits(job.rows()), 0};
  }
  return ToStatus(LaunchSampledHidden(p, stream), "sampled gradient kernel");
}

absl::Status SampledRecomputedPath::WeightGradient(const ChunkJob& job) {
  return job.wants_hidden_gradient ? absl::OkStatus() : Gradients(job);
}

absl::Status SampledRecomputedPath::Gradients(const ChunkJob& job) const {
  LOSSD_RETURN_IF_ERROR(BranchByDecision(
      context_, job, *job.weight_branch, [&] { return exact_.Gradients(job); },
      [&] { return SampledGradients(job); }));
  if (job.layout.accumulate) context_.accumulators->weight_is_zero = false;
  return absl::OkStatus();
}

absl::Status SampledRecomputedPath::SampledGradients(const ChunkJob& job) const {
  LOSSD_RETURN_IF_ERROR(GatherRows(job));
  if (!job.layout.accumulate) return absl::OkStatus();
  LOSSD_RETURN_IF_ERROR(ZeroDroppedHidden(context_, job));
  LOSSD_RETURN_IF_ERROR(AddEntries(context_, job, buffers_.kept, ShapeOf(job).entries(), buffers_.runs));
  return job.plan.uniform_apart ? AddUniform(context_, job, buffers_.kept) : absl::OkStatus();
}

std::vector<Choice> SampledRecomputedPath::DescribeMemory(const ChunkPlan& plan) const {
  const FilterShape shape = ShapeOfHead();
  const absl::string_view reason = WhyNotSampledOnDevice(shape, context_.device->limits());
  return {{.what = "sampled gradients",
           .choice = reason.empty()
                         ? absl::StrCat("from the logits of ", BlockRows(plan, context_.sizes.chunk_rows),
                                        " rows, up to ", kPooledRecomputed, " classes a row on average")
                         : "never",
           .reason = std::string(reason)}};
}

}  // namespace lossd::kernels::cuda
