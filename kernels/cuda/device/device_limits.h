// SPDX-License-Identifier: Apache-2.0
// DeviceLimits: what kernel launches need to know of a device. Plain data. The file is shorter than 60 lines
// because kernels and plans share it, and it must not include CUDA.
#ifndef LOSSD_KERNELS_CUDA_DEVICE_DEVICE_LIMITS_H_
#define LOSSD_KERNELS_CUDA_DEVICE_DEVICE_LIMITS_H_

#include <cstdint>

namespace lossd::kernels::cuda {

namespace hopper {

// The most clusters that run at once, and the most pairs of multiprocessors.
inline constexpr int kMostClusters = 128;

// The order of the clusters of a persistent grid. Clusters whose multiprocessors are in one group (GPC) work
// side by side: if they need the same bytes at about the same time, L2 is asked once.
//
// preferred[i] is the position that a cluster on the multiprocessors 2 i and 2 i + 1 prefers. Clusters of one
// group have consecutive positions. Any values below kMostClusters give right results; only time depends on
// them.
struct ClusterOrder {
  uint8_t preferred[kMostClusters] = {};
};

}  // namespace hopper

struct DeviceLimits {
  int multiprocessors = 1;
  int shared_bytes_per_block = 48 << 10;  // most dynamic shared memory a block may ask for
  int shared_bytes_per_sm = 64 << 10;
  // Compute capability 9.0 or later: there are thread block clusters, and a kernel can start before the
  // kernel that it waits for has ended.
  bool has_clusters = false;
  bool is_hopper = false;              // compute capability 9.0: kernels built for sm_90a run
  int fused_clusters = 0;              // clusters of the fused loss that run at once; 0: it cannot run
  hopper::ClusterOrder cluster_order;  // of the fused loss
  bool has_branches = false;           // the driver runs DeviceBranch, or the host branches
  bool shared_by_mps = false;          // MPS: kernels of other processes may run beside ours
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DEVICE_DEVICE_LIMITS_H_
