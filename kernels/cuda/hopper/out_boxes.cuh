// How the tile of a consumer warpgroup leaves its registers for device memory: through boxes in shared memory
// that the copy engine stores while the next ones are filled.
//
// What a thread holds of its warpgroup's kProductRows x kColumnTile is said at Mma64x256x16.
#ifndef LOSSD_KERNELS_CUDA_HOPPER_OUT_BOXES_CUH_
#define LOSSD_KERNELS_CUDA_HOPPER_OUT_BOXES_CUH_

#include "kernels/cuda/hopper/main_loop.cuh"

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

  // Waits until box `i` may be written again.
  __device__ __forceinline__ void Open() const {
    if (leader) WaitBoxesRead<1>();
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
  // fp32 elements of half `h`, this lane's pair of the group of 8 columns `group` (0 or 1) and of the one two
  // further. Odd rows take the two the other way round, so that the rows of a half-warp lie in different
  // banks.
  __device__ __forceinline__ void PutFloats(int i, int group, int h, float2 near, float2 far) const {
    const int lane = static_cast<int>(threadIdx.x & 31);
    const int row = 16 * static_cast<int>((threadIdx.x >> 5) & 3) + 8 * h + lane / 4;
    const bool odd = (row & 1) != 0;
    const uint32_t line = boxes + i * kBoxBytes + row * kBoxRowBytes + (lane & 1) * 8;
    const int chunk = 2 * group + ((lane & 3) >> 1);
    const int first = odd ? chunk + 4 : chunk;
    StorePair(line + ((first ^ (row & 7)) << 4), odd ? far : near);
    StorePair(line + ((first ^ 4 ^ (row & 7)) << 4), odd ? near : far);
  }
  // add: to what is there, in fp32.
  __device__ __forceinline__ void Send(int i, int column, int row, bool add = false) const {
    FenceAsyncProxy();
    SyncNamed(barrier, kWarpgroup);
    if (!leader) return;
    if (add) {
      AddBoxOut(*map, column, row, boxes + i * kBoxBytes);
    } else {
      CopyBoxOut(*map, column, row, boxes + i * kBoxBytes);
    }
  }
  // Before the block ends.
  __device__ __forceinline__ void Finish() const {
    if (leader) WaitBoxesRead<0>();
  }
};

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_HOPPER_OUT_BOXES_CUH_
