// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/heads/head_norm.h"

#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/kernels/rows.h"
#include "kernels/cuda/paths/split_gradients.h"

namespace lossd::kernels::cuda {

// Plans what the launches will plan; all matrices of a launch begin where vectors may.
void HeadNorm::Plan(const ChunkFacts& chunk, DType hidden_dtype, ChunkPlan& plan) const {
  if (!exists()) return;
  NormParams p;
  p.rows = chunk.rows;
  p.x = {nullptr, hidden_dtype, sizes_.hidden, sizes_.hidden};
  p.y = {nullptr, config_.compute_dtype, sizes_.hidden, sizes_.padded_hidden};
  plan.norm = PlanNormForward(p);
  if (!chunk.wants_gradient) return;
  p.y.dtype = HiddenGradientDType(sizes_, config_.compute_dtype);
  plan.norm_gradient = PlanNormBackward(p, {}, device_->limits());
}

DeviceMatrix HeadNorm::RawRows(const ChunkJob& job, const ChunkSlot& slot) const {
  return {slot.memory.raw, job.chunk->hidden_dtype, sizes_.hidden, sizes_.hidden};
}

NormParams HeadNorm::ParamsOf(const ChunkJob& job, const ChunkSlot& slot, const DeviceMatrix& y) const {
  NormParams p;
  p.centred = config_.norm == Norm::kLayerNorm;
  p.epsilon = config_.norm_epsilon;
  p.gain = tensors_->values().params.norm_gain;
  p.shift = tensors_->values().params.norm_shift;
  p.rows = job.rows();
  p.source = slot.device_in.raw_of_compact;
  p.x = RawRows(job, slot);
  p.y = y;
  p.mean = workspace_.mean;
  p.inverse_deviation = workspace_.inverse_deviation;
  return p;
}

absl::Status HeadNorm::Forward(const ChunkJob& job, const ChunkSlot& slot) const {
  const cudaStream_t stream = device_->compute();
  const int64_t row_bytes = sizes_.padded_hidden * sizes_.element;
  auto* hidden = static_cast<uint8_t*>(slot.memory.hidden);
  LOSSD_RETURN_IF_ERROR(
      Zero(hidden + job.rows() * row_bytes, (job.padded_rows() - job.rows()) * row_bytes, stream));
  const DeviceMatrix y = {hidden, config_.compute_dtype, sizes_.hidden, sizes_.padded_hidden};
  return ToStatus(LaunchNormForward(ParamsOf(job, slot, y), device_->limits(), stream),
                  "norm forward kernel");
}

absl::Status HeadNorm::Backward(const ChunkJob& job, const ChunkSlot& slot) const {
  const cudaStream_t stream = device_->compute();
  const DeviceMatrix raw = RawRows(job, slot);
  const int64_t begin = job.rows_here.begin;
  const int64_t row_bytes = sizes_.padded_hidden * static_cast<int64_t>(SizeOf(job.hidden_gradient_dtype));
  const DeviceMatrix dy = {workspace_.paths[Region::kHiddenGradient] + begin * row_bytes,
                           job.hidden_gradient_dtype, sizes_.hidden, sizes_.padded_hidden};
  NormParams p = ParamsOf(job, slot, dy);
  p.rows = job.rows_here.end - begin;
  p.source += begin;
  p.mean += begin;
  p.inverse_deviation += begin;
  NormBackwardParams b;
  b.scale = job.hidden_gradient_factor();
  b.keep = workspace_.keep + begin;
  if (job.layout.want_hidden_gradient) b.dx = raw;  // in place; the download takes it from there
  float* const sums = SplitRows::Carve(sizes_, workspace_.paths[Region::kSplitRows]).norm_sums;
  if (job.layout.accumulate) {
    b.gain_gradient = sizes_.is_split() ? sums : tensors_->gradients().norm_gain;
    b.shift_gradient = tensors_->gradients().norm_shift;
    if (sizes_.is_split() && b.shift_gradient != nullptr) b.shift_gradient = sums + sizes_.padded_hidden;
    b.partials = workspace_.paths.At<float>(Region::kColumnSums);
  }
  const int64_t sum_bytes = 2 * sizes_.padded_hidden * static_cast<int64_t>(sizeof(float));
  const bool exchanges = sizes_.is_split() && job.layout.accumulate;
  if (exchanges) LOSSD_RETURN_IF_ERROR(Zero(sums, sum_bytes, stream));
  if (p.rows > 0) {
    LOSSD_RETURN_IF_CUDA_ERROR(LaunchNormBackward(p, b, device_->limits(), stream), "norm backward kernel");
  }
  if (exchanges) {
    LOSSD_RETURN_IF_ERROR(
        link_->exchange->Sum(ExchangeKind::kHiddenGradients, sums, 2 * sizes_.padded_hidden));
    LOSSD_RETURN_IF_ERROR(tensors_->AddNormGradients(sums, sums + sizes_.padded_hidden));
  }
  const int64_t with_gradient = job.rows() - job.layout.absent_rows;
  if (!job.layout.want_hidden_gradient || with_gradient == job.layout.raw_rows) return absl::OkStatus();
  return ToStatus(LaunchZeroUnmappedRows(raw, slot.device_in.gradient_of_raw, job.layout.raw_rows, stream),
                  "zero kernel");
}

}  // namespace lossd::kernels::cuda
