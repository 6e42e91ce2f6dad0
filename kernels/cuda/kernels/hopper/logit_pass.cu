// SPDX-License-Identifier: Apache-2.0
// The logit pass: Z = X W^T for X [rows, inner], W [vocab, inner], tile by tile, without Z in memory.
//
// Plan: a persistent grid of clusters of two blocks. A cluster takes tiles of 256 rows x 256 classes; each
// block has 128 of the rows, fetches their hidden states and half of the weights, and gets the other half by
// multicast. A producer thread fills a ring of four stages of 64 inner elements (TMA, mbarriers); two
// consumer warpgroups multiply 64 x 256 each from shared memory (wgmma) and turn the sums, which stay in
// registers, into statistics and exponentials while the producer fetches for the next tile.
//
// FLOP: 2 rows vocab inner. Bytes from L2 a block and stage: 16 + 16 KB for 4.2 MFLOP. Exponentials: rows *
// vocab at 16 a clock and multiprocessor, 2048 clocks a tile beside 1024 inner / 64 of products.
//
// Exponents are relative to a reference that the caller knows beforehand, so that one pass over the sums is
// enough and what is stored needs no correction by tile. See docs/kernels/hopper.md.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kernels/cuda/kernels/hopper/cluster_position.cuh"
#include "kernels/cuda/kernels/hopper/gradient_epilogue.cuh"
#include "kernels/cuda/kernels/hopper/logit_epilogue.cuh"
#include "kernels/cuda/kernels/hopper/logit_pass.h"
#include "kernels/cuda/kernels/hopper/main_loop.cuh"
#include "kernels/cuda/kernels/hopper/tensor_map.h"

namespace lossd::kernels::cuda::hopper {
namespace {

struct Maps {
  CUtensorMap hidden, weight, stored;
};

// Within a group of panels, classes are the outer loop: clusters that run at the same time share hidden
// states and weights, and the group's hidden states are used again for the next classes.
__device__ __forceinline__ LogitTile TileAt(const LogitKernelParams& p, int index) {
  const int group_tiles = p.group * p.vocab_tiles;
  const int group = index / group_tiles;
  const int first = group * p.group;
  const int size = min(p.group, p.panels - first);
  const int within = index - group * group_tiles;
  const int vocab_tile = within / size;
  return {first + within - vocab_tile * size, vocab_tile};
}

__device__ __forceinline__ int Clusters() { return static_cast<int>(gridDim.x) / kClusterBlocks; }

// Applies body(tile) to the tiles of a cluster. Those of neighbours have the same classes: a group of
// multiprocessors asks for their weights once.
template <typename Body>
__device__ __forceinline__ void ForEachTile(const LogitKernelParams& p, int position, Body body) {
  const int tiles = p.panels * p.vocab_tiles;
  for (int i = position; i < tiles; i += Clusters()) {
    const LogitTile tile = TileAt(p, i);
    if (p.marked_panels != nullptr && p.marked_panels[1 + tile.panel] == 0) continue;
    if (p.listed_anew != nullptr && tile.vocab_tile >= p.first_listed && p.listed_anew[1 + tile.panel] == 0)
      continue;
    body(tile);
  }
}

// One thread: fetches this block's hidden states, and its share of the weights for the whole cluster.
__device__ __forceinline__ void Produce(const Maps& maps, const LogitKernelParams& p, Ring ring,
                                        uint32_t rank, int position) {
  ForEachTile(p, position, [&](const LogitTile& tile) {
    const int row = tile.panel * kPanelRows + static_cast<int>(rank) * kRowTile;
    const int column = tile.vocab_tile * kVocabTile + static_cast<int>(rank) * kPartColumns;
    for (int k = 0; k < p.inner_tiles; ++k) {
      Fetch<Major::kInner, Major::kInner>(maps.hidden, maps.weight, row, column, k * kInnerTile, rank, ring);
    }
  });
}

template <typename T, Form kForm, Output kOutput>
__device__ __forceinline__ void Consume(const Maps& maps, const LogitKernelParams& p, Ring ring,
                                        uint32_t rank, int position, int consumer, uint32_t boxes) {
  const int warp = static_cast<int>((threadIdx.x >> 5) & 3);
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int product_row = static_cast<int>(rank) * kRowTile + consumer * kProductRows;
  const OutBoxes out(maps.stored, boxes, consumer);
  float logits[128];
  ForEachTile(p, position, [&](const LogitTile& tile) {
    const int first_row = tile.panel * kPanelRows + product_row;
    RowPair rows = LoadRows<kForm, kOutput>(p, tile, first_row + warp * 16 + lane / 4);
    Multiply<T, Major::kInner, Major::kInner>(p.inner_tiles, consumer, ring, logits, [&] {
      if constexpr (kOutput == Output::kCandidates) LoadSumBounds(p, tile, rows);
    });
    if constexpr (kForm != Form::kPlain) ScaleAndShift<kForm>(p, tile, logits);
    Mask<kForm, kOutput>(p, tile, rows, logits);
    const int column = tile.vocab_tile * kVocabTile;
    if constexpr (kOutput == Output::kGradient) {
      Gradients<T, kForm>(p, logits, rows, out, column, first_row);
    } else {
      const ThreadSums sums = Exponentials<kForm, kOutput>(p, logits, rows, out, column, first_row);
      if (kOutput != Output::kCandidates || p.listed_anew == nullptr) {
        WritePartials<kForm, kOutput>(p, tile, rows, logits, sums);
      }
    }
  });
  if constexpr (kStores<kOutput>) out.Finish();
}

template <typename T, Form kForm, Output kOutput>
__global__ __cluster_dims__(kClusterBlocks)
    __launch_bounds__(kThreads, 1) void LogitPassKernel(const __grid_constant__ Maps maps,
                                                        const __grid_constant__ LogitKernelParams p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  if (p.marked_panels != nullptr && p.marked_panels[0] == 0) return;
  const uint32_t stages = SharedAddress(shared);
  const uint32_t boxes = stages + kRingBytes;
  const uint32_t barriers = boxes + (kStores<kOutput> ? kOutBytes : 0);
  const uint32_t position_word = barriers + kRingBarrierBytes;
  const Ring ring(stages, barriers);
  const uint32_t rank = ClusterRank();
  if (rank == 0 && threadIdx.x == 0) TakePosition(p.positions, Clusters(), position_word);
  ring.Start();
  const int position = Position(position_word);
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (warpgroup == 0) {
    LowerRegisters<kProducerRegisters>();
    if (threadIdx.x == 0) Produce(maps, p, ring, rank, position);
  } else {
    RaiseRegisters<kConsumerRegisters>();
    Consume<T, kForm, kOutput>(maps, p, ring, rank, position, warpgroup - 1, boxes);
  }
  ClusterSync();  // the other block may still send to our shared memory
}

template <typename T, Form kForm, Output kOutput>
struct Kernel {
  static constexpr auto kFunction = LogitPassKernel<T, kForm, kOutput>;
  static constexpr int kSharedBytes =
      kRingBytes + (kStores<kOutput> ? kOutBytes : 0) + kRingBarrierBytes + kPositionBytes;

  static cudaError_t AllowSharedBytes() {
    return cudaFuncSetAttribute(kFunction, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  }
  static cudaError_t Launch(const Maps& maps, const LogitKernelParams& p, int clusters, cudaStream_t stream) {
    if (const cudaError_t error = AllowSharedBytes(); error != cudaSuccess) return error;
    kFunction<<<clusters * kClusterBlocks, kThreads, kSharedBytes, stream>>>(maps, p);
    return cudaGetLastError();
  }
};

template <typename T, Output kOutput>
cudaError_t LaunchForm(const Maps& maps, const LogitKernelParams& p, bool general, int clusters,
                       cudaStream_t stream) {
  if constexpr (kOutput != Output::kRecoverable) {
    if (!general) return Kernel<T, Form::kPlain, kOutput>::Launch(maps, p, clusters, stream);
    if (p.softcap == 0.0f) return Kernel<T, Form::kGeneral, kOutput>::Launch(maps, p, clusters, stream);
  }
  return Kernel<T, Form::kCapped, kOutput>::Launch(maps, p, clusters, stream);
}

// But for what a pass stores.
cudaError_t MakeMaps(const LogitOperands& o, Maps& maps) {
  const BoxedMatrix hidden = {o.hidden, o.dtype, o.rows, o.inner, kRowTile};
  const BoxedMatrix weight = {o.weight, o.dtype, o.padded_classes, o.inner, kPartColumns};
  if (const cudaError_t error = MakeTensorMap(hidden, maps.hidden); error != cudaSuccess) return error;
  return MakeTensorMap(weight, maps.weight);
}

LogitKernelParams MakeKernelParams(const LogitOperands& o) {
  LogitKernelParams p = {};
  p.rows = static_cast<int>(o.rows);
  p.classes = static_cast<int>(o.classes);
  p.last_bias = static_cast<int>(o.padded_classes) - 2;
  p.first_class = static_cast<int>(o.first_class);
  p.inner_tiles = static_cast<int>(CeilDiv(o.inner, kInnerTile));
  p.vocab_tiles = static_cast<int>(VocabTiles(o.classes));
  p.panels = static_cast<int>(Panels(o.rows));
  p.group = static_cast<int>(PanelsPerGroup(p.panels, o.inner));
  p.f = o.form.general ? kLog2E : o.form.scale * kLog2E;
  p.scale = o.form.scale;
  p.softcap = o.form.softcap;
  p.inverse_cap = o.form.softcap > 0.0f ? 1.0f / o.form.softcap : 0.0f;
  p.small_slope = SmallSlope(o.form.softcap);
  p.largest_bias = 1e37f / std::max(1.0f, std::fabs(o.form.scale));
  p.bias = o.form.bias;
  p.targets = o.targets;
  p.first_listed = static_cast<int>(FirstListedTile(p.vocab_tiles));
  return p;
}

void Set(const AllPanels& panels, LogitKernelParams& p) {
  if (panels.order != nullptr) p.positions = {*panels.order, panels.claimed_positions};
}

void Set(const MarkedPanels& panels, LogitKernelParams& p) { p.marked_panels = panels.marks; }

void Set(const RowReferences& references, const TilePartials& partials, LogitKernelParams& p) {
  p.reference = references.reference;
  p.threshold = references.threshold;
  p.partials = partials;
}

void Set(const StatisticsPass& pass, LogitKernelParams& p) {
  Set(pass.references, pass.partials, p);
  std::visit([&p](const auto& panels) { Set(panels, p); }, pass.panels);
}

// The thresholds are read with the references, but no maximum is looked for.
void Set(const CompleteSums& sums, const int32_t* listed_anew, LogitKernelParams& p) {
  p.reference = p.threshold = sums.reference;
  p.partials.target = sums.target;
  p.lists = sums.lists;
  p.listed_anew = listed_anew;
}

template <Output kOutput>
cudaError_t LaunchTyped(const LogitOperands& o, const LogitKernelParams& p, const Maps& maps, int clusters,
                        cudaStream_t stream) {
  const bool general = o.form.general;
  if (o.dtype == DType::kBFloat16)
    return LaunchForm<__nv_bfloat16, kOutput>(maps, p, general, clusters, stream);
  if constexpr (kOutput != Output::kExponentials && kOutput != Output::kRecoverable) {
    if (o.dtype == DType::kFloat16) return LaunchForm<__half, kOutput>(maps, p, general, clusters, stream);
  }
  return cudaErrorInvalidValue;
}

template <Output kOutput>
cudaError_t LaunchUnstored(const LogitOperands& o, const LogitKernelParams& p, int clusters,
                           cudaStream_t stream) {
  Maps maps = {};
  if (o.rows == 0) return cudaSuccess;
  if (const cudaError_t error = MakeMaps(o, maps); error != cudaSuccess) return error;
  return LaunchTyped<kOutput>(o, p, maps, clusters, stream);
}

// `out`: [rows, padded_classes] of the operands' dtype.
template <Output kOutput>
cudaError_t LaunchStored(const LogitOperands& o, const LogitKernelParams& p, void* out, int clusters,
                         cudaStream_t stream) {
  Maps maps = {};
  if (o.rows == 0) return cudaSuccess;
  if (const cudaError_t error = MakeMaps(o, maps); error != cudaSuccess) return error;
  const BoxedMatrix stored = {out, o.dtype, o.rows, o.padded_classes, kProductRows};
  if (const cudaError_t error = MakeTensorMap(stored, maps.stored); error != cudaSuccess) return error;
  return LaunchTyped<kOutput>(o, p, maps, clusters, stream);
}

}  // namespace

int LogitPassClusters() {
  // The form with the most shared memory; one block a multiprocessor in any case.
  using Largest = Kernel<__nv_bfloat16, Form::kPlain, Output::kExponentials>;
  if (Largest::AllowSharedBytes() != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kClusterBlocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = Largest::kSharedBytes;
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, Largest::kFunction, &config) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return clusters;
}

cudaError_t LaunchLogitPass(const LogitOperands& operands, const StatisticsPass& pass, int clusters,
                            cudaStream_t stream) {
  LogitKernelParams p = MakeKernelParams(operands);
  Set(pass, p);
  return LaunchUnstored<Output::kStatistics>(operands, p, clusters, stream);
}

cudaError_t LaunchLogitPass(const LogitOperands& operands, const ExponentialsPass& pass, int clusters,
                            cudaStream_t stream) {
  LogitKernelParams p = MakeKernelParams(operands);
  Set(pass.statistics, p);
  return LaunchStored<Output::kExponentials>(operands, p, pass.exponentials, clusters, stream);
}

cudaError_t LaunchLogitPass(const LogitOperands& operands, const RecoverablePass& pass, int clusters,
                            cudaStream_t stream) {
  if (operands.form.softcap == 0.0f) {  // all exponentials are recoverable
    return LaunchLogitPass(operands, ExponentialsPass{pass.statistics, pass.exponentials}, clusters, stream);
  }
  LogitKernelParams p = MakeKernelParams(operands);
  Set(pass.statistics, p);
  p.coef_entropy = pass.coef_entropy;
  return LaunchStored<Output::kRecoverable>(operands, p, pass.exponentials, clusters, stream);
}

cudaError_t LaunchLogitPass(const LogitOperands& operands, const ListingPass& pass, int clusters,
                            cudaStream_t stream) {
  LogitKernelParams p = MakeKernelParams(operands);
  Set(pass.references, pass.partials, p);
  Set(pass.panels, p);
  p.lists = pass.lists;
  return LaunchUnstored<Output::kCandidates>(operands, p, clusters, stream);
}

cudaError_t LaunchLogitPass(const LogitOperands& operands, const SecondListingPass& pass, int clusters,
                            cudaStream_t stream) {
  LogitKernelParams p = MakeKernelParams(operands);
  Set(pass.sums, pass.anew, p);
  return LaunchUnstored<Output::kCandidates>(operands, p, clusters, stream);
}

cudaError_t LaunchLogitPass(const LogitOperands& operands, const LastListingPass& pass, int clusters,
                            cudaStream_t stream) {
  LogitKernelParams p = MakeKernelParams(operands);
  Set(pass.sums, pass.panels.marks, p);
  Set(pass.panels, p);
  return LaunchUnstored<Output::kCandidates>(operands, p, clusters, stream);
}

cudaError_t LaunchLogitPass(const LogitOperands& operands, const GradientPass& pass, int clusters,
                            cudaStream_t stream) {
  LogitKernelParams p = MakeKernelParams(operands);
  p.rules = pass.rules;
  return LaunchStored<Output::kGradient>(operands, p, pass.gradient, clusters, stream);
}

}  // namespace lossd::kernels::cuda::hopper
