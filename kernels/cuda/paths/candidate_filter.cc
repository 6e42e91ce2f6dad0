// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/candidate_filter.h"

#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/kernels/rows.h"
#include "kernels/cuda/paths/kept_entries.h"

namespace lossd::kernels::cuda {
namespace {

// Room goes with the rows a chunk has, not with those it could have; so does the cost of sorting.
FilterShape ChunkShapeOf(const PathContext& context, const ChunkJob& job) {
  FilterShape shape = FilterShapeOf(context.config, context.sizes);
  shape.chunk_rows = job.rows();
  return shape;
}

}  // namespace

absl::Status CandidateFilter::Begin(const ChunkJob& job) const {
  return Zero(buffers_.counters, sizeof(FilterCounters), context_.device->compute());
}

RowSelection CandidateFilter::Selection(const ChunkJob& job, int64_t begin) const {
  return {job.options().filter_epsilon, buffers_.pool,
          static_cast<int32_t>(ChunkShapeOf(context_, job).capacity()), &buffers_.counters->used,
          buffers_.rows + begin};
}

absl::Status CandidateFilter::Decide(const ChunkJob& job) const {
  const DecideParams p = {Selection(job, 0), job.decision};
  return ToStatus(LaunchDecide(p, context_.device->compute()), "decision kernel");
}

absl::Status CandidateFilter::PrepareRows(const ChunkJob& job) const {
  if (job.layout.accumulate) {
    LOSSD_RETURN_IF_ERROR(ClearEntries(context_, buffers_.kept, ChunkShapeOf(context_, job).entries()));
  }
  if (job.terms.smoothing == 0.0f || !job.wants_hidden_gradient) return absl::OkStatus();
  return SumWeights(context_, job, buffers_.kept);
}

absl::Status CandidateFilter::FilterRows(const ChunkJob& job, const RowInputs& in, const RowResults& out,
                                         int64_t begin) const {
  const int64_t ld = context_.sizes.padded_hidden;
  FilterRowsParams p;
  p.terms = job.terms;
  p.in = in;
  p.out = out;
  p.selection = Selection(job, begin);
  p.dtype = context_.config.compute_dtype;
  p.hidden = static_cast<const uint8_t*>(job.hidden) + begin * ld * context_.sizes.element;
  p.weight = context_.weight;
  p.ld = ld;
  if (job.wants_hidden_gradient) {
    p.gradient_dtype = job.hidden_gradient_dtype;
    p.hidden_gradient = context_.memory[Region::kHiddenGradient] +
                        begin * ld * static_cast<int64_t>(SizeOf(p.gradient_dtype));
    p.gradient_scale = job.hidden_gradient_scale;
    if (job.terms.smoothing > 0.0f) p.weight_sum = buffers_.kept.weight_sum;
  }
  p.with_gradient = job.with_gradient + begin;
  p.accumulate = job.accumulate + begin;
  p.dropped_mass = job.dropped_mass + begin;
  if (job.layout.accumulate) {
    p.kept = {buffers_.kept.keys, buffers_.kept.coefs, &buffers_.counters->kept, RowBits(job.rows()), begin};
  }
  return ToStatus(LaunchFilterRows(p, context_.device->compute()), "filter kernel");
}

absl::Status CandidateFilter::AddKept(const ChunkJob& job) const {
  LOSSD_RETURN_IF_ERROR(AddEntries(context_, job, buffers_.kept, ChunkShapeOf(context_, job).entries(),
                                   &buffers_.counters->runs));
  return job.terms.smoothing > 0.0f ? AddUniform(context_, job, buffers_.kept) : absl::OkStatus();
}

absl::Status ZeroDroppedMass(const ChunkJob& job, cudaStream_t stream) {
  return Zero(job.dropped_mass, job.rows() * static_cast<int64_t>(sizeof(float)), stream);
}

}  // namespace lossd::kernels::cuda
