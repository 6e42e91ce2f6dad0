// SPDX-License-Identifier: Apache-2.0
// A kernel for tests of what launches kernels.
#ifndef LOSSD_TESTS_KERNELS_CUDA_DEVICE_CLUSTER_WRITE_H_
#define LOSSD_TESTS_KERNELS_CUDA_DEVICE_CLUSTER_WRITE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace lossd::kernels::cuda {

// Writes `value` to place[0, blocks) (device memory), one block each, which are a cluster if there are
// several. Several need compute capability 9.0.
cudaError_t LaunchClusterWrite(uint8_t* place, uint8_t value, unsigned blocks, cudaStream_t stream);
// The same for two blocks, by a kernel that is compiled for clusters of two.
cudaError_t LaunchPairWrite(uint8_t* place, uint8_t value, cudaStream_t stream);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_TESTS_KERNELS_CUDA_DEVICE_CLUSTER_WRITE_H_
