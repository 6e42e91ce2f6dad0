#include "kernels/cuda/paths/candidate_filter.h"

#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/kernels/rows.h"

namespace lossd::kernels::cuda {
namespace {

// Room goes with the rows a chunk has, not with those it could have; so does the cost of sorting.
FilterShape ShapeOf(const PathContext& context, const ChunkJob& job) {
  FilterShape shape = FilterShapeOf(context.config, context.sizes);
  shape.chunk_rows = job.rows();
  return shape;
}

// Where the mass that a chunk may drop is limited.
bool HasMassLimit(const LossOptions& options) {
  return options.gradients == Gradients::kAuto && options.max_dropped_mass < 1.0f;
}

}  // namespace

absl::Status CandidateFilter::Begin(const ChunkJob& job) const {
  return Zero(buffers_.counters, sizeof(FilterCounters), context_.device->compute());
}

RowSelection CandidateFilter::Selection(const ChunkJob& job, int64_t begin) const {
  return {job.options().filter_epsilon, buffers_.pool,
          static_cast<int32_t>(ShapeOf(context_, job).capacity()), &buffers_.counters->used,
          buffers_.rows + begin};
}

absl::Status CandidateFilter::Decide(const ChunkJob& job) const {
  DecideParams p = {.selection = Selection(job, 0),
                    .rows = job.rows(),
                    .with_gradient = job.with_gradient,
                    .decision = job.decision};
  if (HasMassLimit(job.options())) p.max_dropped_mass = job.options().max_dropped_mass;
  return ToStatus(LaunchDecide(p, context_.device->compute()), "decision kernel");
}

absl::Status CandidateFilter::Branch(const ChunkJob& job, DeviceBranch& branch,
                                     absl::FunctionRef<absl::Status()> exact,
                                     absl::FunctionRef<absl::Status()> filtered) const {
  static_assert(static_cast<int32_t>(Decision::kFiltered) == 0, "what is not 0 is exact");
  const auto* decision = reinterpret_cast<const int32_t*>(job.decision);
  const cudaStream_t stream = context_.device->compute();
  return context_.device->options().host_branches ? BranchOnHost(decision, stream, exact, filtered)
                                                  : branch.Enqueue(decision, stream, exact, filtered);
}

absl::Status CandidateFilter::PrepareRows(const ChunkJob& job) const {
  const cudaStream_t stream = context_.device->compute();
  if (job.layout.accumulate) {
    const auto bytes = static_cast<size_t>(ShapeOf(context_, job).entries()) * sizeof(uint64_t);
    LOSSD_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(buffers_.keys, 0xff, bytes, stream), "cudaMemsetAsync");
  }
  if (job.terms.smoothing == 0.0f || !job.wants_hidden_gradient) return absl::OkStatus();
  const int64_t ld = context_.sizes.padded_hidden;
  const DeviceMatrix weight = {const_cast<void*>(context_.weight), context_.config.compute_dtype, ld, ld};
  LOSSD_RETURN_IF_ERROR(Zero(buffers_.weight_sum, ld * static_cast<int64_t>(sizeof(float)), stream));
  return ToStatus(LaunchColumnSum(weight, nullptr, job.terms.class_weights, context_.sizes.vocab, 1.0f,
                                  buffers_.partials, buffers_.weight_sum, stream),
                  "column sum kernel");
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
    if (job.terms.smoothing > 0.0f) p.weight_sum = buffers_.weight_sum;
  }
  p.with_gradient = job.with_gradient + begin;
  p.accumulate = job.accumulate + begin;
  p.dropped_mass = job.dropped_mass + begin;
  if (job.layout.accumulate) {
    p.kept = {buffers_.keys, buffers_.coefs, &buffers_.counters->kept, RowBits(job.rows()), begin};
  }
  return ToStatus(LaunchFilterRows(p, context_.device->compute()), "filter kernel");
}

absl::Status CandidateFilter::AddKept(const ChunkJob& job) const {
  const cudaStream_t stream = context_.device->compute();
  const int64_t rows = job.rows();
  const int64_t entries = ShapeOf(context_, job).entries();
  SortParams sort = {{buffers_.keys, buffers_.spare_keys},
                     {buffers_.coefs, buffers_.spare_coefs},
                     entries,
                     KeyBits(rows, context_.sizes.vocab),
                     buffers_.sort_scratch};
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchSortKept(sort, stream), "sort kernels");
  FilteredWeightParams p;
  p.keys = sort.keys[0];
  p.coefs = sort.coefs[0];
  p.count = entries;
  p.row_bits = RowBits(rows);
  p.keep = context_.keep;
  p.hidden = job.hidden;
  p.dtype = context_.config.compute_dtype;
  p.ld = context_.sizes.padded_hidden;
  p.scale = job.weight_gradient_scale;
  p.weight_gradient = context_.accumulators->weight;
  p.bias_gradient = context_.accumulators->bias;
  p.runs = buffers_.runs;
  p.counters = &buffers_.counters->runs;
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchFilteredWeight(p, context_.device->limits().multiprocessors, stream),
                             "filtered weight kernels");
  return job.terms.smoothing > 0.0f ? AddUniform(job) : absl::OkStatus();
}

// The part of label smoothing that every class has.
absl::Status CandidateFilter::AddUniform(const ChunkJob& job) const {
  const cudaStream_t stream = context_.device->compute();
  const int64_t ld = context_.sizes.padded_hidden;
  const float* coefs = job.in.coef_loss;
  const DeviceMatrix hidden = {job.hidden, context_.config.compute_dtype, ld, ld};
  LOSSD_RETURN_IF_ERROR(Zero(buffers_.hidden_sum, ld * static_cast<int64_t>(sizeof(float)), stream));
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchColumnSum(hidden, context_.keep, coefs, job.rows(), 1.0f,
                                             buffers_.partials, buffers_.hidden_sum, stream),
                             "column sum kernel");
  UniformWeightParams p;
  p.hidden_sum = buffers_.hidden_sum;
  p.coefs = coefs;
  p.keep = context_.keep;
  p.rows = job.rows();
  p.class_weights = job.terms.class_weights;
  p.vocab = context_.sizes.vocab;
  p.ld = ld;
  p.scale = -job.layout.unit * job.terms.scale * job.terms.smoothing / static_cast<float>(p.vocab);
  p.weight_gradient = context_.accumulators->weight;
  p.bias_gradient = context_.accumulators->bias;
  return ToStatus(LaunchUniformWeight(p, stream), "uniform weight kernels");
}

absl::Status ZeroDroppedMass(const ChunkJob& job, cudaStream_t stream) {
  return Zero(job.dropped_mass, job.rows() * static_cast<int64_t>(sizeof(float)), stream);
}

}  // namespace lossd::kernels::cuda
