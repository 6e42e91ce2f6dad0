// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/cuda/device/cluster_write.h"

namespace lossd::kernels::cuda {
namespace {

__global__ void WriteKernel(uint8_t* place, uint8_t value) { place[blockIdx.x] = value; }

__global__ void __cluster_dims__(2) PairWriteKernel(uint8_t* place, uint8_t value) {
  place[blockIdx.x] = value;
}

}  // namespace

cudaError_t LaunchClusterWrite(uint8_t* place, uint8_t value, unsigned blocks, cudaStream_t stream) {
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {blocks, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(1);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = blocks > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, WriteKernel, place, value);
}

cudaError_t LaunchPairWrite(uint8_t* place, uint8_t value, cudaStream_t stream) {
  PairWriteKernel<<<2, 1, 0, stream>>>(place, value);
  return cudaGetLastError();
}

}  // namespace lossd::kernels::cuda
