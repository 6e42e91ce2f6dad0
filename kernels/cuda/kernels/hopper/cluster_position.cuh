// SPDX-License-Identifier: Apache-2.0
// Where a cluster stands in the order of its grid (cluster_order.h).
//
// The file is shorter than 60 lines because both products include it, and cluster_order.h is host code.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_CLUSTER_POSITION_CUH_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_CLUSTER_POSITION_CUH_

#include "kernels/cuda/kernels/hopper/cluster_order.h"
#include "kernels/cuda/kernels/hopper/ptx.cuh"
#include "kernels/cuda/kernels/hopper/tiles.h"

namespace lossd::kernels::cuda::hopper {

inline constexpr int kPositionBytes = 16;  // of shared memory

struct ClusterPositions {
  ClusterOrder order;
  uint32_t* claimed = nullptr;  // [kMostClusters], 0 when the kernel starts; null: clusters as they come
};

// One thread of the cluster, before the cluster synchronises: takes a position below `clusters`, the
// preferred one if no other cluster has it. As many clusters as positions: each gets another, wherever they
// run.
__device__ __forceinline__ void TakePosition(const ClusterPositions& positions, int clusters, uint32_t word) {
  int position = static_cast<int>(blockIdx.x) / kClusterBlocks;
  if (positions.claimed != nullptr) {
    position = positions.order.preferred[Multiprocessor() / 2 % kMostClusters] % clusters;
    while (atomicExch(positions.claimed + position, 1) != 0) position = (position + 1) % clusters;
  }
  StoreWord(word, static_cast<uint32_t>(position));
}

// The cluster's position, which a thread of block 0 has claimed.
__device__ __forceinline__ int Position(uint32_t word) { return static_cast<int>(LoadWordOf(word, 0)); }

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_CLUSTER_POSITION_CUH_
