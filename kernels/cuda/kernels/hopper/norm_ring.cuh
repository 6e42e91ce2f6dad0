// SPDX-License-Identifier: Apache-2.0
// A group's rows through shared memory by bulk copies, and two sums over a group at once.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_NORM_RING_CUH_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_NORM_RING_CUH_

#include <cstdint>

#include "kernels/cuda/kernels/hopper/ptx.cuh"
#include "kernels/cuda/kernels/norm/norm_backward_rows.cuh"

namespace lossd::kernels::cuda::hopper {

inline constexpr int kMostGroups = 8;       // of a block: each has a barrier of its own
inline constexpr int kMostGroupWarps = 16;  // of a group
inline constexpr int kStages = 2;           // rows of a ring; with more the first rows come later
inline constexpr int kMostSums = 64;        // of all warps of a cluster, a multiple of four for each group

// A group's rows, kStages of them in shared memory or under way; `turn` counts those it has had. One thread
// brings them, and what is known of a row (RowFacts) one turn ahead of the row itself. `Copy`: copy(to,
// barrier, row, raw_row) starts the copies of a row, row_units units of 16 bytes in all.
template <typename Copy>
class RowRing {
 public:
  // What lies in shared memory beside the rows.
  struct Places {
    RowFacts facts[2 * kStages];
    uint64_t barriers[kStages];
  };

  // ring: [kStages][row_units]. Usable after the next barrier of the block.
  __device__ __forceinline__ RowRing(const NormParams& p, const NormBackwardParams& b, Places& places,
                                     uint4* ring, int row_units, bool brings, Copy copy)
      : p_(p), b_(b), places_(places), ring_(ring), row_units_(row_units), brings_(brings), copy_(copy) {
    if (!brings) return;
#pragma unroll
    for (uint32_t stage = 0; stage < kStages; ++stage) InitBarrier(Barrier(stage), 1);
    FenceBarrierInit();
#pragma unroll
    for (RowFacts& facts : places.facts) {
      if (!p.centred) facts.mean = 0.0f;
      if (b.keep == nullptr) facts.keep = 1;
    }
  }
  // The first rows: row, row + step, ...
  __device__ __forceinline__ void Start(int row, int step) {
    if (!brings_) return;
#pragma unroll
    for (uint32_t turn = 0; turn <= kStages; ++turn) BringFacts(turn, row + static_cast<int>(turn) * step);
    AwaitAllCopies();
#pragma unroll
    for (uint32_t turn = 0; turn < kStages; ++turn) BringRow(turn, row + static_cast<int>(turn) * step);
  }
  // The row, when it is there; without one, what is in its place.
  __device__ __forceinline__ const uint4* Await(uint32_t turn, bool has_row) const {
    if (has_row) Wait(Barrier(turn % kStages), turn / kStages % 2);
    return ring_ + turn % kStages * row_units_;
  }
  __device__ __forceinline__ RowFacts Facts(uint32_t turn) const { return FactsPlace(turn); }
  // All threads of the group have read the row: `row` takes its place, and after that comes row + step.
  __device__ __forceinline__ void Replace(uint32_t turn, int row, int step) {
    if (!brings_) return;
    AwaitAllCopies();
    BringRow(turn + kStages, row);
    BringFacts(turn + kStages + 1, row + step);
  }

 private:
  __device__ __forceinline__ uint32_t Barrier(uint32_t stage) const {
    return SharedAddress(&places_.barriers[stage]);
  }
  __device__ __forceinline__ RowFacts& FactsPlace(uint32_t turn) const {
    return places_.facts[turn % (2 * kStages)];
  }
  __device__ __forceinline__ void BringFacts(uint32_t turn, int row) {
    if (row >= p_.rows) return;
    RowFacts& to = FactsPlace(turn);
    CopyAsync4(SharedAddress(&to.inverse_deviation), p_.inverse_deviation + row);
    if (p_.centred) CopyAsync4(SharedAddress(&to.mean), p_.mean + row);
    if (b_.keep != nullptr) CopyAsync4(SharedAddress(&to.keep), b_.keep + row);
    if (p_.source != nullptr) CopyAsync4(SharedAddress(&to.raw_row), p_.source + row);
  }
  __device__ __forceinline__ void BringRow(uint32_t turn, int row) {
    if (row >= p_.rows) return;
    const uint32_t stage = turn % kStages;
    ArriveExpecting(Barrier(stage), 16u * static_cast<uint32_t>(row_units_));
    copy_(SharedAddress(ring_ + stage * row_units_), Barrier(stage), row,
          p_.source != nullptr ? FactsPlace(turn).raw_row : row);
  }

  const NormParams& p_;
  const NormBackwardParams& b_;
  Places& places_;
  uint4* ring_;
  int row_units_;
  bool brings_;
  Copy copy_;
};

// Sums of two numbers over the groups of the same index of a cluster's blocks, the same bits in all their
// threads. The sums' places and barriers are used by turns: whoever is about to write to a place for the next
// sum but one knows that all have read it, since the next sum needed all of them.
template <int kBlocks>
class PairSum {
 public:
  struct Scratch {
    alignas(16) float sums[2][2][kMostSums];  // [turn][which of the two numbers]
    uint64_t barriers[kMostGroups][2];
  };

  // The block's scratch is usable after the next barrier of the cluster.
  __device__ __forceinline__ PairSum(const RowGroup<false>& group, Scratch& scratch)
      : group_(group),
        quads_((kBlocks * (group.size / 32) + 3) / 4),
        first_(group.index * 4 * quads_),
        scratch_(scratch) {
    auto* sums = &scratch.sums[0][0][0];
    for (int i = static_cast<int>(threadIdx.x); i < 4 * kMostSums; i += static_cast<int>(blockDim.x))
      sums[i] = 0.0f;
    if constexpr (kBlocks > 1) {
      if (group.thread != 0) return;
        // A loop, so that the other threads branch around it: racecheck takes an init that they are
        // predicated off for a write of theirs to wherever.
#pragma unroll 1
      for (int turn = 0; turn < 2; ++turn) InitBarrier(Barrier(turn), static_cast<uint32_t>(group.size / 32));
      FenceBarrierInit();
    }
  }

  __device__ __forceinline__ float2 operator()(uint32_t count, float a, float b) {
    // The lower half of the warp adds up a, the upper b.
    const int which = group_.lane / 16;
    float sum = which == 1 ? b : a;
    sum += __shfl_xor_sync(0xffffffffu, which == 1 ? a : b, 16);
#pragma unroll
    for (int offset = 8; offset > 0; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    const uint32_t turn = count % 2;
    float* own = &scratch_.sums[turn][which][first_ + group_.thread / 32];
    if constexpr (kBlocks == 1) {
      if (group_.lane % 16 == 0) *own = sum;
      group_.Sync();
    } else {
      own += ClusterRank() * static_cast<uint32_t>(group_.size / 32);
      __syncwarp();
      if (group_.lane == 0) ArriveExpecting(Barrier(turn), 2 * kBlocks * sizeof(float));
      const auto to = static_cast<uint32_t>(group_.lane % 16);
      if (to < kBlocks) SendFloat(SharedAddress(own), sum, Barrier(turn), to);
      WaitForCluster(Barrier(turn), count / 2 % 2);
    }
    const auto* of_a = reinterpret_cast<const float4*>(scratch_.sums[turn][0] + first_);
    const auto* of_b = reinterpret_cast<const float4*>(scratch_.sums[turn][1] + first_);
    float4 total_a = of_a[0], total_b = of_b[0];
#pragma unroll 1
    for (int i = 1; i < quads_; ++i) {
      AddTo(total_a, of_a[i]);
      AddTo(total_b, of_b[i]);
    }
    return make_float2((total_a.x + total_a.y) + (total_a.z + total_a.w),
                       (total_b.x + total_b.y) + (total_b.z + total_b.w));
  }

 private:
  __device__ __forceinline__ uint32_t Barrier(uint32_t turn) const {
    return SharedAddress(&scratch_.barriers[group_.index][turn]);
  }
  __device__ __forceinline__ static void AddTo(float4& total, const float4& next) {
    total.x += next.x, total.y += next.y, total.z += next.z, total.w += next.w;
  }

  const RowGroup<false>& group_;
  int quads_;  // places of the group's sums, by four; those past the last warp's stay zero
  int first_;
  Scratch& scratch_;
};

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_NORM_RING_CUH_
