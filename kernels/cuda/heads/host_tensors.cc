// SPDX-License-Identifier: Apache-2.0
// HostTensors (host_tensors.h): tensors in host memory, with conversions between dtypes.
#include "kernels/cuda/heads/host_tensors.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstring>

#include "kernels/cuda/device/cuda_status.h"

namespace lossd::kernels::cuda {
namespace {

template <typename T>
T At(const uint8_t* bytes, int64_t index) {
  T value;
  std::memcpy(&value, bytes + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

float Load(DType dtype, const uint8_t* bytes, int64_t index) {
  switch (dtype) {
    case DType::kFloat16:
      return __half2float(At<__half>(bytes, index));
    case DType::kBFloat16:
      return __bfloat162float(At<__nv_bfloat16>(bytes, index));
    case DType::kFloat32:
      break;
  }
  return At<float>(bytes, index);
}

template <typename T>
void Put(uint8_t* bytes, int64_t index, T value) {
  std::memcpy(bytes + index * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

void Store(DType dtype, uint8_t* bytes, int64_t index, float value) {
  switch (dtype) {
    case DType::kFloat16:
      return Put(bytes, index, __float2half_rn(value));
    case DType::kBFloat16:
      return Put(bytes, index, __float2bfloat16_rn(value));
    case DType::kFloat32:
      break;
  }
  Put(bytes, index, value);
}

void Convert(DType from_dtype, const uint8_t* from, DType to_dtype, uint8_t* to, int64_t count) {
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, SizeOf(count, to_dtype));
    return;
  }
  for (int64_t i = 0; i < count; ++i) Store(to_dtype, to, i, Load(from_dtype, from, i));
}

}  // namespace

absl::Status HostTensors::Allocate(MemoryLedger* ledger) {
  const int64_t bytes = ValueBuffer::Carve(config_, sizes_, nullptr).bytes;
  LOSSD_RETURN_IF_ERROR(Take(PinnedBuffer::Allocate(ledger, bytes, MemoryKind::kHostValues), buffer_));
  std::memset(buffer_.data(), 0, static_cast<size_t>(bytes));
  values_ = ValueBuffer::Carve(config_, sizes_, buffer_.data());
  if (values_.params.norm_gain != nullptr) std::fill_n(values_.params.norm_gain, sizes_.hidden, 1.0f);
  if (values_.class_weights != nullptr) std::fill_n(values_.class_weights, sizes_.all_classes, 1.0f);
  return absl::OkStatus();
}

HostTensors::Place HostTensors::Find(Param param, int64_t row_begin) const {
  const auto vector = [&](float* values) {
    return Place{reinterpret_cast<uint8_t*>(values + row_begin), DType::kFloat32, int64_t{sizeof(float)}};
  };
  switch (param) {
    case Param::kWeight: {
      const int64_t row_bytes = sizes_.padded_hidden * sizes_.element;
      return {static_cast<uint8_t*>(values_.compute_weight) + row_begin * row_bytes, config_.compute_dtype,
              row_bytes};
    }
    case Param::kBias:
      return vector(values_.params.bias);
    case Param::kNormGain:
      return vector(values_.params.norm_gain);
    case Param::kNormShift:
      return vector(values_.params.norm_shift);
    case Param::kClassWeights:
      return vector(values_.class_weights);
  }
  return {};
}

void HostTensors::Read(Param param, int64_t row_begin, int64_t rows, DType dtype,
                       absl::Span<uint8_t> out) const {
  const Place place = Find(param, row_begin);
  const int64_t cols = ShapeOf(config_, param).cols;
  const auto row_bytes = static_cast<int64_t>(SizeOf(cols, dtype));
  for (int64_t row = 0; row < rows; ++row) {
    Convert(place.dtype, place.data + row * place.row_bytes, dtype, out.data() + row * row_bytes, cols);
  }
}

void HostTensors::Write(Param param, int64_t row_begin, int64_t rows, DType dtype,
                        absl::Span<const uint8_t> in) {
  const Place place = Find(param, row_begin);
  const int64_t cols = ShapeOf(config_, param).cols;
  const auto row_bytes = static_cast<int64_t>(SizeOf(cols, dtype));
  for (int64_t row = 0; row < rows; ++row) {
    Convert(dtype, in.data() + row * row_bytes, place.dtype, place.data + row * place.row_bytes, cols);
  }
}

}  // namespace lossd::kernels::cuda
