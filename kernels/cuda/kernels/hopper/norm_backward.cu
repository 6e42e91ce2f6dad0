// SPDX-License-Identifier: Apache-2.0
// The first stage of the backward pass of LayerNorm and RMSNorm on Hopper, for rows of 1024 to 32768 columns
// (norm.h has the formulas). Bytes: reads x and dy, writes dx.
//
// Plan: as for the backward pass in ../norm.cu, with two differences. First, one thread of a group copies
// whole rows into the group's ring. Second, a thread keeps its part of a row in registers between the two
// passes; so after the barrier for the row's sums, the row's place in the ring is free.
//
// As in ../norm_rows.cuh, a vector is eight columns, and a group is the threads of a block that work on one
// row. The groups of all clusters take rows in turn. A group's n-th row is its turn n.
//
// Two blocks of a cluster may share rows; each then has half of the columns. Rows with fewer than 10240
// columns are shared so that a block works on several rows at a time: it computes on one row while another
// row waits for its sums. Rows with more than 12288 columns are shared because one block has no room for
// them. Rows between these limits are not shared. Up to 8192 columns a thread has two vectors, above that
// three, which needs fewer instructions a column, and four only if rows do not fit otherwise. These numbers
// are for x and dy of 16 bits. Rows with an fp32 matrix have two vectors a thread, and rows of at least 2048
// columns are shared.
#include <algorithm>
#include <cstdint>

#include "kernels/cuda/device/kernel_code.h"
#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/hopper/ptx.cuh"
#include "kernels/cuda/kernels/norm.h"
#include "kernels/cuda/kernels/norm_rows.cuh"

namespace lossd::kernels::cuda::hopper {
namespace {

// ---- a group's rows in shared memory (bulk copies), and two sums over a group at once ----

constexpr int kMostGroups = 8;       // of a block, because each has a barrier of its own
constexpr int kMostGroupWarps = 16;  // of a group
constexpr int kStages = 2;           // rows of a ring; with more the first rows arrive later
constexpr int kMostSums = 64;        // for all warps of a cluster; a multiple of four for each group

// The next rows of a group: kStages of them are in shared memory or on their way. `turn` counts the group's
// rows from 0; the row of a turn lies at the place turn % kStages. One thread fetches the rows; it fetches
// the facts of a row (RowFacts) one turn before the row itself. `Copy`: copy(to, barrier, row, raw_row)
// starts the copies of a row, row_units units of 16 bytes in all.
template <typename Copy>
class RowRing {
 public:
  // The shared memory of a ring, except for the rows.
  struct Places {
    RowFacts facts[2 * kStages];
    uint64_t barriers[kStages];
  };

  // ring: [kStages][row_units]. `brings`: whether this thread fetches the rows. The ring is usable after the
  // next barrier of the block.
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
  // Starts to fetch the first rows: row, row + step, ...
  __device__ __forceinline__ void Start(int row, int step) {
    if (!brings_) return;
#pragma unroll
    for (uint32_t turn = 0; turn <= kStages; ++turn) BringFacts(turn, row + static_cast<int>(turn) * step);
    AwaitAllCopies();
#pragma unroll
    for (uint32_t turn = 0; turn < kStages; ++turn) BringRow(turn, row + static_cast<int>(turn) * step);
  }
  // Waits for the row and returns it. If there is no row, returns its place at once.
  __device__ __forceinline__ const uint4* Await(uint32_t turn, bool has_row) const {
    if (has_row) Wait(Barrier(turn % kStages), turn / kStages % 2);
    return ring_ + turn % kStages * row_units_;
  }
  __device__ __forceinline__ RowFacts Facts(uint32_t turn) const { return FactsPlace(turn); }
  // Call when all threads of the group have read the row. `row` takes its place; the row after that will be
  // row + step.
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

// Sums two values, a and b, at once over the groups with the same index in all blocks of a cluster, with the
// same bits in all threads. Each warp writes its sums to a place of its own, in every block; then each thread
// adds up all places. There are two sets of places and barriers, used in turn. So a thread may write to a
// place again for the next sum but one: all threads have read it by then, because all threads had to take
// part in the sum between.
template <int kBlocks>
class PairSum {
 public:
  struct Scratch {
    alignas(16) float sums[2][2][kMostSums];  // [turn][index of the value]
    uint64_t barriers[kMostGroups][2];
  };

  // Usable after the next barrier of the cluster.
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
        // This is a loop, so that the other threads branch around it. If they were only predicated off,
        // racecheck would report that they write to an undefined address.
#pragma unroll 1
      for (int turn = 0; turn < 2; ++turn) InitBarrier(Barrier(turn), static_cast<uint32_t>(group.size / 32));
      FenceBarrierInit();
    }
  }

  // count: the number of sums before this one; all threads of the groups call it.
  __device__ __forceinline__ float2 operator()(uint32_t count, float a, float b) {
    // The lower half of the warp sums a, the upper half sums b.
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
  int quads_;  // places of the group's sums, in fours; places past the last warp stay 0
  int first_;
  Scratch& scratch_;
};

// ---- kernel ----

constexpr int64_t kMostRows = int64_t{1} << 30;
constexpr int64_t kFewestColumns = 1024;        // shorter rows leave too few threads for a group
constexpr int64_t kFewestColumnsToPair = 2048;  // such rows, and longer ones, are shared by two blocks
// The most columns of rows with two vectors a thread; longer rows have three.
constexpr int64_t kMostColumnsOfTwo = 8192;
constexpr int64_t kFewestColumnsAlone = 10240;  // such rows, and longer ones, are shared only if necessary

// One thread's vectors of a row, as loaded.
template <typename X, typename Dy, int kVectors>
struct HeldRow {
  static constexpr int kXPieces = sizeof(X) / 2;  // 16-byte pieces of a vector
  static constexpr int kDyPieces = sizeof(Dy) / 2;
  uint4 x[kVectors][kXPieces];
  uint4 dy[kVectors][kDyPieces];
  RowFacts facts;
  float offset;

  // from: x, then dy.
  __device__ __forceinline__ HeldRow(const uint4* from, int vectors, const RowGroup<false>& group,
                                     const RowFacts& row_facts)
      : facts(row_facts), offset(-row_facts.mean * row_facts.inverse_deviation) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = min(group.thread + i * group.size, vectors - 1);
#pragma unroll
      for (int k = 0; k < kXPieces; ++k) x[i][k] = from[v * kXPieces + k];
#pragma unroll
      for (int k = 0; k < kDyPieces; ++k) dy[i][k] = from[(vectors * kXPieces) + v * kDyPieces + k];
    }
  }
  __device__ __forceinline__ void Load(int i, float (&to_x)[8], float (&to_dy)[8]) const {
    UnpackEight<X>(x[i], to_x);
    UnpackEight<Dy>(dy[i], to_dy);
  }
};

// How a launch divides the work.
struct Plan {
  int group = 0;     // threads of a block that work on a row
  int groups = 0;    // of a block
  int clusters = 0;  // of one or two blocks
  int vectors = 0;   // of a row, in a block; the second block of a cluster may have one less
  int row_vectors = 0;
  int rounds = 0;  // rows of a group; the last row may not exist
  float inverse_cols = 0.0f;
  int shared_bytes = 0;
};

template <typename X, typename Dy, int kBlocks, int kVectors, int kThreads>
__global__ __launch_bounds__(kThreads,
                             1) void NormBackwardKernel(const __grid_constant__ NormParams p,
                                                        const __grid_constant__ NormBackwardParams b,
                                                        const __grid_constant__ Plan plan) {
  // [groups][kStages] parts of rows: x, then dy; at the end their memory is used for the sums of the groups.
  // Behind them lies the gain, unless it is in registers.
  extern __shared__ uint4 shared[];
  __shared__ typename PairSum<kBlocks>::Scratch scratch;
  constexpr int kUnits = static_cast<int>((sizeof(X) + sizeof(Dy)) / 2);  // 16-byte units of a vector
  const RowGroup<false> group(plan.group);
  PairSum<kBlocks> pair_sum(group, scratch);
  const int cluster = static_cast<int>(blockIdx.x) / kBlocks;
  const int first_vector = kBlocks == 1 ? 0 : static_cast<int>(ClusterRank()) * plan.vectors;
  const int vectors = kBlocks == 1 ? plan.vectors : min(plan.vectors, plan.row_vectors - first_vector);
  const int step = plan.groups * plan.clusters;

  const auto copy = [&](uint32_t to, uint32_t barrier, int row, int raw_row) {
    const uint32_t x_bytes = 8u * sizeof(X) * static_cast<uint32_t>(vectors);
    CopyBytesIn(to, NormRow<X>(p.x, raw_row) + 8 * first_vector, x_bytes, barrier);
    CopyBytesIn(to + x_bytes, NormRow<Dy>(p.y, row) + 8 * first_vector,
                8u * sizeof(Dy) * static_cast<uint32_t>(vectors), barrier);
  };
  using Ring = RowRing<decltype(copy)>;
  __shared__ typename Ring::Places places[kMostGroups];
  Ring ring(p, b, places[group.index], shared + group.index * kStages * kUnits * vectors, kUnits * vectors,
            group.thread == 0, copy);
  if constexpr (kBlocks == 1) {
    __syncthreads();
  } else {
    ClusterSync();
  }
  AwaitKernelBefore();
  int row = cluster + group.index * plan.clusters;
  ring.Start(row, step);
  const Gain<kVectors> gains(p.gain + 8 * first_vector,
                             reinterpret_cast<float4*>(shared + plan.groups * kStages * kUnits * vectors),
                             vectors, group);
  if constexpr (!Gain<kVectors>::kHeld) __syncthreads();

  ColumnSums<kVectors> sums;
  // All groups take part in every round, even without a row.
  for (int turn = 0; turn < plan.rounds; ++turn, row += step) {
    const bool has_row = row < p.rows;
    const HeldRow<X, Dy, kVectors> held(ring.Await(turn, has_row), vectors, group, ring.Facts(turn));
    GroupValues<2> own = {};
    if (has_row) own = AddRow(held, group, vectors, gains, sums);
    const float2 total = pair_sum(turn, own.at[0], own.at[1]);
    ring.Replace(turn, row + kStages * step, step);
    if (has_row && b.dx.data != nullptr) {
      WriteGradient(held, group, vectors, gains, b.scale, p.centred ? total.x * plan.inverse_cols : 0.0f,
                    total.y * plan.inverse_cols,
                    NormRow<X>(b.dx, p.source != nullptr ? held.facts.raw_row : row) + 8 * first_vector);
    }
  }
  LetNextKernelStart();
  if (b.partials == nullptr) return;
  const PartialRow to = {b.partials, plan.clusters, cluster, plan.row_vectors, first_vector};
  WritePartials(sums, reinterpret_cast<float4*>(shared), vectors, group, p.centred, b.scale, to);
}

// The plan of a launch. If the rows do not fit, its `groups` is 0.
template <typename X, typename Dy, int kBlocks, int kVectors, int kThreads>
Plan MakePlan(const NormParams& p, const DeviceLimits& limits) {
  Plan plan;
  plan.row_vectors = static_cast<int>(p.x.cols / 8);
  plan.vectors = (plan.row_vectors + kBlocks - 1) / kBlocks;
  const int64_t cols = int64_t{plan.vectors} * 8;
  plan.group = NormGroupSize(cols, kVectors);
  if (plan.group > kMostGroupWarps * 32) return plan;
  const int64_t gain_bytes = Gain<kVectors>::kHeld ? 0 : cols * static_cast<int64_t>(sizeof(float));
  const int64_t ring_bytes = kStages * cols * static_cast<int64_t>(sizeof(X) + sizeof(Dy));
  const int64_t sum_bytes = 2 * cols * static_cast<int64_t>(sizeof(float));
  const int64_t group_bytes = std::max(ring_bytes, sum_bytes);
  const int64_t groups_in_shared = (limits.shared_bytes_per_block - gain_bytes) / group_bytes;
  plan.groups =
      static_cast<int>(std::min<int64_t>({kThreads / plan.group, groups_in_shared, int64_t{kMostGroups}}));
  if (plan.groups <= 0) return Plan{};
  plan.clusters = static_cast<int>(std::min<int64_t>(p.rows, limits.multiprocessors / kBlocks));
  const int rows_a_round = plan.groups * plan.clusters;
  plan.rounds = (static_cast<int>(p.rows) + rows_a_round - 1) / rows_a_round;
  plan.inverse_cols = 1.0f / static_cast<float>(p.x.cols);
  plan.shared_bytes = static_cast<int>(gain_bytes + plan.groups * group_bytes);
  return plan;
}

// A launch of the kernel.
struct Launch {
  const NormParams& p;
  const NormBackwardParams& b;
  const DeviceLimits& limits;
  cudaStream_t stream;
  int64_t* partial_rows;
  bool asks = false;  // only tests whether rows fit; launches nothing

  // Returns false if the rows do not fit. Otherwise launches the kernel, unless `asks`, and *error is the
  // error of the launch.
  template <typename X, typename Dy, int kBlocks, int kVectors, int kThreads>
  bool IfFits(cudaError_t* error) const {
    const Plan plan = MakePlan<X, Dy, kBlocks, kVectors, kThreads>(p, limits);
    if (plan.groups == 0) return false;
    if (asks) return true;
    const auto kernel = NormBackwardKernel<X, Dy, kBlocks, kVectors, kThreads>;
    *error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes);
    if (*error != cudaSuccess) return true;
    *partial_rows = plan.clusters;
    EarlyLaunch launch(static_cast<unsigned>(plan.clusters * kBlocks),
                       static_cast<unsigned>(plan.group * plan.groups), plan.shared_bytes, true, stream);
    if (kBlocks > 1) launch.SetCluster(kBlocks);
    *error = cudaLaunchKernelEx(launch.config(), kernel, p, b, plan);
    return true;
  }
  // Uses as many threads as the registers allow. Prefers three vectors a thread to four, because with four
  // vectors the gain is in shared memory.
  template <typename X, typename Dy>
  bool IfFits(cudaError_t* error) const {
    const int64_t cols = p.x.cols;
    if constexpr (sizeof(X) == 2 && sizeof(Dy) == 2) {
      if (cols < kFewestColumnsToPair) return IfFits<X, Dy, 1, 2, 640>(error);
      if (cols <= kMostColumnsOfTwo) return IfFits<X, Dy, 2, 2, 640>(error);
      if (cols < kFewestColumnsAlone) return IfFits<X, Dy, 2, 3, 512>(error);
      return IfFits<X, Dy, 1, 3, 512>(error) || IfFits<X, Dy, 2, 3, 512>(error) ||
             IfFits<X, Dy, 2, 4, 512>(error);
    } else {
      return cols < kFewestColumnsToPair ? IfFits<X, Dy, 1, 2, 512>(error) : IfFits<X, Dy, 2, 2, 512>(error);
    }
  }
};

}  // namespace

absl::string_view WhyNoNormBackward(const NormParams& params, const NormBackwardParams& backward,
                                    const DeviceLimits& limits) {
  if (!limits.is_hopper) return "not a Hopper GPU";
  if (params.x.cols < kFewestColumns) return "short rows";
  if (params.rows > kMostRows) return "many rows";
  cudaError_t error = cudaSuccess;
  const Launch launch = {params, backward, limits, nullptr, nullptr, /*asks=*/true};
  // LaunchIfPaired (norm_rows.cuh) calls launch.IfFits for the dtypes of x and dy.
  return LaunchIfPaired(launch, params, backward, &error) ? "" : "long rows";
}

bool LaunchNormBackwardIfFits(const NormParams& params, const NormBackwardParams& backward,
                              const DeviceLimits& limits, cudaStream_t stream, int64_t* partial_rows,
                              cudaError_t* error) {
  if (!WhyNoNormBackward(params, backward, limits).empty()) return false;
  return LaunchIfPaired(Launch{params, backward, limits, stream, partial_rows}, params, backward, error);
}

}  // namespace lossd::kernels::cuda::hopper

LOSSD_KERNEL_FILE(NormBackward)
