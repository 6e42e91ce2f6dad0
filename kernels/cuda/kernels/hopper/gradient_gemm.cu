// SPDX-License-Identifier: Apache-2.0
// The product C = A B with row factors (gradient_gemm.h). For the hidden gradient A = E [rows, vocab] and B =
// W; for the weight gradient A = E^T and B = x. In memory, the inner dimension of B is the slow one. The
// kernel uses all three matrices in the form in which the chunk stores them.
//
// Plan: the kernel computes C^T = B^T A^T with the main loop of main_loop.cuh, because the tensor cores need
// less energy that way. A cluster computes tiles of 256 columns and 256 rows of C, in the order of
// PlanGradientGemm. Clusters on one group of multiprocessors work on neighboring tiles (TakePosition), and
// all clusters work in step (Pace). An output tile is transposed on its way through boxes in shared memory.
// The copy engine stores it or, for a weight gradient that is not zero, makes L2 add it. So no multiprocessor
// reads C, and the products of the next tile begin at once. Each element of C is stored once or gets one
// addition, so results do not depend on the order of clusters.
//
// The work of the clusters comes in units (Unit): a whole tile or, for the last tiles, a segment of a tile's
// inner dimension (plan.h). The cluster of the last segment stores the tile. The clusters of the earlier
// segments only leave partial sums for it in device memory (PartialSums). All clusters run at the same time
// and begin the units in order, so the segment for which a cluster waits has always been begun.
//
// FLOP: 2 rows columns inner. Bytes from L2 for each block and stage: 16 + 16 KB for 4.2 MFLOP, as in the
// logit pass.
#include <cstdint>
#include <cuda/atomic>

#include "kernels/cuda/device/kernel_code.h"
#include "kernels/cuda/kernels/hopper/cluster_launch.h"
#include "kernels/cuda/kernels/hopper/gradient_gemm.h"
#include "kernels/cuda/kernels/hopper/main_loop.cuh"

namespace lossd::kernels::cuda::hopper {
namespace {

// ---- pace ----
//
// Pace keeps the clusters of a persistent grid within a few stages of each other. So bytes that one cluster
// brings to L2 are still in L2, or on their way, when other clusters need them. This affects only the time,
// not the result; a cluster that has waited long goes on alone.

constexpr int kPaceStages = 8;  // stages of an epoch; clusters differ by less than two epochs
constexpr int kPaceCounters = 4;
constexpr int kPaceCounterWords = 32;  // one cache line for each counter
constexpr int kPaceWords = kPaceCounters * kPaceCounterWords;

// Used by one thread of a cluster. Each of the counters counts the clusters that have begun an epoch. It is
// used again, without being reset, every kPaceCounters epochs.
class Pace {
 public:
  // begun: [kPaceWords], 0 when the kernel starts.
  __device__ __forceinline__ Pace(uint32_t* begun, int clusters)
      : begun_(begun), clusters_(static_cast<uint32_t>(clusters)) {}

  // Call before stage `i` of a unit, if all clusters have a unit with the same number of stages. At the
  // beginning of an epoch, waits until all clusters have begun the epoch before.
  __device__ __forceinline__ void Keep(int i) {
    if (i % kPaceStages != 0) return;
    if (epoch_ > 0 && patient_) Await(epoch_ - 1);
    Counter(epoch_).fetch_add(1, ::cuda::memory_order_relaxed);
    ++epoch_;
  }

 private:
  static constexpr int kTries = 256;  // about a microsecond each

  __device__ __forceinline__ ::cuda::atomic_ref<uint32_t, ::cuda::thread_scope_device> Counter(
      uint32_t epoch) const {
    return ::cuda::atomic_ref<uint32_t, ::cuda::thread_scope_device>(
        begun_[epoch % kPaceCounters * kPaceCounterWords]);
  }
  // Waits until all clusters have begun `epoch`.
  __device__ __forceinline__ void Await(uint32_t epoch) {
    const uint32_t all = clusters_ * (epoch / kPaceCounters + 1);
    for (int i = 0; i < kTries; ++i) {
      if (static_cast<int32_t>(Counter(epoch).load(::cuda::memory_order_relaxed) - all) >= 0) return;
    }
    patient_ = false;
  }

  uint32_t* const begun_;
  const uint32_t clusters_;
  uint32_t epoch_ = 0;
  bool patient_ = true;
};

// ---- kernel ----

// The parts of a tile's partial sums: one for each warpgroup.
constexpr int kTileParts = kClusterBlocks * kConsumers;
constexpr int kPartVectors = kPartialBytes / kTileParts / sizeof(float4);

// Counters and flags that the clusters of a launch share; 0 when it starts.
struct Signals {
  uint32_t added[kMostPartials][kTileParts];  // segments that have been added to the partial sums
  uint32_t begun[kPaceWords];
  uint32_t claimed[kMostClusters];
};
static_assert(kMostPartials * kPartialBytes + sizeof(Signals) <= kGradientGemmScratchBytes);

struct KernelParams {
  GradientGemmPlan plan;
  int rows;
  bool add;
  float scale;
  const float* factors;
  // [plan.segmented][kTileParts][kPartVectors], in the order in which a warpgroup's threads hold them
  float4* partials;
  Signals* signals;
  ClusterPositions positions;
};

struct Maps {
  CUtensorMap a, b, c;
};

// ---- the work of a cluster ----

// A unit of work: the stages [first, first + stages) of the inner dimension of a tile. These are all stages
// unless the tile is segmented. `panel`: the tile's columns of C. `row_tile`: the tile's rows of C.
struct Unit {
  int panel, row_tile;
  int first, stages;
  bool backwards;  // the unit is processed from the last stage to the first
  int segment = 0, segments = 1;
  int partial = 0;  // index among plan.segmented

  __device__ __forceinline__ int Stage(int i) const { return backwards ? first + stages - 1 - i : first + i; }
};

// Every other unit of a cluster goes backwards. So it begins with the stages that the previous unit has left
// in L2.
__device__ __forceinline__ Unit UnitAt(const GradientGemmPlan& plan, int index) {
  Unit unit;
  int tile = index;
  if (index >= plan.whole) {
    unit.segments = plan.segments;
    unit.segment = (index - plan.whole) / plan.segmented;
    unit.partial = (index - plan.whole) - unit.segment * plan.segmented;
    tile = plan.whole + unit.partial;
  }
  unit.first = unit.segment * plan.inner_tiles / unit.segments;
  unit.stages = (unit.segment + 1) * plan.inner_tiles / unit.segments - unit.first;
  unit.backwards = index / plan.clusters % 2 != 0;
  const int group_tiles = plan.group * plan.panels;
  const int group = tile / group_tiles;
  const int first_row = group * plan.group;
  const int size = min(plan.group, plan.row_tiles - first_row);
  const int within = tile - group * group_tiles;
  unit.panel = within / size;
  unit.row_tile = first_row + within - unit.panel * size;
  return unit;
}

// Returns which of `clusters` consecutive units the cluster at `position` computes, so that clusters with
// neighboring positions share panels and row tiles. Imagine the units as a table with `size` units in each
// line: if the first unit begins a panel, a line has the row tiles of one panel. Two lines are a band. A band
// is cut in the middle into a left and a right block. Consecutive positions get the units of one block. Units
// after the last whole band are taken in order.
__device__ __forceinline__ int UnitInRound(int position, int size, int clusters) {
  const int band = position / (2 * size);
  if ((band + 1) * 2 * size > clusters) return position;
  const int left = (size + 1) / 2;  // columns of a band's left block
  int within = position - band * 2 * size;
  const bool second = within >= 2 * left;
  if (second) within -= 2 * left;
  const int columns = second ? size - left : left;
  const int row = within / columns;
  return (2 * band + row) * size + (second ? left : 0) + within - row * columns;
}

// Applies body(unit, together) to the units of a cluster. together: all clusters have such a unit, with the
// same number of stages.
template <typename Body>
__device__ __forceinline__ void ForEachUnit(const GradientGemmPlan& plan, int position, Body body) {
  const int together = plan.whole - plan.whole % plan.clusters;
  for (int i = UnitInRound(position, plan.group, plan.clusters); i < plan.units; i += plan.clusters) {
    body(UnitAt(plan, i), i < together);
  }
}

// The main loop computes C^T = B^T A^T, so B is its first operand and A its second. kMajorA: which dimension
// of A in `Maps` is contiguous.
template <Major kMajorA>
__device__ __forceinline__ void Produce(const Maps& maps, const KernelParams& p, Ring ring, uint32_t rank,
                                        int position) {
  Pace pace(p.signals->begun, p.plan.clusters);
  ForEachUnit(p.plan, position, [&](const Unit& unit, bool together) {
    const int column = unit.panel * kPanelRows + static_cast<int>(rank) * kRowTile;
    const int row = unit.row_tile * kColumnTile + static_cast<int>(rank) * kPartColumns;
    for (int i = 0; i < unit.stages; ++i) {
      if (together && rank == 0) pace.Keep(i);
      Fetch<Major::kOuter, kMajorA>(maps.b, maps.a, column, row, unit.Stage(i) * kInnerTile, rank, ring);
    }
  });
}

// ---- from the sums to C ----

// The partial sums of a segmented tile in device memory, for one warpgroup. They are added up in the order of
// the segments: each segment adds the sums of the segments before it to its own and, unless it is the last,
// puts the total back. `added`: the number of segments in the sums.
struct PartialSums {
  float4* vectors;  // this thread's vectors, kWarpgroup apart
  uint32_t* added;
  uint32_t barrier;

  __device__ __forceinline__ PartialSums(const KernelParams& p, const Unit& unit, int part, uint32_t barrier)
      : vectors(p.partials + (static_cast<int64_t>(unit.partial) * kTileParts + part) * kPartVectors +
                threadIdx.x % kWarpgroup),
        added(&p.signals->added[unit.partial][part]),
        barrier(barrier) {}

  __device__ __forceinline__ ::cuda::atomic_ref<uint32_t, ::cuda::thread_scope_device> Added() const {
    return ::cuda::atomic_ref<uint32_t, ::cuda::thread_scope_device>(*added);
  }
  // Waits until the sums of all segments before `segment` have been stored, and adds them to `sums`.
  __device__ __forceinline__ void AddTo(float (&sums)[128], int segment) const {
    if (threadIdx.x % kWarpgroup == 0) {
      while (Added().load(::cuda::memory_order_acquire) != static_cast<uint32_t>(segment)) {
      }
    }
    SyncNamed(barrier, kWarpgroup);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float4 before = __ldcg(vectors + i * kWarpgroup);
      sums[4 * i] += before.x;
      sums[4 * i + 1] += before.y;
      sums[4 * i + 2] += before.z;
      sums[4 * i + 3] += before.w;
    }
  }
  __device__ __forceinline__ void Put(const float (&sums)[128], int segment) const {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      __stcg(vectors + i * kWarpgroup,
             make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
    }
    SyncNamed(barrier, kWarpgroup);
    if (threadIdx.x % kWarpgroup == 0) {
      Added().store(static_cast<uint32_t>(segment) + 1, ::cuda::memory_order_release);
    }
  }
};

// The factor by which row `row` of the product is multiplied.
__device__ __forceinline__ float RowFactor(const KernelParams& p, int row) {
  if (p.factors == nullptr) return p.scale;
  return row < p.rows ? p.scale * p.factors[row] : 0.0f;
}

// Elements 4 j and 4 j + 2 of a thread's sums are in row 8 j + LaneRow() of C's tile, the other elements in
// the next row.
__device__ __forceinline__ int LaneRow() { return 2 * static_cast<int>(threadIdx.x & 3); }

__device__ __forceinline__ void MultiplyRows(const KernelParams& p, int first_row, float (&sums)[128]) {
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    const int row = first_row + 8 * j + LaneRow();
    const float factor = RowFactor(p, row), next = RowFactor(p, row + 1);
    sums[4 * j] *= factor;
    sums[4 * j + 1] *= next;
    sums[4 * j + 2] *= factor;
    sums[4 * j + 3] *= next;
  }
}

template <typename T>
__device__ __forceinline__ uint32_t Pack(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// Rows of C in a box.
template <typename Out>
inline constexpr int kBoxRows = sizeof(Out) == 4 ? kProductRows / 2 : kProductRows;

// Fills box `i`, 0 or 1, with the rows of C's tile from row 8 * first_group on.
template <typename Out>
__device__ __forceinline__ void FillBox(const OutBoxes& out, int i, int first_group,
                                        const float (&sums)[128]) {
  if constexpr (sizeof(Out) == 4) {
#pragma unroll
    for (int group = 0; group < kBoxRows<Out> / 8; ++group) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        out.PutFloatTransposed(i, 8 * group + LaneRow() + (e & 1), e >> 1,
                               sums[4 * (first_group + group) + e]);
      }
    }
  } else {
#pragma unroll
    for (int group = 0; group < kBoxRows<Out> / 8; group += 2) {
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int element = 4 * (first_group + group + (w >> 1)) + 2 * (w & 1);
        words[w] = Pack<Out>(sums[element], sums[element + 1]);
      }
      out.PutTransposed(i, group, words);
    }
  }
}

// Stores the tile of a warpgroup to C, where it begins at `column` and `row`. add: adds it to C. With fp32, a
// box in shared memory is sent by two copies, so that their boxes have 128 bytes a row (SendPair).
template <typename Out>
__device__ __forceinline__ void Store(const OutBoxes& out, const float (&sums)[128], int column, int row,
                                      bool add) {
#pragma unroll
  for (int box = 0; box < kColumnTile / kBoxRows<Out>; ++box) {
    out.Open<sizeof(Out) == 4 ? 2 : 1>();
    FillBox<Out>(out, box & 1, box * kBoxRows<Out> / 8, sums);
    if constexpr (sizeof(Out) == 4) {
      out.SendPair(box & 1, column, row + box * kBoxRows<Out>, add);
    } else {
      out.Send(box & 1, column, row + box * kBoxRows<Out>);
    }
  }
}

template <typename T, typename Out, Major kMajorA>
__device__ __forceinline__ void Consume(const Maps& maps, const KernelParams& p, Ring ring, uint32_t rank,
                                        int position, int consumer, uint32_t boxes) {
  // The number of this warpgroup in the cluster. The warpgroup has kProductRows columns of C's tile, because
  // the product is transposed.
  const int part = static_cast<int>(rank) * kConsumers + consumer;
  const OutBoxes out(maps.c, boxes, consumer);
  float sums[128];
  ForEachUnit(p.plan, position, [&](const Unit& unit, bool) {
    Multiply<T, Major::kOuter, kMajorA>(unit.stages, consumer, ring, sums);
    const PartialSums partial(p, unit, part, out.barrier);
    if (unit.segment > 0) partial.AddTo(sums, unit.segment);
    if (unit.segment + 1 < unit.segments) {
      partial.Put(sums, unit.segment);
      return;
    }
    const int row = unit.row_tile * kColumnTile;
    MultiplyRows(p, row, sums);
    Store<Out>(out, sums, unit.panel * kPanelRows + part * kProductRows, row, p.add);
  });
  out.Finish();
}

template <typename T, typename Out, Major kMajorA>
__global__ __cluster_dims__(kClusterBlocks)
    __launch_bounds__(kThreads, 1) void GradientGemmKernel(const __grid_constant__ Maps maps,
                                                           const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t stages = SharedAddress(shared);
  const uint32_t boxes = stages + kRingBytes;
  const uint32_t position_word = boxes + kOutBytes + kRingBarrierBytes;
  const Ring ring(stages, boxes + kOutBytes);
  const uint32_t rank = ClusterRank();
  if (rank == 0 && threadIdx.x == 0) TakePosition(p.positions, p.plan.clusters, position_word);
  ring.Start();
  const int position = Position(position_word);
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (warpgroup == 0) {
    LowerRegisters<kProducerRegisters>();
    if (threadIdx.x == 0) Produce<kMajorA>(maps, p, ring, rank, position);
  } else {
    RaiseRegisters<kConsumerRegisters>();
    Consume<T, Out, kMajorA>(maps, p, ring, rank, position, warpgroup - 1, boxes);
  }
  ClusterSync();  // the other block may still send to this block's shared memory
}

template <typename T, typename Out, Major kMajorA>
cudaError_t Launch(const Maps& maps, const KernelParams& p, cudaStream_t stream) {
  constexpr auto kFunction = GradientGemmKernel<T, Out, kMajorA>;
  constexpr int kSharedBytes = kRingBytes + kOutBytes + kRingBarrierBytes + kPositionBytes;
  const cudaError_t error =
      cudaFuncSetAttribute(kFunction, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  kFunction<<<p.plan.clusters * kClusterBlocks, kThreads, kSharedBytes, stream>>>(maps, p);
  return cudaGetLastError();
}

template <typename T>
cudaError_t LaunchTyped(const GradientGemmParams& params, const Maps& maps, const KernelParams& p,
                        cudaStream_t stream) {
  if (params.output == DType::kFloat32) {
    return params.transpose_a ? Launch<T, float, Major::kOuter>(maps, p, stream)
                              : Launch<T, float, Major::kInner>(maps, p, stream);
  }
  if (params.output != params.input || params.transpose_a || params.add) return cudaErrorInvalidValue;
  return Launch<T, T, Major::kInner>(maps, p, stream);
}

cudaError_t MakeMaps(const GradientGemmParams& params, Maps& maps) {
  const BoxedMatrix a = params.transpose_a
                            ? BoxedMatrix{params.a, params.input, params.inner, params.rows, kInnerTile}
                            : BoxedMatrix{params.a, params.input, params.rows, params.inner, kPartColumns};
  const BoxedMatrix b = {params.b, params.input, params.inner, params.columns, kInnerTile};
  const int box_rows = params.output == DType::kFloat32 ? kBoxRows<float> : kBoxRows<__half>;
  const BoxedMatrix c = {params.c, params.output, params.rows, params.columns, box_rows};
  if (const cudaError_t error = MakeTensorMap(a, maps.a); error != cudaSuccess) return error;
  if (const cudaError_t error = MakeTensorMap(b, maps.b); error != cudaSuccess) return error;
  return MakeTensorMap(c, maps.c);
}

}  // namespace

cudaError_t LaunchGradientGemm(const GradientGemmParams& params, const GradientGemmPlan& plan,
                               cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  Maps maps = {};
  if (const cudaError_t error = MakeMaps(params, maps); error != cudaSuccess) return error;
  KernelParams p = {};
  p.plan = plan;
  p.rows = static_cast<int>(params.rows);
  p.add = params.add;
  p.scale = params.scale;
  p.factors = params.factors;
  p.partials = static_cast<float4*>(params.scratch);
  p.signals =
      reinterpret_cast<Signals*>(static_cast<uint8_t*>(params.scratch) + kMostPartials * kPartialBytes);
  if (params.order != nullptr) p.positions = {*params.order, p.signals->claimed};
  const cudaError_t error = cudaMemsetAsync(p.signals, 0, sizeof(Signals), stream);
  if (error != cudaSuccess) return error;
  if (params.input == DType::kBFloat16) return LaunchTyped<__nv_bfloat16>(params, maps, p, stream);
  if (params.input == DType::kFloat16) return LaunchTyped<__half>(params, maps, p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace lossd::kernels::cuda::hopper

LOSSD_KERNEL_FILE(GradientGemm)
