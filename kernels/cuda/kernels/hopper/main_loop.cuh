// SPDX-License-Identifier: Apache-2.0
// The main loop that the products of this folder share: C = A B for A [rows, inner], B [inner, columns] of a
// 16-bit type, tile by tile, with the sums of a tile left in registers.
//
// A cluster of two blocks works on kPanelRows x kColumnTile of C. A block has kRowTile of the rows; it
// fetches its part of A and half of B, and gets the other half by multicast. A producer thread fills a ring
// of kStages stages of kInnerTile inner elements (TMA, mbarriers); two consumer warpgroups multiply
// kProductRows x kColumnTile each from shared memory (wgmma).
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_MAIN_LOOP_CUH_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_MAIN_LOOP_CUH_

#include "kernels/cuda/kernels/hopper/ptx.cuh"
#include "kernels/cuda/kernels/hopper/tiles.h"

namespace lossd::kernels::cuda::hopper {

inline constexpr int kConsumers = 2;  // warpgroups, kProductRows rows of the tile each
inline constexpr int kWarpgroup = 128;
inline constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
inline constexpr int kStages = 4;
inline constexpr int kProducerRegisters = 40;
inline constexpr int kConsumerRegisters = 232;
inline constexpr int kInnerStep = 16;  // of one product instruction

// A stage holds A, then B; either as slabs of 64 rows of A or columns of B.
inline constexpr int kSlab = 64;
inline constexpr int kSlabBytes = kSlab * kInnerTile * 2;
inline constexpr int kABytes = kRowTile / kSlab * kSlabBytes;
inline constexpr int kBBytes = kColumnTile / kSlab * kSlabBytes;
inline constexpr int kStageBytes = kABytes + kBBytes;
inline constexpr int kBPart = kBBytes / kClusterBlocks;  // what one block of the cluster fetches for both
inline constexpr int kPartColumns = kColumnTile / kClusterBlocks;
inline constexpr int kRingBytes = kStages * kStageBytes;
inline constexpr int kRingBarrierBytes = 2 * kStages * 8;

// The ring of stages in shared memory, and where one of its users is.
struct Ring {
  uint32_t stages;  // [kStages][kStageBytes]
  uint32_t full;    // [kStages] barriers of 8 bytes
  uint32_t empty;
  int index = 0;
  uint32_t parity = 0;

  // Addresses of shared memory: of kRingBytes, a multiple of 1024, and of kRingBarrierBytes.
  __device__ __forceinline__ Ring(uint32_t all_stages, uint32_t barriers)
      : stages(all_stages), full(barriers), empty(barriers + kStages * 8) {}

  // All threads of the cluster, once, before any use.
  __device__ __forceinline__ void Start() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        InitBarrier(full + 8 * i, 1);
        InitBarrier(empty + 8 * i, kClusterBlocks * kConsumers * (kWarpgroup / 32));
      }
      FenceBarrierInit();
    }
    ClusterSync();
  }

  __device__ __forceinline__ uint32_t A() const { return stages + index * kStageBytes; }
  __device__ __forceinline__ uint32_t B() const { return A() + kABytes; }
  __device__ __forceinline__ uint32_t Full() const { return full + index * 8; }
  __device__ __forceinline__ uint32_t Empty() const { return empty + index * 8; }
  __device__ __forceinline__ void Next() {
    if (++index == kStages) {
      index = 0;
      parity ^= 1;
    }
  }
};

// The producer's thread: fetches the next stage, inner elements from k on, for rows of A from `row` and
// columns of B from `column` on: this block's row of A, and its part of the columns of B.
template <Major kMajorA, Major kMajorB>
__device__ __forceinline__ void Fetch(const CUtensorMap& a, const CUtensorMap& b, int row, int column, int k,
                                      uint32_t rank, Ring& ring) {
  constexpr uint16_t kAllBlocks = (1 << kClusterBlocks) - 1;
  Wait(ring.Empty(), ring.parity ^ 1);
  ArriveExpecting(ring.Full(), kStageBytes);
  if constexpr (kMajorA == Major::kInner) {
    CopyBoxIn(ring.A(), a, k, row, ring.Full());
  } else {
#pragma unroll
    for (int i = 0; i < kRowTile / kSlab; ++i) {
      CopyBoxIn(ring.A() + i * kSlabBytes, a, row + i * kSlab, k, ring.Full());
    }
  }
  const uint32_t part = ring.B() + rank * kBPart;
  if constexpr (kMajorB == Major::kInner) {
    CopyBoxToBlocks(part, b, k, column, ring.Full(), kAllBlocks);
  } else {
#pragma unroll
    for (int i = 0; i < kPartColumns / kSlab; ++i) {
      CopyBoxToBlocks(part + i * kSlabBytes, b, column + i * kSlab, k, ring.Full(), kAllBlocks);
    }
  }
  ring.Next();
}

// One consumer warpgroup: the sums of its rows over the next `stages` stages (at least one), which go back to
// both blocks. before_last(): once, while the last but one is being multiplied, or the only one.
template <typename T, Major kMajorA, Major kMajorB, typename BeforeLast>
__device__ __forceinline__ void Multiply(int stages, int consumer, Ring& ring, float (&sums)[128],
                                         BeforeLast before_last) {
  const uint32_t lane = threadIdx.x & 31;
  uint32_t last_empty = 0;
  for (int k = 0; k < stages; ++k) {
    const uint64_t a = MatrixDescriptor<kMajorA>(ring.A() + consumer * kSlabBytes);
    const uint64_t b = MatrixDescriptor<kMajorB>(ring.B());
    Wait(ring.Full(), ring.parity);
    BeginProducts();
#pragma unroll
    for (int i = 0; i < kInnerTile / kInnerStep; ++i) {
      Mma64x256x16<T, kMajorA, kMajorB>(sums, a + i * kDescriptorStep<kMajorA>,
                                        b + i * kDescriptorStep<kMajorB>, k > 0 || i > 0);
    }
    CommitProducts();
    if (k == max(stages - 2, 0)) before_last();
    WaitProducts<1>();
    if (k > 0 && lane < kClusterBlocks) ArriveAt(last_empty, lane);
    last_empty = ring.Empty();
    ring.Next();
  }
  WaitProducts<0>();
  if (lane < kClusterBlocks) ArriveAt(last_empty, lane);
}
template <typename T, Major kMajorA, Major kMajorB>
__device__ __forceinline__ void Multiply(int stages, int consumer, Ring& ring, float (&sums)[128]) {
  Multiply<T, kMajorA, kMajorB>(stages, consumer, ring, sums, [] {});
}

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_MAIN_LOOP_CUH_
