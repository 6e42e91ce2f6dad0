// SPDX-License-Identifier: Apache-2.0
// HeadTensors (head_tensors.h): allocation, access to tensors block by block, and the optimizer's step.
#include "kernels/cuda/heads/head_tensors.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/kernels/tensor_ops.h"
#include "kernels/validation.h"

namespace lossd::kernels::cuda {

absl::Status HeadTensors::Allocate() {
  MemoryLedger* ledger = &device_->ledger();
  if (host_ != nullptr) return host_->Allocate(ledger);
  const int64_t block = ParamBlock::Carve(config_, sizes_, nullptr).bytes;
  const int64_t value_bytes = ValueBuffer::Carve(config_, sizes_, nullptr).bytes;
  LOSSD_RETURN_IF_ERROR(
      Take(DeviceBuffer::Allocate(ledger, MemoryKind::kWeights, value_bytes), value_buffer_));
  LOSSD_RETURN_IF_ERROR(
      Take(DeviceBuffer::Allocate(ledger, MemoryKind::kGradients, config_.trainable ? block : 0),
           gradient_buffer_));
  const int64_t moments = ParamBlock::CarveRanges(config_, ranges_, nullptr).bytes;
  LOSSD_RETURN_IF_ERROR(
      Take(DeviceBuffer::Allocate(ledger, MemoryKind::kOptimizer, MomentCount(config_) * moments),
           optimizer_buffer_));
  values_ = ValueBuffer::Carve(config_, sizes_, value_buffer_.data());
  if (config_.trainable) gradients_ = ParamBlock::Carve(config_, sizes_, gradient_buffer_.data());
  for (int i = 0; i < MomentCount(config_); ++i) {
    moments_[i] = ParamBlock::CarveRanges(config_, ranges_, optimizer_buffer_.data() + i * moments);
  }
  accumulators_ = {gradients_.weight, gradients_.bias};
  for (auto [values, count] : {std::pair{values_.params.norm_gain, sizes_.hidden},
                               std::pair{values_.class_weights, sizes_.all_classes}}) {
    if (values != nullptr) {
      LOSSD_RETURN_IF_CUDA_ERROR(LaunchFill(values, count, 1.0f, device_->compute()), "fill kernel");
    }
  }
  return absl::OkStatus();
}

DeviceMatrix HeadTensors::Find(TensorId id, int64_t row_begin) const {
  const ParamBlock* block = &values_.params;
  row_begin -= FirstRow(id);
  if (id.role == Role::kGradient) block = &gradients_;
  if (id.role == Role::kMoment1) block = &moments_[0];
  if (id.role == Role::kMoment2) block = &moments_[1];
  switch (id.param) {
    case Param::kWeight:
      return DeviceMatrix{block->weight + row_begin * sizes_.padded_hidden, DType::kFloat32, sizes_.hidden,
                          sizes_.padded_hidden};
    case Param::kBias:
      return DeviceMatrix{block->bias + row_begin, DType::kFloat32, 1, 1};
    case Param::kNormGain:
      return DeviceMatrix{block->norm_gain + row_begin, DType::kFloat32, 1, 1};
    case Param::kNormShift:
      return DeviceMatrix{block->norm_shift + row_begin, DType::kFloat32, 1, 1};
    case Param::kClassWeights:
      return DeviceMatrix{values_.class_weights + row_begin, DType::kFloat32, 1, 1};
  }
  return {};
}

absl::Status HeadTensors::Begin(TensorId id, int64_t row_begin, int64_t rows, DType dtype, size_t bytes) {
  LOSSD_RETURN_IF_ERROR(device_->MakeCurrent());
  LOSSD_RETURN_IF_ERROR(
      ValidateReplicaAccess(config_, device_->options().replica, id, row_begin, rows, dtype, bytes));
  return device_->Synchronize();
}

absl::Status HeadTensors::ForEachBlock(const DeviceMatrix& tensor, int64_t rows, DType dtype,
                                       absl::FunctionRef<absl::Status(const TransferBlock&)> step) {
  const int64_t row_bytes = tensor.cols * static_cast<int64_t>(SizeOf(dtype));
  const int64_t block_rows = sizes_.transfer_bytes / row_bytes;
  TransferBlock block;
  block.tensor = tensor;
  block.buffer = {scratch_.transfer, dtype, tensor.cols, tensor.cols};
  for (int64_t row = 0; row < rows; row += block_rows) {
    block.tensor.data = static_cast<float*>(tensor.data) + row * tensor.ld;
    block.rows = std::min(block_rows, rows - row);
    block.offset = row * row_bytes;
    block.bytes = block.rows * row_bytes;
    LOSSD_RETURN_IF_ERROR(step(block));
    LOSSD_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(device_->compute()), "cudaStreamSynchronize");
  }
  return absl::OkStatus();
}

absl::Status HeadTensors::Read(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                               absl::Span<uint8_t> out) {
  LOSSD_RETURN_IF_ERROR(Begin(id, row_begin, rows, dtype, out.size()));
  if (host_ != nullptr) {  // a head in host memory is frozen, so its tensors are all values
    host_->Read(id.param, row_begin, rows, dtype, out);
    return absl::OkStatus();
  }
  const cudaStream_t stream = device_->compute();
  const auto read = [&](const TransferBlock& block) {
    LOSSD_RETURN_IF_CUDA_ERROR(LaunchConvert(block.tensor, block.buffer, block.rows, stream),
                               "convert kernel");
    return Copy(out.data() + block.offset, block.buffer.data, block.bytes, stream);
  };
  return device_->Fail(ForEachBlock(Find(id, row_begin), rows, dtype, read));
}

absl::Status HeadTensors::Write(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                                absl::Span<const uint8_t> in) {
  LOSSD_RETURN_IF_ERROR(Begin(id, row_begin, rows, dtype, in.size()));
  if (host_ != nullptr) {
    host_->Write(id.param, row_begin, rows, dtype, in);
    return id.param == Param::kClassWeights ? ReadClassWeights() : absl::OkStatus();
  }
  const cudaStream_t stream = device_->compute();
  const auto write = [&](const TransferBlock& block) {
    LOSSD_RETURN_IF_ERROR(Copy(block.buffer.data, in.data() + block.offset, block.bytes, stream));
    return ToStatus(LaunchConvert(block.buffer, block.tensor, block.rows, stream), "convert kernel");
  };
  LOSSD_RETURN_IF_ERROR(device_->Fail(ForEachBlock(Find(id, row_begin), rows, dtype, write)));
  return device_->Fail(RefreshAfterWrite(id, row_begin, rows));
}

absl::Status HeadTensors::AddGradient(Param param, int64_t row_begin, int64_t rows, DType dtype, float scale,
                                      absl::Span<const uint8_t> in) {
  const TensorId id{param, Role::kGradient};
  LOSSD_RETURN_IF_ERROR(Begin(id, row_begin, rows, dtype, in.size()));
  const cudaStream_t stream = device_->compute();
  if (param == Param::kWeight) accumulators_.weight_is_zero = false;
  const auto add = [&](const TransferBlock& block) {
    LOSSD_RETURN_IF_ERROR(Copy(block.buffer.data, in.data() + block.offset, block.bytes, stream));
    return ToStatus(LaunchAddScaled(block.buffer, block.tensor, block.rows, scale, stream), "add kernel");
  };
  return device_->Fail(ForEachBlock(Find(id, row_begin), rows, dtype, add));
}

// After a write, brings what follows from the tensor up to date: the 16-bit copy of the weight, the sum and
// the largest of the class weights, and whether the weight gradient is zero.
absl::Status HeadTensors::RefreshAfterWrite(TensorId id, int64_t row_begin, int64_t rows) {
  if (id == TensorId{Param::kWeight, Role::kGradient}) accumulators_.weight_is_zero = false;
  if (id.param == Param::kClassWeights) return ReadClassWeights();
  if (id != TensorId{Param::kWeight, Role::kValue} || config_.compute_dtype == DType::kFloat32) {
    return absl::OkStatus();
  }
  const int64_t first = (row_begin - FirstRow(id)) * sizes_.padded_hidden;
  const DeviceMatrix from = {values_.params.weight + first, DType::kFloat32, sizes_.padded_hidden,
                             sizes_.padded_hidden};
  const DeviceMatrix to = {static_cast<uint8_t*>(values_.compute_weight) + first * sizes_.element,
                           config_.compute_dtype, sizes_.padded_hidden, sizes_.padded_hidden};
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchConvert(from, to, rows, device_->compute()), "convert kernel");
  return device_->Synchronize();
}

absl::Status HeadTensors::ReadClassWeights() {
  std::vector<float> weights(static_cast<size_t>(sizes_.all_classes));
  const float* const from = host_ != nullptr ? host_->class_weights() : values_.class_weights;
  LOSSD_RETURN_IF_ERROR(
      CopyAndWait(weights.data(), from, static_cast<int64_t>(weights.size() * sizeof(float))));
  double sum = 0.0;
  largest_class_weight_ = 0.0f;
  for (float u : weights) {
    sum += static_cast<double>(u);
    if (std::isfinite(u)) largest_class_weight_ = std::max(largest_class_weight_, std::fabs(u));
  }
  class_weight_sum_ = static_cast<float>(sum);
  return absl::OkStatus();
}

absl::StatusOr<double> HeadTensors::GradNorm() {
  LOSSD_RETURN_IF_ERROR(device_->MakeCurrent());
  if (!config_.trainable) return absl::FailedPreconditionError("the head is not trainable");
  const cudaStream_t stream = device_->compute();
  double* result = scratch_.square_sums + kSquareSumPartials;
  double sum = 0.0;
  // The gradients of the norm come last. Every part of a split head has these gradients, so only part 0
  // counts them.
  const bool without_norm = sizes_.part > 0 && gradients_.norm_gain != nullptr;
  const int64_t floats = without_norm ? gradients_.norm_gain - gradients_.first() : gradients_.floats();
  const auto compute = [&]() -> absl::Status {
    LOSSD_RETURN_IF_CUDA_ERROR(
        LaunchSquareSum(gradients_.first(), floats, scratch_.square_sums, result, stream),
        "square sum kernel");
    LOSSD_RETURN_IF_ERROR(Copy(&sum, result, sizeof(sum), stream));
    return ToStatus(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  };
  LOSSD_RETURN_IF_ERROR(device_->Fail(compute()));
  return std::sqrt(sum);
}

absl::Status HeadTensors::ApplyStep(const OptimizerOptions& options, int64_t update) {
  LOSSD_RETURN_IF_ERROR(device_->MakeCurrent());
  LOSSD_RETURN_IF_ERROR(ValidateStep(config_, options, update));
  OptimizerStepParams p;
  p.options = options;
  p.update = update;
  p.compute_dtype = config_.compute_dtype;
  const OptimizerState needed = RequiredState(options);
  const ParamBlock m1 = needed != OptimizerState::kNone ? moments_[0] : ParamBlock{};
  const ParamBlock m2 = needed == OptimizerState::kAdam ? moments_[1] : ParamBlock{};
  const ParamBlock &v = values_.params, &g = gradients_;
  LOSSD_RETURN_IF_ERROR(StepRange(p, true, ranges_.weight, v.weight, g.weight, m1.weight, m2.weight));
  LOSSD_RETURN_IF_ERROR(StepRange(p, false, ranges_.bias, v.bias, g.bias, m1.bias, m2.bias));
  LOSSD_RETURN_IF_ERROR(
      StepRange(p, false, ranges_.norm, v.norm_gain, g.norm_gain, m1.norm_gain, m2.norm_gain));
  LOSSD_RETURN_IF_ERROR(
      StepRange(p, false, ranges_.norm, v.norm_shift, g.norm_shift, m1.norm_shift, m2.norm_shift));
  accumulators_.weight_is_zero = true;  // the kernels have zeroed the gradients
  return device_->Synchronize();
}

absl::Status HeadTensors::StepRange(OptimizerStepParams params, bool matrix, const ShardRange& range,
                                    float* values, float* gradients, float* moment1, float* moment2) {
  if (values == nullptr || range.count == 0) return absl::OkStatus();
  params.count = range.count;
  params.matrix_count = matrix ? range.count : 0;
  params.matrix_cols = sizes_.padded_hidden;
  params.values = values + range.begin;
  params.gradients = gradients + range.begin;
  params.moment1 = moment1;
  params.moment2 = moment2;
  if (matrix && config_.compute_dtype != DType::kFloat32) {
    params.compute_copy = ComputeWeightFrom(shard_.first_class);
  }
  return device_->Fail(ToStatus(LaunchOptimizerStep(params, device_->compute()), "optimizer kernel"));
}

absl::Status HeadTensors::AddNormGradients(const float* gain, const float* shift) {
  const auto add = [&](const float* sums, float* gradient) -> absl::Status {
    if (gradient == nullptr) return absl::OkStatus();
    const int64_t n = sizes_.padded_hidden;
    return ToStatus(LaunchAddScaled({const_cast<float*>(sums), DType::kFloat32, n, n},
                                    {gradient, DType::kFloat32, n, n}, 1, 1.0f, device_->compute()),
                    "add kernel");
  };
  LOSSD_RETURN_IF_ERROR(add(gain, gradients_.norm_gain));
  return add(shift, gradients_.norm_shift);
}

absl::Status HeadTensors::ZeroGradientsOf(const Shard& shard) {
  const ShardRanges ranges = ShardRanges::Of(sizes_, shard);
  const auto zero = [&](float* tensor, const ShardRange& range) -> absl::Status {
    if (tensor == nullptr || range.count == 0) return absl::OkStatus();
    return Zero(tensor + range.begin, range.count * static_cast<int64_t>(sizeof(float)), device_->compute());
  };
  LOSSD_RETURN_IF_ERROR(zero(gradients_.weight, ranges.weight));
  LOSSD_RETURN_IF_ERROR(zero(gradients_.bias, ranges.bias));
  LOSSD_RETURN_IF_ERROR(zero(gradients_.norm_gain, ranges.norm));
  return zero(gradients_.norm_shift, ranges.norm);
}

absl::Status HeadTensors::ZeroGradients() {
  LOSSD_RETURN_IF_ERROR(device_->MakeCurrent());
  if (!config_.trainable) return absl::FailedPreconditionError("the head is not trainable");
  const cudaError_t error =
      cudaMemsetAsync(gradients_.first(), 0, static_cast<size_t>(gradients_.bytes), device_->compute());
  LOSSD_RETURN_IF_ERROR(device_->Fail(ToStatus(error, "cudaMemsetAsync")));
  accumulators_.weight_is_zero = true;
  return device_->Synchronize();
}

absl::Status HeadTensors::ZeroMoments() {
  LOSSD_RETURN_IF_ERROR(device_->MakeCurrent());
  if (optimizer_buffer_.bytes() == 0) return absl::OkStatus();
  LOSSD_RETURN_IF_ERROR(
      device_->Fail(Zero(optimizer_buffer_.data(), optimizer_buffer_.bytes(), device_->compute())));
  return device_->Synchronize();
}

}  // namespace lossd::kernels::cuda
