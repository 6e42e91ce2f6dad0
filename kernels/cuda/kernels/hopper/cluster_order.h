// SPDX-License-Identifier: Apache-2.0
// Which clusters of a persistent grid are to work side by side: those whose multiprocessors are of one group
// (GPC). What they ask of L2 at about the same time it is asked once.
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

// Of the current device, which is asked by launching clusters as large as a group; without groups if it
// cannot tell. Synchronizes. Thread-safe.
ClusterOrder FindClusterOrder();

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_CLUSTER_ORDER_H_
