// SPDX-License-Identifier: Apache-2.0
// Two helpers for launches of matrix products on Hopper. MakeTensorMap describes a matrix to the copy engine
// (TMA). FindClusterOrder finds the order of the clusters of a persistent grid.
//
// Thread-safe. Functions of the driver are looked up at run time, so programs also start on a machine without
// a driver.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_CLUSTER_LAUNCH_H_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_CLUSTER_LAUNCH_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/device/device_limits.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda::hopper {

// The order for the current device. The function finds the groups of multiprocessors by launching clusters as
// large as a group. If that does not work on the device, the order has no groups. Synchronizes.
ClusterOrder FindClusterOrder();

// A row-major matrix on the device, 16-byte aligned, and the boxes in which it is copied.
struct BoxedMatrix {
  const void* data = nullptr;
  DType dtype = DType::kBFloat16;
  int64_t rows = 0;
  int64_t cols = 0;  // also the row stride; rows take a multiple of 16 bytes
  int box_rows = 0;  // at most 256
};

// Boxes are 128 bytes wide, and lie in shared memory with the 128-byte swizzle. Elements outside the matrix
// are read as zero and not written. cudaErrorNotSupported if the driver lacks the function.
cudaError_t MakeTensorMap(const BoxedMatrix& matrix, CUtensorMap& map);

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_CLUSTER_LAUNCH_H_
