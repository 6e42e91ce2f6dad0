// SPDX-License-Identifier: Apache-2.0
// How the tile of a consumer warpgroup leaves its registers for device memory: through boxes in shared memory
// that the copy engine stores while the next ones are filled.
//
// What a thread holds of its warpgroup's kProductRows x kColumnTile is said at Mma64x256x16.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_OUT_BOXES_CUH_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_OUT_BOXES_CUH_

#include "kernels/cuda/kernels/hopper/main_loop.cuh"

namespace lossd::kernels::cuda::hopper {

// A box is kProductRows rows of 128 bytes, with the 128-byte swizzle; two a warpgroup, used in turn.
inline constexpr int kBoxRowBytes = 128;
inline constexpr int kBoxBytes = kProductRows * kBoxRowBytes;
inline constexpr int kOutBytes = kConsumers * 2 * kBoxBytes;

struct OutBoxes {
  const CUtensorMap* map;
  uint32_t boxes;    // of this warpgroup, [2][kBoxBytes]
  uint32_t barrier;  // its named barrier
  bool leader;       // the one thread that starts its copies

  __device__ __forceinline__ OutBoxes(const CUtensorMap& out, uint32_t all_boxes, int consumer)
      : map(&out),
        boxes(all_boxes + consumer * 2 * kBoxBytes),
        barrier(1 + consumer),
        leader(threadIdx.x % kWarpgroup == 0) {}

  // Waits until the box that was not sent last may be written again; kCopies: that a box is sent in.
  template <int kCopies = 1>
  __device__ __forceinline__ void Open() const {
    if (leader) WaitBoxesRead<kCopies>();
    SyncNamed(barrier, kWarpgroup);
  }
  // 16-bit elements, two a word: two groups of 8 columns from `group` on, both halves of each.
  __device__ __forceinline__ void Put(int i, int group, const uint32_t (&words)[4]) const {
    const int row = 16 * static_cast<int>((threadIdx.x >> 5) & 3) + static_cast<int>(threadIdx.x & 15);
    const int mine = group + static_cast<int>((threadIdx.x >> 4) & 1);
    StoreMatrices(boxes + i * kBoxBytes + row * kBoxRowBytes + ((mine ^ (row & 7)) << 4), words[0], words[1],
                  words[2], words[3]);
  }
  // Writes the low half of `word` over one 16-bit element, after the warp that Put() it has synchronised.
  __device__ __forceinline__ void Replace(int i, int row, int column, uint32_t word) const {
    const int group = (column >> 3) ^ (row & 7);
    StoreHalf(boxes + i * kBoxBytes + row * kBoxRowBytes + (group << 4) + 2 * (column & 7), word);
  }
  // The same to a box that has the tile transposed: its rows are the tile's columns, 8 a group, and their
  // 128 bytes the warpgroup's rows.
  __device__ __forceinline__ void PutTransposed(int i, int group, const uint32_t (&words)[4]) const {
    const int lane = static_cast<int>(threadIdx.x & 31);
    const int row = 8 * (group + (lane >> 4)) + (lane & 7);
    const int chunk = 2 * static_cast<int>((threadIdx.x >> 5) & 3) + ((lane >> 3) & 1);
    StoreMatricesTransposed(boxes + i * kBoxBytes + row * kBoxRowBytes + ((chunk ^ (row & 7)) << 4), words[0],
                            words[1], words[2], words[3]);
  }
  // fp32 elements, of half `h`, to a pair of boxes of half as many rows, one for the warpgroup's first 32
  // rows and one for the others. `row` of these boxes: 8 times a group and the lane's column in it.
  __device__ __forceinline__ void PutFloatTransposed(int i, int row, int h, float value) const {
    const int column =
        16 * static_cast<int>((threadIdx.x >> 5) & 3) + 8 * h + static_cast<int>(threadIdx.x & 31) / 4;
    const int chunk = (column % 32) / 4;
    StoreFloat(boxes + i * kBoxBytes + column / 32 * (kBoxBytes / 2) + row * kBoxRowBytes +
                   ((chunk ^ (row & 7)) << 4) + column % 4 * 4,
               value);
  }
  __device__ __forceinline__ void Send(int i, int column, int row) const {
    FenceAsyncProxy();
    SyncNamed(barrier, kWarpgroup);
    if (leader) CopyBoxOut(*map, column, row, boxes + i * kBoxBytes);
  }
  // A pair of fp32 boxes. add: to what is there.
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
  // Before the block ends.
  __device__ __forceinline__ void Finish() const {
    if (leader) WaitBoxesRead<0>();
  }
};

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_OUT_BOXES_CUH_
