// A CudaHead between chunks: its tensors read, written and added to, and the optimizer's step.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cuda/cuda_head.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/tensor_ops.h"
#include "kernels/validation.h"

namespace lossd::kernels::cuda {

DeviceMatrix CudaHead::FindTensor(TensorId id, int64_t row_begin) const {
  const ParamBlock* block = &values_.params;
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

// Each piece ends before the next begins: host memory need not be pinned, and the buffer is shared.
absl::Status CudaHead::ForEachPiece(const DeviceMatrix& tensor, int64_t rows, DType dtype,
                                    absl::FunctionRef<absl::Status(const Piece&)> step) {
  const int64_t row_bytes = tensor.cols * static_cast<int64_t>(SizeOf(dtype));
  const int64_t piece_rows = sizes_.piece_bytes / row_bytes;
  Piece piece;
  piece.tensor = tensor;
  piece.buffer = {workspace_.upload_piece, dtype, tensor.cols, tensor.cols};
  for (int64_t row = 0; row < rows; row += piece_rows) {
    piece.tensor.data = static_cast<float*>(tensor.data) + row * tensor.ld;
    piece.rows = std::min(piece_rows, rows - row);
    piece.offset = row * row_bytes;
    piece.bytes = piece.rows * row_bytes;
    LOSSD_RETURN_IF_ERROR(step(piece));
    LOSSD_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(device_->compute()), "cudaStreamSynchronize");
  }
  return absl::OkStatus();
}

absl::Status CudaHead::ReadTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                                  absl::Span<uint8_t> out) {
  LOSSD_RETURN_IF_ERROR(device_->Enter());
  LOSSD_RETURN_IF_ERROR(ValidateTensorAccess(config_, id, row_begin, rows, dtype, out.size()));
  LOSSD_RETURN_IF_ERROR(device_->Synchronize());
  const cudaStream_t stream = device_->compute();
  const auto read = [&](const Piece& piece) {
    LOSSD_RETURN_IF_CUDA_ERROR(LaunchConvert(piece.tensor, piece.buffer, piece.rows, stream),
                               "convert kernel");
    return Copy(out.data() + piece.offset, piece.buffer.data, piece.bytes, stream);
  };
  return device_->Fail(ForEachPiece(FindTensor(id, row_begin), rows, dtype, read));
}

absl::Status CudaHead::WriteTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                                   absl::Span<const uint8_t> in) {
  LOSSD_RETURN_IF_ERROR(device_->Enter());
  LOSSD_RETURN_IF_ERROR(ValidateTensorAccess(config_, id, row_begin, rows, dtype, in.size()));
  LOSSD_RETURN_IF_ERROR(device_->Synchronize());
  const cudaStream_t stream = device_->compute();
  const auto write = [&](const Piece& piece) {
    LOSSD_RETURN_IF_ERROR(Copy(piece.buffer.data, in.data() + piece.offset, piece.bytes, stream));
    return ToStatus(LaunchConvert(piece.buffer, piece.tensor, piece.rows, stream), "convert kernel");
  };
  LOSSD_RETURN_IF_ERROR(device_->Fail(ForEachPiece(FindTensor(id, row_begin), rows, dtype, write)));
  return device_->Fail(RefreshAfterWrite(id, row_begin, rows));
}

absl::Status CudaHead::AddGradient(Param param, int64_t row_begin, int64_t rows, DType dtype, float scale,
                                   absl::Span<const uint8_t> in) {
  const TensorId id{param, Role::kGradient};
  LOSSD_RETURN_IF_ERROR(device_->Enter());
  LOSSD_RETURN_IF_ERROR(ValidateTensorAccess(config_, id, row_begin, rows, dtype, in.size()));
  LOSSD_RETURN_IF_ERROR(device_->Synchronize());
  const cudaStream_t stream = device_->compute();
  if (param == Param::kWeight) weight_gradient_is_zero_ = false;
  const auto add = [&](const Piece& piece) {
    LOSSD_RETURN_IF_ERROR(Copy(piece.buffer.data, in.data() + piece.offset, piece.bytes, stream));
    return ToStatus(LaunchAddScaled(piece.buffer, piece.tensor, piece.rows, scale, stream), "add kernel");
  };
  return device_->Fail(ForEachPiece(FindTensor(id, row_begin), rows, dtype, add));
}

absl::Status CudaHead::RefreshAfterWrite(TensorId id, int64_t row_begin, int64_t rows) {
  if (id == TensorId{Param::kWeight, Role::kGradient}) weight_gradient_is_zero_ = false;
  if (id.param == Param::kClassWeights) return ReadClassWeights();
  if (id != TensorId{Param::kWeight, Role::kValue} || config_.compute_dtype == DType::kFloat32) {
    return absl::OkStatus();
  }
  const int64_t first = row_begin * sizes_.padded_hidden;
  const DeviceMatrix from = {values_.params.weight + first, DType::kFloat32, sizes_.padded_hidden,
                             sizes_.padded_hidden};
  const DeviceMatrix to = {static_cast<uint8_t*>(values_.compute_weight) + first * sizes_.element,
                           config_.compute_dtype, sizes_.padded_hidden, sizes_.padded_hidden};
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchConvert(from, to, rows, device_->compute()), "convert kernel");
  return device_->Synchronize();
}

absl::Status CudaHead::ReadClassWeights() {
  std::vector<float> weights(static_cast<size_t>(sizes_.vocab));
  LOSSD_RETURN_IF_CUDA_ERROR(
      cudaMemcpy(weights.data(), values_.class_weights, weights.size() * sizeof(float), cudaMemcpyDefault),
      "cudaMemcpy");
  double sum = 0.0;
  largest_class_weight_ = 0.0f;
  for (float u : weights) {
    sum += static_cast<double>(u);
    if (std::isfinite(u)) largest_class_weight_ = std::max(largest_class_weight_, std::fabs(u));
  }
  class_weight_sum_ = static_cast<float>(sum);
  return absl::OkStatus();
}

absl::StatusOr<double> CudaHead::GradNorm() {
  LOSSD_RETURN_IF_ERROR(device_->Enter());
  if (!config_.trainable) return absl::FailedPreconditionError("the head is not trainable");
  const cudaStream_t stream = device_->compute();
  double* result = workspace_.square_sums + kSquareSumPartials;
  double sum = 0.0;
  const auto compute = [&]() -> absl::Status {
    LOSSD_RETURN_IF_CUDA_ERROR(
        LaunchSquareSum(gradients_.first(), gradients_.floats(), workspace_.square_sums, result, stream),
        "square sum kernel");
    LOSSD_RETURN_IF_ERROR(Copy(&sum, result, sizeof(sum), stream));
    return ToStatus(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  };
  LOSSD_RETURN_IF_ERROR(device_->Fail(compute()));
  return std::sqrt(sum);
}

absl::Status CudaHead::ApplyStep(const OptimizerOptions& options, int64_t update) {
  LOSSD_RETURN_IF_ERROR(device_->Enter());
  LOSSD_RETURN_IF_ERROR(ValidateStep(config_, options, update));
  OptimizerStepParams p;
  p.options = options;
  p.update = update;
  p.count = gradients_.floats();
  p.matrix_count = sizes_.padded_vocab * sizes_.padded_hidden;
  p.values = values_.params.first();
  p.gradients = gradients_.first();
  const OptimizerState needed = RequiredState(options);
  if (needed != OptimizerState::kNone) p.moment1 = moments_[0].first();
  if (needed == OptimizerState::kAdam) p.moment2 = moments_[1].first();
  if (config_.compute_dtype != DType::kFloat32) p.compute_copy = values_.compute_weight;
  p.compute_dtype = config_.compute_dtype;
  LOSSD_RETURN_IF_ERROR(
      device_->Fail(ToStatus(LaunchOptimizerStep(p, device_->compute()), "optimizer kernel")));
  weight_gradient_is_zero_ = true;
  return device_->Synchronize();
}

absl::Status CudaHead::ZeroGradients() {
  LOSSD_RETURN_IF_ERROR(device_->Enter());
  if (!config_.trainable) return absl::FailedPreconditionError("the head is not trainable");
  const cudaError_t error =
      cudaMemsetAsync(gradients_.first(), 0, static_cast<size_t>(gradients_.bytes), device_->compute());
  LOSSD_RETURN_IF_ERROR(device_->Fail(ToStatus(error, "cudaMemsetAsync")));
  weight_gradient_is_zero_ = true;
  return device_->Synchronize();
}

}  // namespace lossd::kernels::cuda
