// C = A B with row factors, for the hidden gradient (A = E [rows, vocab]) and the weight gradient (A = E^T),
// B = W or x with its inner dimension slow: all three operands lie as the chunk has them.
//
// Plan: the main loop of main_loop.cuh over tiles of 256 x 256 a cluster, in the order of product_plan.h. An
// output tile goes through boxes in shared memory; the copy engine stores it or, for a weight gradient that
// is not zero, has L2 add it, so that C is never read by a multiprocessor and the next tile's products begin
// at once. Each element of C is stored or added to once: results do not depend on who is first.
//
// FLOP: 2 rows columns inner. Bytes from L2 a block and stage: 16 + 16 KB for 4.2 MFLOP, as in the logit
// pass.
#include <cuda/atomic>

#include "kernels/cuda/hopper/main_loop.cuh"
#include "kernels/cuda/hopper/out_boxes.cuh"
#include "kernels/cuda/hopper/product.h"
#include "kernels/cuda/hopper/tensor_map.h"

namespace lossd::kernels::cuda::hopper {
namespace {

constexpr int kTileParts = kClusterBlocks * kConsumers;  // of a tile's partial sums: a warpgroup each
constexpr int kPartVectors = kPartialBytes / kTileParts / sizeof(float4);

struct KernelParams {
  ProductPlan plan;
  int rows;
  bool add;
  float scale;
  const float* factors;
  float4* partials;  // [plan.rest][kTileParts][kPartVectors], as the threads of a warpgroup hold them
  uint32_t* added;   // [plan.rest][kTileParts]: segments that partials has
};

struct Maps {
  CUtensorMap a, b, c;
};

// ---- the work of a cluster ----

// Stages [first, first + stages) of the inner dimension of a tile; all of them unless it is one of the rest.
struct Unit {
  int panel, column_tile;
  int first, stages;
  bool backwards;  // taken from the last stage to the first
  int segment = 0, segments = 1;
  int partial = 0;  // which of plan.rest

  __device__ __forceinline__ int Stage(int i) const { return backwards ? first + stages - 1 - i : first + i; }
};

// Every other unit of a cluster goes backwards: it begins with what the last one left in L2.
__device__ __forceinline__ Unit UnitAt(const ProductPlan& plan, int index) {
  Unit unit;
  int tile = index;
  if (index >= plan.whole) {
    unit.segments = plan.segments;
    unit.segment = (index - plan.whole) / plan.rest;
    unit.partial = (index - plan.whole) - unit.segment * plan.rest;
    tile = plan.whole + unit.partial;
  }
  unit.first = unit.segment * plan.inner_tiles / unit.segments;
  unit.stages = (unit.segment + 1) * plan.inner_tiles / unit.segments - unit.first;
  unit.backwards = index / plan.clusters % 2 != 0;
  const int group_tiles = plan.group * plan.panels;
  const int group = tile / group_tiles;
  const int first_column = group * plan.group;
  const int size = min(plan.group, plan.column_tiles - first_column);
  const int within = tile - group * group_tiles;
  unit.panel = within / size;
  unit.column_tile = first_column + within - unit.panel * size;
  return unit;
}

// Applies body(unit) to the units of this cluster.
template <typename Body>
__device__ __forceinline__ void ForEachUnit(const ProductPlan& plan, Body body) {
  for (int i = static_cast<int>(blockIdx.x) / kClusterBlocks; i < plan.units; i += plan.clusters) {
    body(UnitAt(plan, i));
  }
}

template <Major kMajorA>
__device__ __forceinline__ void Produce(const Maps& maps, const KernelParams& p, Ring ring, uint32_t rank) {
  ForEachUnit(p.plan, [&](const Unit& unit) {
    const int row = unit.panel * kPanelRows + static_cast<int>(rank) * kRowTile;
    const int column = unit.column_tile * kColumnTile + static_cast<int>(rank) * kPartColumns;
    for (int i = 0; i < unit.stages; ++i) {
      Fetch<kMajorA, Major::kOuter>(maps.a, maps.b, row, column, unit.Stage(i) * kInnerTile, rank, ring);
    }
  });
}

// ---- what becomes of the sums ----

// The sums of a tile's earlier segments, of one warpgroup. They are added up in the order of the segments.
struct PartialSums {
  float4* vectors;  // this thread's, kWarpgroup apart
  uint32_t* added;
  uint32_t barrier;

  __device__ __forceinline__ PartialSums(const KernelParams& p, const Unit& unit, int part, uint32_t barrier)
      : vectors(p.partials + (static_cast<int64_t>(unit.partial) * kTileParts + part) * kPartVectors +
                threadIdx.x % kWarpgroup),
        added(p.added + unit.partial * kTileParts + part),
        barrier(barrier) {}

  __device__ __forceinline__ ::cuda::atomic_ref<uint32_t, ::cuda::thread_scope_device> Added() const {
    return ::cuda::atomic_ref<uint32_t, ::cuda::thread_scope_device>(*added);
  }
  // Adds those of all segments before `segment` to `sums`, once they are there.
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

// Factors of the two rows ("halves") that a thread holds.
struct RowFactors {
  float half[2];
};

__device__ __forceinline__ RowFactors LoadFactors(const KernelParams& p, int first_row) {
  RowFactors f;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = first_row + 8 * h;
    f.half[h] = p.factors == nullptr ? 1.0f : row < p.rows ? p.factors[row] : 0.0f;
  }
  return f;
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

// Box `i` of the two, with the columns from 8 `first_group` on of the tile.
template <typename Out>
__device__ __forceinline__ void FillBox(const OutBoxes& out, int i, int first_group,
                                        const float (&sums)[128]) {
  if constexpr (sizeof(Out) == 4) {
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const int element = 4 * (first_group + group);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int near = element + 2 * h, far = near + 8;
        out.PutFloats(i, group, h, make_float2(sums[near], sums[near + 1]),
                      make_float2(sums[far], sums[far + 1]));
      }
    }
  } else {
#pragma unroll
    for (int group = 0; group < 8; group += 2) {
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int element = 4 * (first_group + group + (w >> 1)) + 2 * (w & 1);
        words[w] = Pack<Out>(sums[element], sums[element + 1]);
      }
      out.Put(i, group, words);
    }
  }
}

// The tile of a warpgroup to C.
template <typename Out>
__device__ __forceinline__ void Store(const OutBoxes& out, const float (&sums)[128], int column, int row,
                                      bool add) {
  constexpr int kBoxColumns = kBoxRowBytes / static_cast<int>(sizeof(Out));
#pragma unroll
  for (int box = 0; box < kColumnTile / kBoxColumns; ++box) {
    out.Open();
    FillBox<Out>(out, box & 1, box * kBoxColumns / 8, sums);
    out.Send(box & 1, column + box * kBoxColumns, row, add);
  }
}

template <typename T, typename Out, Major kMajorA>
__device__ __forceinline__ void Consume(const Maps& maps, const KernelParams& p, Ring ring, uint32_t rank,
                                        int consumer, uint32_t boxes) {
  const int part = static_cast<int>(rank) * kConsumers + consumer;
  const int lane_row = 16 * static_cast<int>((threadIdx.x >> 5) & 3) + static_cast<int>(threadIdx.x & 31) / 4;
  const OutBoxes out(maps.c, boxes, consumer);
  float sums[128];
  ForEachUnit(p.plan, [&](const Unit& unit) {
    const int row = unit.panel * kPanelRows + part * kProductRows;
    const RowFactors factors = LoadFactors(p, row + lane_row);
    Multiply<T, kMajorA, Major::kOuter>(unit.stages, consumer, ring, sums);
    const PartialSums partial(p, unit, part, out.barrier);
    if (unit.segment > 0) partial.AddTo(sums, unit.segment);
    if (unit.segment + 1 < unit.segments) {
      partial.Put(sums, unit.segment);
      return;
    }
#pragma unroll
    for (int i = 0; i < 128; ++i) sums[i] *= p.scale * factors.half[(i >> 1) & 1];
    Store<Out>(out, sums, unit.column_tile * kColumnTile, row, p.add);
  });
  out.Finish();
}

template <typename T, typename Out, Major kMajorA>
__global__ __cluster_dims__(kClusterBlocks)
    __launch_bounds__(kThreads, 1) void ProductKernel(const __grid_constant__ Maps maps,
                                                      const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t stages = SharedAddress(shared);
  const uint32_t boxes = stages + kRingBytes;
  const Ring ring(stages, boxes + kOutBytes);
  ring.Start();
  const uint32_t rank = ClusterRank();
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (warpgroup == 0) {
    LowerRegisters<kProducerRegisters>();
    if (threadIdx.x == 0) Produce<kMajorA>(maps, p, ring, rank);
  } else {
    RaiseRegisters<kConsumerRegisters>();
    Consume<T, Out, kMajorA>(maps, p, ring, rank, warpgroup - 1, boxes);
  }
  ClusterSync();  // the other block may still send to our shared memory
}

template <typename T, typename Out, Major kMajorA>
cudaError_t Launch(const Maps& maps, const KernelParams& p, cudaStream_t stream) {
  constexpr auto kFunction = ProductKernel<T, Out, kMajorA>;
  constexpr int kSharedBytes = kRingBytes + kOutBytes + kRingBarrierBytes;
  const cudaError_t error =
      cudaFuncSetAttribute(kFunction, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  kFunction<<<p.plan.clusters * kClusterBlocks, kThreads, kSharedBytes, stream>>>(maps, p);
  return cudaGetLastError();
}

template <typename T>
cudaError_t LaunchTyped(const ProductParams& params, const Maps& maps, const KernelParams& p,
                        cudaStream_t stream) {
  if (params.output == DType::kFloat32) {
    return params.transpose_a ? Launch<T, float, Major::kOuter>(maps, p, stream)
                              : Launch<T, float, Major::kInner>(maps, p, stream);
  }
  if (params.output != params.input || params.transpose_a || params.add) return cudaErrorInvalidValue;
  return Launch<T, T, Major::kInner>(maps, p, stream);
}

cudaError_t MakeMaps(const ProductParams& params, Maps& maps) {
  const BoxedMatrix a = params.transpose_a
                            ? BoxedMatrix{params.a, params.input, params.inner, params.rows, kInnerTile}
                            : BoxedMatrix{params.a, params.input, params.rows, params.inner, kRowTile};
  const BoxedMatrix b = {params.b, params.input, params.inner, params.columns, kInnerTile};
  const BoxedMatrix c = {params.c, params.output, params.rows, params.columns, kProductRows};
  if (const cudaError_t error = MakeTensorMap(a, maps.a); error != cudaSuccess) return error;
  if (const cudaError_t error = MakeTensorMap(b, maps.b); error != cudaSuccess) return error;
  return MakeTensorMap(c, maps.c);
}

}  // namespace

cudaError_t LaunchProduct(const ProductParams& params, const ProductPlan& plan, cudaStream_t stream) {
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
  p.added = static_cast<uint32_t*>(params.scratch) + kMostPartials * kPartialBytes / sizeof(uint32_t);
  if (plan.rest > 0) {
    const cudaError_t error =
        cudaMemsetAsync(p.added, 0, static_cast<size_t>(plan.rest) * kTileParts * sizeof(uint32_t), stream);
    if (error != cudaSuccess) return error;
  }
  if (params.input == DType::kBFloat16) return LaunchTyped<__nv_bfloat16>(params, maps, p, stream);
  if (params.input == DType::kFloat16) return LaunchTyped<__half>(params, maps, p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace lossd::kernels::cuda::hopper
