// SPDX-License-Identifier: Apache-2.0
// FindClusterOrder and MakeTensorMap (cluster_launch.h).
#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/device/kernel_code.h"
#include "kernels/cuda/kernels/hopper/cluster_launch.h"
#include "kernels/cuda/kernels/hopper/ptx.cuh"

namespace lossd::kernels::cuda::hopper {
namespace {

// ---- the groups of multiprocessors (GPC) ----

constexpr int kProbeBlocks = 16;  // blocks of a cluster, which take nearly all multiprocessors of a group
constexpr int kProbeThreads = 32;
constexpr int kProbeBytes = 120 << 10;     // of shared memory, so that a multiprocessor holds one block
constexpr int64_t kProbeCycles = 100'000;  // duration of a block, so that all blocks run at once

__global__ void ProbeKernel(uint32_t* multiprocessors) {
  if (threadIdx.x != 0) return;
  multiprocessors[blockIdx.x] = Multiprocessor();
  const int64_t begin = clock64();
  while (clock64() - begin < kProbeCycles) {
  }
}

// The multiprocessor of every block, cluster by cluster. All blocks of a cluster run on one group of
// multiprocessors, so neighbors in the result belong to one group. Empty if such clusters cannot run.
std::vector<uint32_t> Probe() {
  cudaLaunchAttribute size = {};
  size.id = cudaLaunchAttributeClusterDimension;
  size.val.clusterDim = {kProbeBlocks, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kProbeBlocks);
  config.blockDim = dim3(kProbeThreads);
  config.dynamicSmemBytes = kProbeBytes;
  config.attrs = &size;
  config.numAttrs = 1;
  int clusters = 0;
  uint32_t* found = nullptr;
  std::vector<uint32_t> multiprocessors;
  const bool possible =
      cudaFuncSetAttribute(ProbeKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kProbeBytes) ==
          cudaSuccess &&
      cudaFuncSetAttribute(ProbeKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess &&
      cudaOccupancyMaxActiveClusters(&clusters, ProbeKernel, &config) == cudaSuccess && clusters > 0;
  if (possible && cudaMalloc(&found, sizeof(uint32_t) * kProbeBlocks * clusters) == cudaSuccess) {
    config.gridDim = dim3(kProbeBlocks * clusters);
    multiprocessors.resize(config.gridDim.x);
    if (cudaLaunchKernelEx(&config, ProbeKernel, found) != cudaSuccess ||
        cudaMemcpy(multiprocessors.data(), found, multiprocessors.size() * sizeof(uint32_t),
                   cudaMemcpyDeviceToHost) != cudaSuccess) {
      multiprocessors.clear();
    }
    cudaFree(found);
  }
  cudaGetLastError();  // forgets the error of a call that failed above
  return multiprocessors;
}

// ---- descriptions of matrices ----

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

ClusterOrder FindClusterOrder() {
  // A pair is the multiprocessors 2 i and 2 i + 1; a cluster of two blocks runs on one pair. Pairs get
  // consecutive positions in the order in which the probe names them, group by group. The pairs that the
  // probe has not named come last.
  ClusterOrder order;
  bool seen[kMostClusters] = {};
  int next = 0;
  const auto append = [&](uint32_t pair) {
    if (pair >= kMostClusters || seen[pair]) return;
    seen[pair] = true;
    order.preferred[pair] = static_cast<uint8_t>(next++);
  };
  for (const uint32_t multiprocessor : Probe()) append(multiprocessor / 2);
  for (int pair = 0; pair < kMostClusters; ++pair) append(pair);
  return order;
}

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

LOSSD_KERNEL_FILE(ClusterLaunch)
