// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "kernels/cuda/kernels/hopper/cluster_order.h"
#include "kernels/cuda/kernels/hopper/ptx.cuh"

namespace lossd::kernels::cuda::hopper {
namespace {

constexpr int kProbeBlocks = 16;  // of a cluster: nearly all multiprocessors of a group
constexpr int kProbeThreads = 32;
constexpr int kProbeBytes = 120 << 10;     // of shared memory: one block a multiprocessor
constexpr int64_t kProbeCycles = 100'000;  // of a block, so that all of them run at once

__global__ void ProbeKernel(uint32_t* multiprocessors) {
  if (threadIdx.x != 0) return;
  multiprocessors[blockIdx.x] = Multiprocessor();
  const int64_t begin = clock64();
  while (clock64() - begin < kProbeCycles) {
  }
}

// The multiprocessor of every block, cluster by cluster; empty if there are no such clusters.
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
  cudaGetLastError();
  return multiprocessors;
}

}  // namespace

ClusterOrder FindClusterOrder() {
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

}  // namespace lossd::kernels::cuda::hopper
