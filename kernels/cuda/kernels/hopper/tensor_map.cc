// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/kernels/hopper/tensor_map.h"

#include "kernels/cuda/device/cuda_status.h"

namespace lossd::kernels::cuda::hopper {
namespace {

using EncodeFunction = decltype(&cuTensorMapEncodeTiled);

constexpr int64_t kBoxRowBytes = 128;

EncodeFunction FindEncode() {
  EncodeFunction encode = nullptr;
  FindDriverFunction("cuTensorMapEncodeTiled", encode);
  return encode;
}

CUtensorMapDataType TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case DType::kFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kBFloat16:
      break;
  }
  return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

}  // namespace

cudaError_t MakeTensorMap(const BoxedMatrix& matrix, CUtensorMap& map) {
  static const EncodeFunction encode = FindEncode();
  if (encode == nullptr) return cudaErrorNotSupported;
  const auto element = static_cast<int64_t>(SizeOf(matrix.dtype));
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(matrix.cols), static_cast<cuuint64_t>(matrix.rows)};
  const cuuint64_t row_bytes[1] = {static_cast<cuuint64_t>(matrix.cols * element)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(kBoxRowBytes / element),
                             static_cast<cuuint32_t>(matrix.box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result =
      encode(&map, TypeOf(matrix.dtype), 2, const_cast<void*>(matrix.data), sizes, row_bytes, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace lossd::kernels::cuda::hopper
