// The part of a head that Algorithm::kFiltered and kAuto add to a chunk: candidates instead of a gradient,
// the decision on the device, and both ways to go on from it. docs/kernels/filtered.md has the whole picture.
#include "kernels/cuda/cuda_head.h"
#include "kernels/cuda/cuda_head_job.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/filtered/filter_plan.h"
#include "kernels/cuda/filtered/filtered.h"
#include "kernels/cuda/rows.h"

namespace lossd::kernels::cuda {

// Room goes with the rows a chunk has, not with those it could have; so does the cost of sorting.
FilterShape CudaHead::FilterShapeOfChunk(const Job& job) const {
  FilterShape shape = FilterShapeOf(config_, sizes_);
  shape.chunk_rows = job.layout.compact_rows;
  return shape;
}

absl::Status CudaHead::Branch(const Job& job, DeviceBranch& branch, absl::FunctionRef<absl::Status()> exact,
                              absl::FunctionRef<absl::Status()> filtered) {
  static_assert(static_cast<int32_t>(Decision::kFiltered) == 0, "what is not 0 is exact");
  const auto* decision = reinterpret_cast<const int32_t*>(job.slot->device_out.decision);
  return device_->options().host_branches ? BranchOnHost(decision, device_->compute(), exact, filtered)
                                          : branch.Enqueue(decision, device_->compute(), exact, filtered);
}

RowSelection CudaHead::SelectionOf(const Job& job, int64_t begin) const {
  const FilterBuffers& filter = workspace_.filter;
  return {job.chunk->options.filter_epsilon, filter.pool,
          static_cast<int32_t>(FilterShapeOfChunk(job).capacity()), &filter.counters->used,
          filter.rows + begin};
}

// Row results and, into the buffer of the hidden gradients, what the dx GEMM would leave there.
absl::Status CudaHead::FilteredForward(const Job& job, const RowLossParams& row) {
  const cudaStream_t stream = device_->compute();
  const FilterBuffers& filter = workspace_.filter;
  const LossOptions& options = job.chunk->options;
  const RowSelection selection = SelectionOf(job, 0);
  LOSSD_RETURN_IF_ERROR(Zero(filter.counters, sizeof(FilterCounters), stream));
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchSelectRows(row, selection, stream), "selection kernel");
  DecideParams decide = {.selection = selection,
                         .rows = row.rows,
                         .with_gradient = job.slot->device_in.with_gradient,
                         .decision = job.slot->device_out.decision};
  if (options.algorithm == Algorithm::kAuto && options.max_dropped_mass < 1.0f) {
    decide.max_dropped_mass = options.max_dropped_mass;
  }
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchDecide(decide, stream), "decision kernel");
  return Branch(
      job, job.slot->rows_branch,
      [&]() -> absl::Status {
        LOSSD_RETURN_IF_ERROR(
            Zero(job.slot->device_out.dropped_mass, row.rows * static_cast<int64_t>(sizeof(float)), stream));
        LOSSD_RETURN_IF_CUDA_ERROR(LaunchRowLoss(row, device_->limits(), stream), "row loss kernel");
        return job.hidden_gemm ? HiddenProduct(job) : absl::OkStatus();
      },
      [&]() -> absl::Status {
        LOSSD_RETURN_IF_ERROR(PrepareFilter(job, row));
        return FilterRows(job, row, 0);
      });
}

// What the rows need or write together: an empty list of kept elements, the sum of the weights.
absl::Status CudaHead::PrepareFilter(const Job& job, const RowLossParams& row) {
  const cudaStream_t stream = device_->compute();
  const FilterBuffers& filter = workspace_.filter;
  if (job.layout.accumulate) {
    const auto bytes = static_cast<size_t>(FilterShapeOfChunk(job).entries()) * sizeof(uint64_t);
    LOSSD_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(filter.keys, 0xff, bytes, stream), "cudaMemsetAsync");
  }
  if (row.smoothing == 0.0f || !job.hidden_gemm) return absl::OkStatus();
  const int64_t ld = sizes_.padded_hidden;
  const DeviceMatrix weight = {values_.compute_weight, config_.compute_dtype, ld, ld};
  LOSSD_RETURN_IF_ERROR(Zero(filter.weight_sum, ld * static_cast<int64_t>(sizeof(float)), stream));
  return ToStatus(LaunchColumnSum(weight, nullptr, row.class_weights, sizes_.vocab, 1.0f, filter.partials,
                                  filter.weight_sum, stream),
                  "column sum kernel");
}

absl::Status CudaHead::FilterRows(const Job& job, const RowLossParams& row, int64_t begin) {
  const FilterBuffers& filter = workspace_.filter;
  FilterRowsParams p;
  p.row = row;
  p.selection = SelectionOf(job, begin);
  p.hidden = HiddenRows(job, begin);
  p.weight = values_.compute_weight;
  p.ld = sizes_.padded_hidden;
  if (job.hidden_gemm) {
    p.gradient_dtype = HiddenGradientType(job);
    p.hidden_gradient = static_cast<uint8_t*>(workspace_.hidden_gradient) +
                        begin * p.ld * static_cast<int64_t>(SizeOf(p.gradient_dtype));
    p.gradient_scale = HiddenGradientScale(job);
    if (row.smoothing > 0.0f) p.weight_sum = filter.weight_sum;
  }
  p.with_gradient = job.slot->device_in.with_gradient + begin;
  p.accumulate = job.slot->device_in.accumulate + begin;
  p.dropped_mass = job.slot->device_out.dropped_mass + begin;
  if (job.layout.accumulate) {
    p.kept = {filter.keys, filter.coefs, &filter.counters->kept, RowBits(job.layout.compact_rows), begin};
  }
  return ToStatus(LaunchFilterRows(p, device_->compute()), "filter kernel");
}

absl::Status CudaHead::FilteredWeightGradient(const Job& job) {
  return Branch(
      job, job.slot->weight_branch, [&] { return WeightProduct(job); }, [&] { return AddKept(job); });
}

absl::Status CudaHead::AddKept(const Job& job) {
  const cudaStream_t stream = device_->compute();
  const FilterBuffers& filter = workspace_.filter;
  const int64_t rows = job.layout.compact_rows;
  const int64_t entries = FilterShapeOfChunk(job).entries();
  const LossOptions& options = job.chunk->options;
  const float scale = job.layout.unit * options.logit_scale;
  SortParams sort = {{filter.keys, filter.spare_keys},
                     {filter.coefs, filter.spare_coefs},
                     entries,
                     KeyBits(rows, sizes_.vocab),
                     filter.sort_scratch};
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchSortKept(sort, stream), "sort kernels");
  FilteredWeightParams p;
  p.keys = sort.keys[0];
  p.coefs = sort.coefs[0];
  p.count = entries;
  p.row_bits = RowBits(rows);
  p.keep = workspace_.keep;
  p.hidden = job.memory.hidden;
  p.dtype = config_.compute_dtype;
  p.ld = sizes_.padded_hidden;
  p.scale = scale;
  p.weight_gradient = gradients_.weight;
  p.bias_gradient = gradients_.bias;
  p.runs = filter.runs;
  p.counters = &filter.counters->runs;
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchFilteredWeight(p, device_->limits().multiprocessors, stream),
                             "filtered weight kernels");
  return options.label_smoothing > 0.0f ? AddUniform(job) : absl::OkStatus();
}

absl::Status CudaHead::AddUniform(const Job& job) {
  const cudaStream_t stream = device_->compute();
  const FilterBuffers& filter = workspace_.filter;
  const LossOptions& options = job.chunk->options;
  const int64_t ld = sizes_.padded_hidden;
  const float* coefs = job.slot->device_in.coef_loss;
  const DeviceMatrix hidden = {job.memory.hidden, config_.compute_dtype, ld, ld};
  LOSSD_RETURN_IF_ERROR(Zero(filter.hidden_sum, ld * static_cast<int64_t>(sizeof(float)), stream));
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchColumnSum(hidden, workspace_.keep, coefs, job.layout.compact_rows, 1.0f,
                                             filter.partials, filter.hidden_sum, stream),
                             "column sum kernel");
  UniformWeightParams p;
  p.hidden_sum = filter.hidden_sum;
  p.coefs = coefs;
  p.keep = workspace_.keep;
  p.rows = job.layout.compact_rows;
  p.class_weights = options.use_class_weights ? values_.class_weights : nullptr;
  p.vocab = sizes_.vocab;
  p.ld = ld;
  p.scale =
      -job.layout.unit * options.logit_scale * options.label_smoothing / static_cast<float>(sizes_.vocab);
  p.weight_gradient = gradients_.weight;
  p.bias_gradient = gradients_.bias;
  return ToStatus(LaunchUniformWeight(p, stream), "uniform weight kernels");
}

}  // namespace lossd::kernels::cuda
