// SPDX-License-Identifier: Apache-2.0
#include "server/admin/initial_values.h"

#include <algorithm>
#include <utility>

#include "server/head/initializer.h"

namespace lossd::admin {

template <typename Request>
absl::StatusOr<InitialValues> InitialValues::OpenAny(const std::string& directory, const Request& request,
                                                     const kernels::HeadConfig& config) {
  InitialValues values(config);
  if (request.has_tensor_file()) {
    absl::StatusOr<HeadSource> source = HeadSource::Open(directory, request.tensor_file(), config);
    if (!source.ok()) return source.status();
    values.source_ = *std::move(source);
  } else if (!request.has_zeros()) {
    values.seed_ = request.kaiming_uniform().seed();
  }
  return values;
}

absl::StatusOr<InitialValues> InitialValues::Open(const std::string& directory,
                                                  const v1::CreateHeadRequest& request,
                                                  const kernels::HeadConfig& config) {
  return OpenAny(directory, request, config);
}

absl::StatusOr<InitialValues> InitialValues::Open(const std::string& directory,
                                                  const v1::ResetHeadRequest& request,
                                                  const kernels::HeadConfig& config) {
  return OpenAny(directory, request, config);
}

absl::Status InitialValues::CheckReadable(int64_t slice_bytes) const {
  if (!source_.has_value()) return absl::OkStatus();
  return FillFromFile(slice_bytes, [](kernels::TensorId, engine::RowRange, kernels::DType,
                                      absl::Span<const uint8_t>) { return absl::OkStatus(); });
}

bool InitialValues::Sets(kernels::Param param) const {
  if (seed_.has_value()) return param == kernels::Param::kWeight || param == kernels::Param::kBias;
  if (!source_.has_value()) return false;
  return std::any_of(source_->tensors().begin(), source_->tensors().end(),
                     [&](const HeadSource::Tensor& tensor) { return tensor.param == param; });
}

absl::Status InitialValues::Fill(bool used, int64_t slice_bytes, Sink sink) const {
  for (const kernels::Param param : kernels::kAllParams) {
    if (!used || Sets(param) || !kernels::HasTensor(config_, {param, kernels::Role::kValue})) continue;
    const bool ones = param == kernels::Param::kNormGain || param == kernels::Param::kClassWeights;
    absl::Status filled = FillTensor(
        param, kernels::DType::kFloat32, slice_bytes,
        [&](engine::RowRange, absl::Span<uint8_t> out) {
          // The buffer comes from operator new: aligned for floats.
          std::fill_n(reinterpret_cast<float*>(out.data()), out.size() / sizeof(float), ones ? 1.0f : 0.0f);
          return absl::OkStatus();
        },
        sink);
    if (!filled.ok()) return filled;
  }
  if (seed_.has_value()) return FillUniform(slice_bytes, sink);
  return source_.has_value() ? FillFromFile(slice_bytes, sink) : absl::OkStatus();
}

absl::Status InitialValues::FillUniform(int64_t slice_bytes, Sink sink) const {
  const float bound = head::KaimingBound(config_.hidden_size);
  for (const kernels::Param param : {kernels::Param::kWeight, kernels::Param::kBias}) {
    if (!kernels::HasTensor(config_, {param, kernels::Role::kValue})) continue;
    const int64_t cols = kernels::ShapeOf(config_, param).cols;
    absl::Status filled = FillTensor(
        param, kernels::DType::kFloat32, slice_bytes,
        [&](engine::RowRange rows, absl::Span<uint8_t> out) {
          const absl::Span<float> values(reinterpret_cast<float*>(out.data()), out.size() / sizeof(float));
          head::FillUniform(*seed_, param, rows.begin * cols, bound, values);
          return absl::OkStatus();
        },
        sink);
    if (!filled.ok()) return filled;
  }
  return absl::OkStatus();
}

absl::Status InitialValues::FillFromFile(int64_t slice_bytes, Sink sink) const {
  for (const HeadSource::Tensor& tensor : source_->tensors()) {
    absl::Status filled = FillTensor(
        tensor.param, tensor.dtype, slice_bytes,
        [&](engine::RowRange rows, absl::Span<uint8_t> out) { return source_->ReadRows(tensor, rows, out); },
        sink);
    if (!filled.ok()) return filled;
  }
  return absl::OkStatus();
}

absl::Status InitialValues::FillTensor(kernels::Param param, kernels::DType dtype, int64_t slice_bytes,
                                       RowSource source, Sink sink) const {
  const kernels::TensorShape shape = kernels::ShapeOf(config_, param);
  const int64_t row_bytes = shape.cols * static_cast<int64_t>(kernels::SizeOf(dtype));
  const int64_t rows_at_once = std::max<int64_t>(1, slice_bytes / row_bytes);
  std::vector<uint8_t> buffer(static_cast<size_t>(std::min(rows_at_once, shape.rows) * row_bytes));
  for (int64_t begin = 0; begin < shape.rows; begin += rows_at_once) {
    const engine::RowRange rows{begin, std::min(begin + rows_at_once, shape.rows)};
    const auto bytes = absl::MakeSpan(buffer).first(static_cast<size_t>(rows.size() * row_bytes));
    if (absl::Status status = source(rows, bytes); !status.ok()) return status;
    if (absl::Status status = sink({param, kernels::Role::kValue}, rows, dtype, bytes); !status.ok())
      return status;
  }
  return absl::OkStatus();
}

}  // namespace lossd::admin
