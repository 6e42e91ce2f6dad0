// SPDX-License-Identifier: Apache-2.0
// What launches of the products on Hopper need of the driver and the device: descriptions of matrices for the
// copy engine (MakeTensorMap), and the order of the clusters of a persistent grid (FindClusterOrder).
//
// Thread-safe. The driver is asked at run time, so that programs start without one.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_CLUSTER_LAUNCH_H_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_CLUSTER_LAUNCH_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/device/device_limits.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda::hopper {

// The order for the current device. The function finds the groups by launching clusters as large as a group;
// the order has no groups if the device cannot tell. Synchronizes.
ClusterOrder FindClusterOrder();

// A row-major matrix on the device, 16-byte aligned, and the boxes it is copied in.
struct BoxedMatrix {
  const void* data = nullptr;
  DType dtype = DType::kBFloat16;
  int64_t rows = 0;
  int64_t cols = 0;  // also the elements between rows; a multiple of 16 bytes
  int box_rows = 0;  // at most 256
};

// Boxes are 128 bytes wide and lie in shared memory with the 128-byte swizzle; what lies outside
// the matrix is read as zero and not written. cudaErrorNotSupported if the driver has no such function.
cudaError_t MakeTensorMap(const BoxedMatrix& matrix, CUtensorMap& map);

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_CLUSTER_LAUNCH_H_
