// SPDX-License-Identifier: Apache-2.0
// The order of the clusters of a persistent grid: clusters whose multiprocessors are in one group (GPC) work
// side by side. When they need the same bytes at about the same time, L2 is asked once.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_CLUSTER_ORDER_H_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_CLUSTER_ORDER_H_

#include <cstdint>

namespace lossd::kernels::cuda::hopper {

inline constexpr int kMostClusters = 128;  // that run at once, and pairs of multiprocessors

// The position that a cluster on multiprocessors 2 i and 2 i + 1 prefers: positions of a group are
// consecutive. Plain data; any values below kMostClusters are right, and only time depends on them.
struct ClusterOrder {
  uint8_t preferred[kMostClusters] = {};
};

// The order for the current device. The function finds the groups by launching clusters as large as a group;
// the order has no groups if the device cannot tell. Synchronizes. Thread-safe.
ClusterOrder FindClusterOrder();

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_CLUSTER_ORDER_H_
