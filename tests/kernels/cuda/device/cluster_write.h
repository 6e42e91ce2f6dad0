// SPDX-License-Identifier: Apache-2.0
// A small kernel for tests of code that launches kernels.
#ifndef LOSSD_TESTS_KERNELS_CUDA_DEVICE_CLUSTER_WRITE_H_
#define LOSSD_TESTS_KERNELS_CUDA_DEVICE_CLUSTER_WRITE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace lossd::kernels::cuda {

// Writes `value` to place[0 ... blocks) in device memory; each block writes one byte. Several blocks are
// launched as one cluster, which needs compute capability 9.0.
cudaError_t LaunchClusterWrite(uint8_t* place, uint8_t value, unsigned blocks, cudaStream_t stream);
// The same for two blocks, with a kernel that is compiled for clusters of two.
cudaError_t LaunchPairWrite(uint8_t* place, uint8_t value, cudaStream_t stream);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_TESTS_KERNELS_CUDA_DEVICE_CLUSTER_WRITE_H_
