#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/hopper/logit_pass.h"
#include "kernels/cuda/hopper/ptx.cuh"
#include "kernels/cuda/hopper/tensor_map.h"

namespace lossd::kernels::cuda::hopper {
namespace {

constexpr int kConsumers = 2;  // warpgroups, kProductRows rows of the tile each
constexpr int kWarpgroup = 128;
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kStages = 4;
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;
constexpr int kInnerStep = 16;  // of one product instruction
constexpr uint32_t kLeadBarrier = 3;

constexpr int kHiddenBytes = kRowTile * kInnerTile * 2;
constexpr int kWeightBytes = kVocabTile * kInnerTile * 2;
constexpr int kStageBytes = kHiddenBytes + kWeightBytes;
constexpr int kWeightPart = kWeightBytes / kClusterBlocks;  // what one block of the cluster fetches for both

// Exponentials on their way out: two boxes of 64 x 64 a consumer.
constexpr int kBoxColumns = 64;
constexpr int kBoxBytes = kProductRows * kBoxColumns * 2;
constexpr int kOutBytes = kConsumers * 2 * kBoxBytes;

struct KernelParams {
  int rows, vocab, padded_vocab;
  int inner_tiles, vocab_tiles, panels, group;
  const float* bias;
  float scale, softcap;
  const int32_t* targets;
  const float* reference;
  const float* threshold;
  const int32_t* redo;
  TilePartials partials;
  int skew;
  int flags;
};

struct Maps {
  CUtensorMap hidden, weight, exponentials;
};

// ---- the work of a cluster ----

struct Tile {
  int panel;  // of kClusterRows rows
  int vocab_tile;
};

// Within a group of panels, classes are the outer loop: clusters that run at the same time share hidden
// states and weights, and the group's hidden states are used again for the next classes.
__device__ __forceinline__ Tile TileAt(const KernelParams& p, int index) {
  const int group_tiles = p.group * p.vocab_tiles;
  const int group = index / group_tiles;
  const int first = group * p.group;
  const int size = min(p.group, p.panels - first);
  const int within = index - group * group_tiles;
  const int vocab_tile = within / size;
  return {first + within - vocab_tile * size, vocab_tile};
}

// Applies body(tile) to the tiles of this cluster.
template <typename Body>
__device__ __forceinline__ void ForEachTile(const KernelParams& p, Body body) {
  const int tiles = p.panels * p.vocab_tiles;
  const int clusters = static_cast<int>(gridDim.x) / kClusterBlocks;
  for (int i = static_cast<int>(blockIdx.x) / kClusterBlocks; i < tiles; i += clusters) {
    const Tile tile = TileAt(p, i);
    if (p.redo != nullptr && p.redo[1 + tile.panel] == 0) continue;
    body(tile);
  }
}

// The ring of stages in shared memory, and where one of its users is.
struct Ring {
  uint32_t stages;  // [kStages][kStageBytes]
  uint32_t full;    // [kStages] barriers of 8 bytes
  uint32_t empty;
  int index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ uint32_t Hidden() const { return stages + index * kStageBytes; }
  __device__ __forceinline__ uint32_t Weight() const { return Hidden() + kHiddenBytes; }
  __device__ __forceinline__ uint32_t Full() const { return full + index * 8; }
  __device__ __forceinline__ uint32_t Empty() const { return empty + index * 8; }
  __device__ __forceinline__ void Next() {
    if (++index == kStages) {
      index = 0;
      parity ^= 1;
    }
  }
};

// One thread: fetches this block's hidden states, and its share of the weights for the whole cluster.
__device__ __forceinline__ void Produce(const Maps& maps, const KernelParams& p, Ring ring, uint32_t rank) {
  const uint64_t keep = (p.flags & 1) ? KeepInL2() : NormalInL2();
  ForEachTile(p, [&](const Tile& tile) {
    const int row = tile.panel * kClusterRows + static_cast<int>(rank) * kRowTile;
    const int part_rows = kVocabTile / kClusterBlocks;
    const int column = tile.vocab_tile * kVocabTile + static_cast<int>(rank) * part_rows;
    for (int k = 0; k < p.inner_tiles; ++k) {
      Wait(ring.Empty(), ring.parity ^ 1);
      ArriveExpecting(ring.Full(), kStageBytes);
      CopyBoxIn(ring.Hidden(), maps.hidden, k * kInnerTile, row, ring.Full(), keep);
      CopyBoxToBlocks(ring.Weight() + rank * kWeightPart, maps.weight, k * kInnerTile, column, ring.Full(),
                      (1 << kClusterBlocks) - 1);
      ring.Next();
    }
  });
}

// One warpgroup: logits [kProductRows, kVocabTile] of its rows of a tile. Gives stages back to both blocks.
template <typename T>
__device__ __forceinline__ void Multiply(int inner_tiles, int lead, int consumer, Ring& ring,
                                         float (&logits)[128]) {
  const uint32_t lane = threadIdx.x & 31;
  uint32_t last_empty = 0;
  if (consumer == 1 && lead > 0) SyncNamed(kLeadBarrier, kConsumers * kWarpgroup);
  for (int k = 0; k < inner_tiles; ++k) {
    const uint64_t a = MatrixDescriptor(ring.Hidden() + consumer * (kHiddenBytes / kConsumers));
    const uint64_t b = MatrixDescriptor(ring.Weight());
    Wait(ring.Full(), ring.parity);
    BeginProducts();
#pragma unroll
    for (int i = 0; i < kInnerTile / kInnerStep; ++i) {
      Mma64x256x16<T>(logits, a + 2 * i, b + 2 * i, k > 0 || i > 0);
    }
    CommitProducts();
    if (consumer == 0 && k + 1 == lead) ArriveNamed(kLeadBarrier, kConsumers * kWarpgroup);
    WaitProducts<1>();
    if (k > 0 && lane < kClusterBlocks) ArriveAt(last_empty, lane);
    last_empty = ring.Empty();
    ring.Next();
  }
  WaitProducts<0>();
  if (lane < kClusterBlocks) ArriveAt(last_empty, lane);
}

// ---- what becomes of the logits ----
//
// A thread holds two rows ("halves") of 64 columns each; its four lanes of a quad share them.

// What a thread knows of its two rows before the tile is done.
struct RowPair {
  int row[2];
  int target[2];       // column within the tile, if it is one
  float reference[2];  // in units of log 2
  float threshold[2];
};

__device__ __forceinline__ RowPair LoadRows(const KernelParams& p, const Tile& tile, int first_row) {
  RowPair r;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    r.row[h] = first_row + 8 * h;
    const bool exists = r.row[h] < p.rows;
    r.target[h] = exists ? p.targets[r.row[h]] - tile.vocab_tile * kVocabTile : -1;
    r.reference[h] = exists && p.reference != nullptr ? p.reference[r.row[h]] : 0.0f;
    r.threshold[h] = exists ? p.threshold[r.row[h]] : -NegativeInfinity();
  }
  return r;
}

template <typename Body>
__device__ __forceinline__ void ForEachElement(float (&logits)[128], Body body) {
  const int lane_column = 2 * static_cast<int>(threadIdx.x & 3);
#pragma unroll
  for (int i = 0; i < 128; ++i) body(logits[i], (i >> 1) & 1, 8 * (i >> 2) + lane_column + (i & 1));
}

// Takes the targets out of the logits, and makes the columns past the vocabulary -inf.
__device__ __forceinline__ void Mask(const KernelParams& p, const Tile& tile, const RowPair& r,
                                     float (&logits)[128]) {
  const bool mine0 = static_cast<unsigned>(r.target[0]) < kVocabTile;
  const bool mine1 = static_cast<unsigned>(r.target[1]) < kVocabTile;
  if (__any_sync(0xffffffffu, mine0 || mine1)) {
    ForEachElement(logits, [&](float& z, int h, int column) {
      if (column == r.target[h]) {
        p.partials.target[r.row[h]] = z;
        z = NegativeInfinity();
      }
    });
  }
  const int columns = p.vocab - tile.vocab_tile * kVocabTile;
  if (columns < kVocabTile) {
    ForEachElement(logits, [&](float& z, int, int column) {
      if (column >= columns) z = NegativeInfinity();
    });
  }
}

__device__ __forceinline__ float QuadMax(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float QuadSum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

__device__ __forceinline__ int QuadMin(int x) {
  x = min(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return min(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// The largest of the quad's logits in each half, given each lane's own, and the first column that has it.
__device__ __forceinline__ void FindMax(const float (&logits)[128], float (&max)[2], int (&arg)[2]) {
  int found[2] = {kVocabTile, kVocabTile};
#pragma unroll
  for (int h = 0; h < 2; ++h) max[h] = QuadMax(max[h]);
#pragma unroll
  for (int i = 127; i >= 0; --i) {
    const int h = (i >> 1) & 1;
    if (logits[i] == max[h]) found[h] = 8 * (i >> 2) + (i & 1);
  }
  const int lane_column = 2 * static_cast<int>(threadIdx.x & 3);
#pragma unroll
  for (int h = 0; h < 2; ++h) arg[h] = QuadMin(found[h] + lane_column);
}

__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Where exponentials are stored from: two boxes a warpgroup, used in turn.
struct OutBoxes {
  const CUtensorMap* map;
  uint32_t boxes;    // of this warpgroup, [2][kBoxBytes]
  uint32_t barrier;  // its named barrier
  bool leader;       // the one thread that starts its copies
};

// Sums of 2^(z f - reference) of the thread's columns; with kStore the exponentials also leave.
template <bool kStore>
__device__ __forceinline__ void Exponentials(const float (&logits)[128], float f, const float (&reference)[2],
                                             const OutBoxes& out, int column, int row, float (&sum)[2],
                                             float (&max)[2]) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int warp_row = 16 * static_cast<int>((threadIdx.x >> 5) & 3);
  const int box_row = warp_row + (lane & 7) + 8 * ((lane >> 3) & 1);
  float sums[2][2] = {};
#pragma unroll
  for (int box = 0; box < kVocabTile / kBoxColumns; ++box) {
    const uint32_t base = out.boxes + (box & 1) * kBoxBytes;
    if constexpr (kStore) {
      if (out.leader) WaitBoxesRead<1>();
      SyncNamed(out.barrier, kWarpgroup);
    }
#pragma unroll
    for (int j = 0; j < kBoxColumns / 8; j += 2) {
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int h = w & 1;
        const int i = 4 * (box * (kBoxColumns / 8) + j + (w >> 1)) + 2 * h;
        max[h] = fmaxf(max[h], fmaxf(logits[i], logits[i + 1]));
        const float e0 = Exp2(fmaf(logits[i], f, -reference[h]));
        const float e1 = Exp2(fmaf(logits[i + 1], f, -reference[h]));
        sums[h][0] += e0;
        sums[h][1] += e1;
        words[w] = PackBf16(e0, e1);
      }
      if constexpr (kStore) {
        const int group = j + (lane >> 4);  // of 8 columns, swizzled by the row
        StoreMatrices(base + box_row * 128 + ((group ^ (box_row & 7)) << 4), words[0], words[1], words[2],
                      words[3]);
      }
    }
    if constexpr (kStore) {
      FenceAsyncProxy();
      SyncNamed(out.barrier, kWarpgroup);
      if (out.leader) CopyBoxOut(*out.map, column + box * kBoxColumns, row, base);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) sum[h] = QuadSum(sums[h][0] + sums[h][1]);
}

template <typename T, bool kStore>
__device__ __forceinline__ void Consume(const Maps& maps, const KernelParams& p, Ring ring, uint32_t rank,
                                        int consumer, uint32_t boxes) {
  const int warp = static_cast<int>((threadIdx.x >> 5) & 3);
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int row_in_tile = consumer * kProductRows + warp * 16 + lane / 4;
  const OutBoxes out = {&maps.exponentials, boxes + consumer * 2 * kBoxBytes,
                        static_cast<uint32_t>(1 + consumer), threadIdx.x % kWarpgroup == 0};
  const float f = p.scale * kLog2E;
  float logits[128];
  ForEachTile(p, [&](const Tile& tile) {
    const int first_row = tile.panel * kClusterRows + static_cast<int>(rank) * kRowTile;
    const RowPair rows = LoadRows(p, tile, first_row + row_in_tile);
    Multiply<T>(p.inner_tiles, p.skew, consumer, ring, logits);
    if (p.flags & 2) {
      if (logits[0] == 123.25f) p.partials.max[0] = logits[5];
      return;
    }
    Mask(p, tile, rows, logits);
    float max[2] = {NegativeInfinity(), NegativeInfinity()}, sum[2];
    int arg[2] = {0, 0};
    Exponentials<kStore>(logits, f, rows.reference, out, tile.vocab_tile * kVocabTile,
                         first_row + consumer * kProductRows, sum, max);
    const bool contends = max[0] >= rows.threshold[0] || max[1] >= rows.threshold[1];
    if (__any_sync(0xffffffffu, contends)) {
      FindMax(logits, max, arg);
    } else {
      max[0] = max[1] = NegativeInfinity();
    }
    if ((lane & 3) == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (rows.row[h] >= p.rows) continue;
        const int64_t at = tile.vocab_tile * p.partials.ld + rows.row[h];
        p.partials.max[at] = max[h];
        p.partials.sum[at] = sum[h];
        p.partials.arg[at] = static_cast<uint8_t>(arg[h]);
      }
    }
  });
  if constexpr (kStore) {
    if (out.leader) WaitBoxesRead<0>();
  }
}

template <typename T, bool kStore>
__global__ __cluster_dims__(kClusterBlocks)
    __launch_bounds__(kThreads, 1) void LogitPassKernel(const __grid_constant__ Maps maps,
                                                        const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  if (p.redo != nullptr && p.redo[0] == 0) return;
  Ring ring;
  ring.stages = SharedAddress(shared);
  const uint32_t boxes = ring.stages + kStages * kStageBytes;
  ring.full = boxes + (kStore ? kOutBytes : 0);
  ring.empty = ring.full + kStages * 8;
  const uint32_t rank = ClusterRank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      InitBarrier(ring.full + 8 * i, 1);
      InitBarrier(ring.empty + 8 * i, kClusterBlocks * kConsumers * (kWarpgroup / 32));
    }
    FenceBarrierInit();
  }
  ClusterSync();
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (warpgroup == 0) {
    LowerRegisters<kProducerRegisters>();
    if (threadIdx.x == 0) Produce(maps, p, ring, rank);
  } else {
    RaiseRegisters<kConsumerRegisters>();
    Consume<T, kStore>(maps, p, ring, rank, warpgroup - 1, boxes);
  }
  ClusterSync();  // the other block may still send to our shared memory
}

template <typename T, bool kStore>
cudaError_t Launch(const Maps& maps, const KernelParams& p, int clusters, cudaStream_t stream) {
  constexpr int kSharedBytes = kStages * kStageBytes + (kStore ? kOutBytes : 0) + 2 * kStages * 8;
  auto* kernel = LogitPassKernel<T, kStore>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  kernel<<<clusters * kClusterBlocks, kThreads, kSharedBytes, stream>>>(maps, p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchLogitPass(const LogitPassParams& params, const TileOrder& order, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  Maps maps = {};
  const BoxedMatrix hidden = {params.hidden, params.dtype, params.rows, params.inner, kRowTile};
  const BoxedMatrix weight = {params.weight, params.dtype, params.padded_vocab, params.inner,
                              kVocabTile / kClusterBlocks};
  if (const cudaError_t error = MakeTensorMap(hidden, maps.hidden); error != cudaSuccess) return error;
  if (const cudaError_t error = MakeTensorMap(weight, maps.weight); error != cudaSuccess) return error;
  const bool store = params.exponentials != nullptr;
  if (store) {
    const BoxedMatrix out = {params.exponentials, DType::kBFloat16, params.rows, params.padded_vocab,
                             kProductRows};
    if (const cudaError_t error = MakeTensorMap(out, maps.exponentials); error != cudaSuccess) return error;
  }
  KernelParams p = {};
  p.rows = static_cast<int>(params.rows);
  p.vocab = static_cast<int>(params.vocab);
  p.padded_vocab = static_cast<int>(params.padded_vocab);
  p.inner_tiles = CeilDiv(params.inner, kInnerTile);
  p.vocab_tiles = static_cast<int>(VocabTiles(params.vocab));
  p.panels = CeilDiv(params.rows, kClusterRows);
  p.group = order.group;
  p.bias = params.bias;
  p.scale = params.scale;
  p.softcap = params.softcap;
  p.targets = params.targets;
  p.reference = params.reference;
  p.threshold = params.threshold;
  p.redo = params.redo;
  p.skew = p.inner_tiles > kStages ? order.skew : 0;
  p.flags = order.flags;
  p.partials = params.partials;
  if (params.dtype == DType::kBFloat16) {
    return store ? Launch<__nv_bfloat16, true>(maps, p, order.clusters, stream)
                 : Launch<__nv_bfloat16, false>(maps, p, order.clusters, stream);
  }
  return Launch<__half, false>(maps, p, order.clusters, stream);
}

}  // namespace lossd::kernels::cuda::hopper
