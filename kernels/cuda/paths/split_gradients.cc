// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/split_gradients.h"

#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/kernels/split_rows.h"

namespace lossd::kernels::cuda {

RowMerger::RowMerger(const PathContext& context)
    : context_(context), rows_(SplitRows::Carve(context.sizes, context.memory[Region::kSplitRows])) {}

void RowMerger::UseIn(hopper::FusedRows& rows) const {
  if (context_.sizes.is_split()) rows.sum_reference = rows_.sum_reference;
}

absl::Status RowMerger::Merge(const LossTerms& terms, const RowInputs& in,
                              const hopper::FusedRows& rows) const {
  if (!context_.sizes.is_split()) return absl::OkStatus();
  const cudaStream_t stream = context_.device->compute();
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchRecordRows(terms, in, rows, rows_.own, stream), "record kernel");
  LOSSD_RETURN_IF_ERROR(context_.link->exchange->Gather(rows_.own, rows_.all,
                                                        in.rows * static_cast<int64_t>(sizeof(RowRecord))));
  return ToStatus(LaunchMergeRows(terms, in, rows_.all, context_.sizes.parts, rows, stream), "merge kernel");
}

absl::Status RowMerger::Merge(const LossTerms& terms, const RowInputs& in, RunningRow* rows) const {
  if (!context_.sizes.is_split()) return absl::OkStatus();
  const cudaStream_t stream = context_.device->compute();
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchRecordRows(terms, in, rows, rows_.own, stream), "record kernel");
  LOSSD_RETURN_IF_ERROR(context_.link->exchange->Gather(rows_.own, rows_.all,
                                                        in.rows * static_cast<int64_t>(sizeof(RowRecord))));
  return ToStatus(LaunchMergeRows(terms, in, rows_.all, context_.sizes.parts, rows, stream), "merge kernel");
}

GradientMerger::GradientMerger(const PathContext& context)
    : context_(context), rows_(SplitRows::Carve(context.sizes, context.memory[Region::kSplitRows])) {}

float* GradientMerger::variance(const ChunkJob& job) const {
  return context_.sizes.is_split() ? rows_.own_sums : job.variance;
}

float* GradientMerger::square(const ChunkJob& job) const {
  return context_.sizes.is_split() ? rows_.own_sums + job.rows() : job.square;
}

absl::Status GradientMerger::Sample(const SampleRowsParams& params) const {
  const cudaStream_t stream = context_.device->compute();
  if (!context_.sizes.is_split()) return ToStatus(LaunchSampleRows(params, stream), "sampling kernels");
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchSelectSamples(params, /*again=*/false, stream), "sampling kernels");
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchChooseLevel(params, stream), "level kernels");
  SampleCounters* const counters = params.list.counters;
  LOSSD_RETURN_IF_ERROR(context_.link->exchange->Gather(&counters->level, rows_.levels,
                                                        static_cast<int64_t>(sizeof(counters->level))));
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchRaiseLevel(counters, rows_.levels, context_.sizes.parts, stream),
                             "level kernel");
  return ToStatus(LaunchSelectSamples(params, /*again=*/true, stream), "sampling kernels");
}

absl::Status GradientMerger::GatherSums(int64_t n) const {
  return context_.link->exchange->Gather(rows_.own_sums, rows_.all_sums,
                                         n * static_cast<int64_t>(sizeof(float)));
}

absl::Status GradientMerger::MergeErrors(const ChunkJob& job) const {
  if (!context_.sizes.is_split()) return absl::OkStatus();
  const int64_t rows = job.rows();
  const cudaStream_t stream = context_.device->compute();
  LOSSD_RETURN_IF_ERROR(GatherSums(2 * rows));
  LOSSD_RETURN_IF_CUDA_ERROR(
      LaunchAddParts(rows_.all_sums, context_.sizes.parts, 2 * rows, rows_.own_sums, stream),
      "kernel over parts");
  const auto copy = [&](float* to, const float* from) {
    return ToStatus(cudaMemcpyAsync(to, from, static_cast<size_t>(rows) * sizeof(float),
                                    cudaMemcpyDeviceToDevice, stream),
                    "cudaMemcpyAsync");
  };
  LOSSD_RETURN_IF_ERROR(copy(job.variance, rows_.own_sums));
  return copy(job.square, rows_.own_sums + rows);
}

absl::Status GradientMerger::MergeDroppedMass(const ChunkJob& job) const {
  LOSSD_RETURN_IF_ERROR(GatherSums(job.rows()));
  return ToStatus(LaunchAddParts(rows_.all_sums, context_.sizes.parts, job.rows(), job.dropped_mass,
                                 context_.device->compute()),
                  "kernel over parts");
}

absl::Status GradientMerger::DecideListed(const ChunkJob& job, const SampleCounters* counters) const {
  LOSSD_RETURN_IF_ERROR(context_.link->exchange->Gather(&counters->highest, rows_.levels,
                                                        static_cast<int64_t>(sizeof(counters->highest))));
  const DecideListedParams p = {.levels = rows_.levels,
                                .parts = context_.sizes.parts,
                                .decision = job.decision,
                                .dropped_mass = job.dropped_mass,
                                .rows = job.rows()};
  return ToStatus(LaunchDecideListed(p, context_.device->compute()), "decision kernel");
}

absl::Status DecideSampled(const PathContext& context, const ChunkJob& job, SampleCounters* counters) {
  const LossOptions& options = job.options();
  DecideSampledParams p = {.rows = job.rows(),
                           .threshold = options.sample_threshold,
                           .decision = job.decision,
                           .chosen_threshold = job.sample_threshold};
  p.list = {.counters = counters, .variance = job.variance, .square = job.square};
  if (job.plan.gradients == Gradients::kAuto) p.max_error = options.max_gradient_error;
  return ToStatus(LaunchDecideSampled(p, context.device->compute()), "decision kernel");
}

SampledHiddenParams HiddenParamsOf(const PathContext& context, const ChunkJob& job, const SampleList& list,
                                   const RowInputs& in, int64_t begin) {
  SampledHiddenParams p;
  p.list = list;
  p.terms = job.terms;
  p.in = in;
  p.dtype = context.config.compute_dtype;
  p.weight = context.weight;
  p.ld = context.sizes.padded_hidden;
  if (!job.wants_hidden_gradient) return p;
  p.gradient_dtype = job.hidden_gradient_dtype;
  p.hidden_gradient =
      context.memory[Region::kHiddenGradient] + begin * p.ld * static_cast<int64_t>(SizeOf(p.gradient_dtype));
  p.gradient_scale = job.hidden_gradient_scale;
  return p;
}

}  // namespace lossd::kernels::cuda
