#include "kernels/cuda/hopper/tensor_map.h"

namespace lossd::kernels::cuda::hopper {
namespace {

using EncodeFunction = decltype(&cuTensorMapEncodeTiled);

constexpr int kBoxColumns = 64;
constexpr unsigned kDriverVersion = 12000;  // the first that knows tensor maps

EncodeFunction FindEncode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             kDriverVersion, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<EncodeFunction>(function);
}

}  // namespace

cudaError_t MakeTensorMap(const BoxedMatrix& matrix, CUtensorMap& map) {
  static const EncodeFunction encode = FindEncode();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(matrix.cols), static_cast<cuuint64_t>(matrix.rows)};
  const cuuint64_t row_bytes[1] = {static_cast<cuuint64_t>(matrix.cols * 2)};
  const cuuint32_t box[2] = {kBoxColumns, static_cast<cuuint32_t>(matrix.box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUtensorMapDataType type =
      matrix.dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult result = encode(&map, type, 2, const_cast<void*>(matrix.data), sizes, row_bytes, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace lossd::kernels::cuda::hopper
