// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/kept_entries.h"

#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/kernels/rows.h"

namespace lossd::kernels::cuda {

absl::Status ZeroDroppedHidden(const PathContext& context, const ChunkJob& job) {
  const int64_t ld = context.sizes.padded_hidden;
  const DeviceMatrix hidden = {job.hidden, context.config.compute_dtype, ld, ld};
  return ToStatus(LaunchZeroDroppedRows(hidden, context.keep, job.rows(), context.device->compute()),
                  "kernel over hidden states");
}

absl::Status ClearEntries(const PathContext& context, const KeptBuffers& buffers, int64_t count) {
  return ToStatus(cudaMemsetAsync(buffers.keys, 0xff, static_cast<size_t>(count) * sizeof(uint64_t),
                                  context.device->compute()),
                  "cudaMemsetAsync");
}

absl::Status AddEntries(const PathContext& context, const ChunkJob& job, const KeptBuffers& buffers,
                        int64_t count, RunCounters* runs) {
  const cudaStream_t stream = context.device->compute();
  SortParams sort = {{buffers.keys, buffers.spare_keys},
                     {buffers.coefs, buffers.spare_coefs},
                     count,
                     KeyBits(job.rows(), context.sizes.vocab),
                     buffers.sort_scratch};
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchSortKept(sort, stream), "sort kernels");
  FilteredWeightParams p;
  p.keys = sort.keys[0];
  p.coefs = sort.coefs[0];
  p.count = count;
  p.row_bits = RowBits(job.rows());
  p.keep = context.keep;
  p.hidden = job.hidden;
  p.dtype = context.config.compute_dtype;
  p.ld = context.sizes.padded_hidden;
  p.scale = job.weight_gradient_scale;
  p.weight_gradient = context.accumulators->weight;
  p.bias_gradient = context.accumulators->bias;
  p.runs = buffers.runs;
  p.counters = runs;
  return ToStatus(LaunchFilteredWeight(p, context.device->limits().multiprocessors, stream),
                  "filtered weight kernels");
}

absl::Status SumWeights(const PathContext& context, const ChunkJob& job, const KeptBuffers& buffers) {
  const cudaStream_t stream = context.device->compute();
  const int64_t ld = context.sizes.padded_hidden;
  const DeviceMatrix weight = {const_cast<void*>(context.weight), context.config.compute_dtype, ld, ld};
  LOSSD_RETURN_IF_ERROR(Zero(buffers.weight_sum, ld * static_cast<int64_t>(sizeof(float)), stream));
  return ToStatus(LaunchColumnSum(weight, nullptr, job.terms.class_weights, context.sizes.vocab, 1.0f,
                                  buffers.partials, buffers.weight_sum, stream),
                  "column sum kernel");
}

absl::Status AddUniform(const PathContext& context, const ChunkJob& job, const KeptBuffers& buffers) {
  const cudaStream_t stream = context.device->compute();
  const int64_t ld = context.sizes.padded_hidden;
  const float* coefs = job.in.coef_loss;
  const DeviceMatrix hidden = {job.hidden, context.config.compute_dtype, ld, ld};
  LOSSD_RETURN_IF_ERROR(Zero(buffers.hidden_sum, ld * static_cast<int64_t>(sizeof(float)), stream));
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchColumnSum(hidden, context.keep, coefs, job.rows(), 1.0f, buffers.partials,
                                             buffers.hidden_sum, stream),
                             "column sum kernel");
  UniformWeightParams p;
  p.hidden_sum = buffers.hidden_sum;
  p.coefs = coefs;
  p.keep = context.keep;
  p.rows = job.rows();
  p.class_weights = job.terms.class_weights;
  p.vocab = context.sizes.vocab;
  p.ld = ld;
  p.scale = -job.layout.unit * job.terms.scale * job.terms.smoothing /
            static_cast<float>(context.sizes.all_classes);
  p.weight_gradient = context.accumulators->weight;
  p.bias_gradient = context.accumulators->bias;
  return ToStatus(LaunchUniformWeight(p, stream), "uniform weight kernels");
}

}  // namespace lossd::kernels::cuda
