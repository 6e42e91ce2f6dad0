// SPDX-License-Identifier: Apache-2.0
// The GPU of the CUDA tests; without one they are skipped, visibly.
#ifndef LOSSD_TESTS_KERNELS_CUDA_CUDA_TEST_DEVICE_H_
#define LOSSD_TESTS_KERNELS_CUDA_CUDA_TEST_DEVICE_H_

#include <cuda_runtime_api.h>

#include "gtest/gtest.h"

namespace lossd::kernels::testing {

inline int GpuCount() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}
inline bool HaveGpu() { return GpuCount() > 0; }

// Compute capability 9.0, for which the kernels in kernels/cuda/kernels/hopper are built.
inline bool HaveHopperGpu() {
  cudaDeviceProp properties;
  return HaveGpu() && cudaGetDeviceProperties(&properties, 0) == cudaSuccess && properties.major == 9;
}

}  // namespace lossd::kernels::testing

#define LOSSD_SKIP_WITHOUT_GPU() \
  if (!::lossd::kernels::testing::HaveGpu()) GTEST_SKIP() << "no CUDA GPU on this machine"

#define LOSSD_SKIP_WITHOUT_HOPPER_GPU() \
  LOSSD_SKIP_WITHOUT_GPU();             \
  if (!::lossd::kernels::testing::HaveHopperGpu()) GTEST_SKIP() << "not a Hopper GPU"

#endif  // LOSSD_TESTS_KERNELS_CUDA_CUDA_TEST_DEVICE_H_
