// SPDX-License-Identifier: Apache-2.0
// What kernel launches need to know of a device. Plain data. The file is shorter than 60 lines because
// kernels and plans share it and need no CUDA for it.
#ifndef LOSSD_KERNELS_CUDA_DEVICE_DEVICE_LIMITS_H_
#define LOSSD_KERNELS_CUDA_DEVICE_DEVICE_LIMITS_H_

#include <cstdint>

namespace lossd::kernels::cuda {

namespace hopper {

inline constexpr int kMostClusters = 128;  // that run at once, and pairs of multiprocessors

// The order of the clusters of a persistent grid: clusters whose multiprocessors are in one group (GPC) work
// side by side. When they need the same bytes at about the same time, L2 is asked once.
//
// `preferred` is the position that a cluster on multiprocessors 2 i and 2 i + 1 prefers: positions of a group
// are consecutive. Any values below kMostClusters are right, and only time depends on them.
struct ClusterOrder {
  uint8_t preferred[kMostClusters] = {};
};

}  // namespace hopper

struct DeviceLimits {
  int multiprocessors = 1;
  int shared_bytes_per_block = 48 << 10;  // most dynamic shared memory a block may ask for
  int shared_bytes_per_sm = 64 << 10;
  // Compute capability 9.0 or later: thread block clusters, kernels that start before the one they wait for
  // has ended.
  bool has_clusters = false;
  bool is_hopper = false;              // compute capability 9.0: kernels built for sm_90a run
  int fused_clusters = 0;              // of the fused loss that run at once; 0: it does not run here
  hopper::ClusterOrder cluster_order;  // of these
  bool has_branches = false;           // the driver runs DeviceBranch, or the host branches
  bool shared_by_mps = false;          // kernels of other processes may run beside ours
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DEVICE_DEVICE_LIMITS_H_
