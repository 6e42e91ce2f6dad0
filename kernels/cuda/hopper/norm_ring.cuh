// A group's rows through shared memory by bulk copies, and two sums over a group at once.
#ifndef LOSSD_KERNELS_CUDA_HOPPER_NORM_RING_CUH_
#define LOSSD_KERNELS_CUDA_HOPPER_NORM_RING_CUH_

#include <cstdint>

#include "kernels/cuda/hopper/ptx.cuh"
#include "kernels/cuda/norm_rows.cuh"

namespace lossd::kernels::cuda::hopper {

inline constexpr int kMostGroups = 8;       // of a block: each has a barrier of its own
inline constexpr int kMostGroupWarps = 16;  // of a group
inline constexpr int kMostWarps = 32;       // of a block

// The rows first, first + step, ... of a group, kStages of them in shared memory or under way. `Copy` is
// called by one thread: copy(to, barrier, row, raw_row) starts the copies of a row, row_units units of 16
// bytes in all.
template <int kStages, typename Copy>
class RowRing {
 public:
  // ring: [kStages][row_units]; barriers: [kStages], usable after the next barrier of the block.
  __device__ __forceinline__ RowRing(const NormParams& p, uint4* ring, uint64_t* barriers, int row_units,
                                     int first, int step, bool copies, Copy copy)
      : source_(p.source),
        rows_(static_cast<int>(p.rows)),
        next_(first),
        step_(step),
        ring_(ring),
        barriers_(SharedAddress(barriers)),
        row_units_(row_units),
        copies_(copies),
        copy_(copy) {
    if (!copies) return;
    for (int stage = 0; stage < kStages; ++stage) InitBarrier(Barrier(stage), 1);
    FenceBarrierInit();
  }
  __device__ __forceinline__ void Start() {
    if (!copies_) return;
    next_raw_ = RawRow();
    for (int stage = 0; stage < kStages; ++stage) Fetch(stage);
  }
  // The next row, when it is there; without one, what is in its place.
  __device__ __forceinline__ const uint4* Await(bool has_row) const {
    if (has_row) Wait(Barrier(stage_), parity_);
    return ring_ + stage_ * row_units_;
  }
  // All threads of the group have read it.
  __device__ __forceinline__ void Release() {
    if (copies_) Fetch(stage_);
    if (++stage_ == kStages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  __device__ __forceinline__ uint32_t Barrier(int stage) const {
    return barriers_ + 8u * static_cast<uint32_t>(stage);
  }
  __device__ __forceinline__ int RawRow() const {
    return source_ != nullptr && next_ < rows_ ? __ldg(source_ + next_) : next_;
  }
  __device__ __forceinline__ void Fetch(int stage) {
    if (next_ < rows_) {
      ArriveExpecting(Barrier(stage), 16u * static_cast<uint32_t>(row_units_));
      copy_(SharedAddress(ring_ + stage * row_units_), Barrier(stage), next_, next_raw_);
    }
    next_ += step_;
    next_raw_ = RawRow();
  }

  const int32_t* source_;
  int rows_;
  int next_;
  int next_raw_ = 0;
  int step_;
  uint4* ring_;
  uint32_t barriers_;
  int row_units_;
  bool copies_;
  Copy copy_;
  int stage_ = 0;
  uint32_t parity_ = 0;
};

// Sums of two numbers over a group of 2 to kMostGroupWarps warps, the same bits in all its threads.
class PairSum {
 public:
  // Scratch of the block; used by turns, so that one barrier a sum is enough.
  using Scratch = float[2][2][kMostWarps];

  __device__ __forceinline__ PairSum(const RowGroup<false>& group, Scratch& scratch)
      : group_(group), scratch_(scratch), warps_(group.size / 32), first_(group.index * warps_) {}

  __device__ __forceinline__ float2 operator()(float a, float b) {
    // The lower half of the warp adds up a, the upper b.
    const bool upper = (group_.lane & 16) != 0;
    float sum = upper ? b : a;
    sum += __shfl_xor_sync(0xffffffffu, upper ? a : b, 16);
#pragma unroll
    for (int offset = 8; offset > 0; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    auto& warps = scratch_[phase_];
    phase_ ^= 1;
    if (group_.lane % 16 == 0) warps[upper][first_ + group_.thread / 32] = sum;
    group_.Sync();
    float2 total = make_float2(0.0f, 0.0f);
#pragma unroll 8
    for (int i = 0; i < warps_; ++i) {
      total.x += warps[0][first_ + i];
      total.y += warps[1][first_ + i];
    }
    return total;
  }

 private:
  const RowGroup<false>& group_;
  Scratch& scratch_;
  int warps_;
  int first_;
  int phase_ = 0;
};

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_HOPPER_NORM_RING_CUH_
