// SPDX-License-Identifier: Apache-2.0
// Parts of the matrix-product kernels of this folder:
// - the main loop: C = A B for A [rows, inner] and B [inner, columns] of a 16-bit type, tile by tile; the
//   sums of a tile end in registers,
// - the position of a cluster in the order of its grid (TakePosition),
// - the way of a tile from registers to device memory (OutBoxes).
//
// Tile plan: a cluster of two blocks computes a tile of kPanelRows x kColumnTile of C. Each block computes
// kRowTile of these rows. A block fetches its rows of A and half of the columns of B; the other block sends
// the other half of B by multicast. In each block, a producer thread fills a ring of kStages stages, each
// with kInnerTile inner elements (TMA, mbarriers). Two consumer warpgroups compute kProductRows x kColumnTile
// each from the stages in shared memory (wgmma).
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_MAIN_LOOP_CUH_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_MAIN_LOOP_CUH_

#include "kernels/cuda/kernels/hopper/cluster_launch.h"
#include "kernels/cuda/kernels/hopper/plan.h"
#include "kernels/cuda/kernels/hopper/ptx.cuh"

namespace lossd::kernels::cuda::hopper {

// ---- main loop ----

inline constexpr int kConsumers = 2;  // warpgroups; each has kProductRows rows of the tile
inline constexpr int kWarpgroup = 128;
inline constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
inline constexpr int kStages = 4;
inline constexpr int kProducerRegisters = 40;
inline constexpr int kConsumerRegisters = 232;
inline constexpr int kInnerStep = 16;  // inner elements of one product instruction

// A stage holds A, then B, each as slabs of 64 rows of A or 64 columns of B.
inline constexpr int kSlab = 64;
inline constexpr int kSlabBytes = kSlab * kInnerTile * 2;
inline constexpr int kABytes = kRowTile / kSlab * kSlabBytes;
inline constexpr int kBBytes = kColumnTile / kSlab * kSlabBytes;
inline constexpr int kStageBytes = kABytes + kBBytes;
inline constexpr int kBPart = kBBytes / kClusterBlocks;  // bytes of B that a block fetches for both blocks
inline constexpr int kPartColumns = kColumnTile / kClusterBlocks;
inline constexpr int kRingBytes = kStages * kStageBytes;
inline constexpr int kRingBarrierBytes = 2 * kStages * 8;

// The ring of stages in shared memory. Each user of the ring (the producer thread, or a thread of a consumer)
// has a copy of this struct with its own position: the next stage, `index`, and the parity of the phase of
// its barriers, which changes with each turn around the ring. A phase of `full` ends when all bytes of the
// stage have arrived. A phase of `empty` ends when the consumers of both blocks have read the stage: the
// other block also writes to this block's stages, so a stage must be free in both.
struct Ring {
  uint32_t stages;  // [kStages][kStageBytes]
  uint32_t full;    // [kStages] barriers of 8 bytes; the same for `empty`
  uint32_t empty;
  int index = 0;
  uint32_t parity = 0;

  // Addresses in shared memory: all_stages of kRingBytes (a multiple of 1024), barriers of kRingBarrierBytes.
  __device__ __forceinline__ Ring(uint32_t all_stages, uint32_t barriers)
      : stages(all_stages), full(barriers), empty(barriers + kStages * 8) {}

  // Called once by all threads of the cluster, before any use.
  __device__ __forceinline__ void Start() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        InitBarrier(full + 8 * i, 1);  // the producer of this block
        // One arrival for each consumer warp of both blocks.
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

// Called by the producer thread. Fetches the next stage: the inner elements from k on, for the rows of A from
// `row` on and the columns of B from `column` on. `row` and `column`: the first of this block's rows of A,
// and the first of the columns of B that this block fetches.
template <Major kMajorA, Major kMajorB>
__device__ __forceinline__ void Fetch(const CUtensorMap& a, const CUtensorMap& b, int row, int column, int k,
                                      uint32_t rank, Ring& ring) {
  constexpr uint16_t kAllBlocks = (1 << kClusterBlocks) - 1;
  Wait(ring.Empty(), ring.parity ^ 1);        // in the first turn, returns at once
  ArriveExpecting(ring.Full(), kStageBytes);  // A, and both halves of B
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

// Called by one consumer warpgroup. Computes the sums of its rows over the next `stages` stages (at least
// one), and tells both blocks that the stages are free again. Calls before_last() once, while the last stage
// but one, or the only stage, is being multiplied.
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
    // The first product of this call overwrites `sums`, the others add to it.
#pragma unroll
    for (int i = 0; i < kInnerTile / kInnerStep; ++i) {
      Mma64x256x16<T, kMajorA, kMajorB>(sums, a + i * kDescriptorStep<kMajorA>,
                                        b + i * kDescriptorStep<kMajorB>, k > 0 || i > 0);
    }
    CommitProducts();
    if (k == max(stages - 2, 0)) before_last();
    // Only the products of this stage may still run, so the previous stage is free. Lane 0 of each warp tells
    // block 0, lane 1 tells block 1.
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

// ---- the position of a cluster in the order of its grid ----

inline constexpr int kPositionBytes = 16;  // of shared memory

// The order of the clusters of a launch, and the positions that have been taken.
struct ClusterPositions {
  ClusterOrder order;
  uint32_t* claimed = nullptr;  // [kMostClusters], 0 when the kernel starts; null: clusters in any order
};

// Called by one thread of block 0 of the cluster, before the cluster synchronizes. Writes a position below
// `clusters` to the address `word` in shared memory: the preferred position of its multiprocessors, if no
// other cluster has taken it. There are as many positions as clusters, so each cluster gets a position of its
// own.
__device__ __forceinline__ void TakePosition(const ClusterPositions& positions, int clusters, uint32_t word) {
  int position = static_cast<int>(blockIdx.x) / kClusterBlocks;
  if (positions.claimed != nullptr) {
    position = positions.order.preferred[Multiprocessor() / 2 % kMostClusters] % clusters;
    while (atomicExch(positions.claimed + position, 1) != 0) position = (position + 1) % clusters;
  }
  StoreWord(word, static_cast<uint32_t>(position));
}

// The position that a thread of block 0 has claimed for the cluster.
__device__ __forceinline__ int Position(uint32_t word) { return static_cast<int>(LoadWordOf(word, 0)); }

// ---- how the tile of a consumer warpgroup gets from its registers to device memory ----
//
// Boxes in shared memory are filled while the copy engine stores earlier ones. The comment at kProductRows
// (ptx.cuh) says which elements of the warpgroup's kProductRows x kColumnTile a thread holds.

// A box has kProductRows rows of 128 bytes. Each warpgroup has two boxes, used in turn. The 128-byte swizzle
// avoids conflicts of banks: piece c of 16 bytes of row r lies at the place c ^ (r % 8) of the row.
inline constexpr int kBoxRowBytes = 128;
inline constexpr int kBoxBytes = kProductRows * kBoxRowBytes;
inline constexpr int kOutBytes = kConsumers * 2 * kBoxBytes;

// The boxes of one consumer warpgroup, through which its tile goes to device memory. For each box in turn,
// all threads of the warpgroup call Open(), write elements with a function Put...(), and call Send(). `i` is
// the box, 0 or 1. A "half" is one of the two rows of a thread: h = 0 or 1.
struct OutBoxes {
  const CUtensorMap* map;
  uint32_t boxes;    // this warpgroup's boxes, [2][kBoxBytes]
  uint32_t barrier;  // the warpgroup's named barrier; 0 is __syncthreads()
  bool leader;       // this thread is the one that starts the copies

  __device__ __forceinline__ OutBoxes(const CUtensorMap& out, uint32_t all_boxes, int consumer)
      : map(&out),
        boxes(all_boxes + consumer * 2 * kBoxBytes),
        barrier(1 + consumer),
        leader(threadIdx.x % kWarpgroup == 0) {}

  // Waits until the next box may be written: until the copy engine has read it since it was last sent.
  // kCopies: the number of copies that send a box.
  template <int kCopies = 1>
  __device__ __forceinline__ void Open() const {
    if (leader) WaitBoxesRead<kCopies>();
    SyncNamed(barrier, kWarpgroup);
  }
  // Writes 16-bit elements, two in a word, to a box: two groups of 8 columns from `group` on, both halves of
  // each group.
  __device__ __forceinline__ void Put(int i, int group, const uint32_t (&words)[4]) const {
    const int row = 16 * static_cast<int>((threadIdx.x >> 5) & 3) + static_cast<int>(threadIdx.x & 15);
    const int mine = group + static_cast<int>((threadIdx.x >> 4) & 1);
    StoreMatrices(boxes + i * kBoxBytes + row * kBoxRowBytes + ((mine ^ (row & 7)) << 4), words[0], words[1],
                  words[2], words[3]);
  }
  // Overwrites one 16-bit element with the low half of `word`, after the warp that called Put() for it has
  // synchronized.
  __device__ __forceinline__ void Replace(int i, int row, int column, uint32_t word) const {
    const int group = (column >> 3) ^ (row & 7);
    StoreHalf(boxes + i * kBoxBytes + row * kBoxRowBytes + (group << 4) + 2 * (column & 7), word);
  }
  // Writes elements to a box that holds the tile transposed. A row of the box is a column of the tile, and
  // its 128 bytes are the warpgroup's rows. The columns are in groups of 8.
  __device__ __forceinline__ void PutTransposed(int i, int group, const uint32_t (&words)[4]) const {
    const int lane = static_cast<int>(threadIdx.x & 31);
    const int row = 8 * (group + (lane >> 4)) + (lane & 7);
    const int chunk = 2 * static_cast<int>((threadIdx.x >> 5) & 3) + ((lane >> 3) & 1);
    StoreMatricesTransposed(boxes + i * kBoxBytes + row * kBoxRowBytes + ((chunk ^ (row & 7)) << 4), words[0],
                            words[1], words[2], words[3]);
  }
  // Writes fp32 elements of half `h` to a pair of transposed boxes with half as many rows: one box for the
  // warpgroup's first 32 rows, and one for the other 32 rows. `row`: the row in these boxes, which is 8 times
  // the group plus the lane's column in the group.
  __device__ __forceinline__ void PutFloatTransposed(int i, int row, int h, float value) const {
    const int column =
        16 * static_cast<int>((threadIdx.x >> 5) & 3) + 8 * h + static_cast<int>(threadIdx.x & 31) / 4;
    const int chunk = (column % 32) / 4;
    StoreFloat(boxes + i * kBoxBytes + column / 32 * (kBoxBytes / 2) + row * kBoxRowBytes +
                   ((chunk ^ (row & 7)) << 4) + column % 4 * 4,
               value);
  }
  // Sends box `i` to device memory, where it begins at `column` and `row` of the matrix.
  __device__ __forceinline__ void Send(int i, int column, int row) const {
    FenceAsyncProxy();
    SyncNamed(barrier, kWarpgroup);
    if (leader) CopyBoxOut(*map, column, row, boxes + i * kBoxBytes);
  }
  // Sends a pair of fp32 boxes to device memory. add: adds their elements to the elements in memory.
  __device__ __forceinline__ void SendPair(int i, int column, int row, bool add) const {
    FenceAsyncProxy();
    SyncNamed(barrier, kWarpgroup);
    if (!leader) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t box = boxes + i * kBoxBytes + half * (kBoxBytes / 2);
      if (add) {
        AddBoxOut(*map, column + 32 * half, row, box);
      } else {
        CopyBoxOut(*map, column + 32 * half, row, box);
      }
    }
  }
  // Waits until the copy engine has read all boxes. Call before the block ends, and with it its shared
  // memory.
  __device__ __forceinline__ void Finish() const {
    if (leader) WaitBoxesRead<0>();
  }
};

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_MAIN_LOOP_CUH_
