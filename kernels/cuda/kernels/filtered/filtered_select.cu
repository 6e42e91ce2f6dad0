// SPDX-License-Identifier: Apache-2.0
// The first pass over the rows of filtered gradients: maximum, sums and results as in row_loss.cu, and the
// classes whose probability may reach epsilon (candidates). Grid: one block a row.
//
// The row is read once and not kept, so candidates must be recognized before the sum is known. The warps
// publish their sums at intervals. A class whose exponential is below epsilon times the published sum is not
// a candidate. Vectors with a logit above this early bound are examined again at the end. The early bound
// depends on the order in which warps run, so it is kept below the final bound. It affects only which vectors
// are examined again, not which candidates are found. In a flat row, 3 % of the elements pass the bound after
// the first 16,384 elements (11 % after 8,192), and fewer and fewer later. In a peaked row, only few elements
// more than the candidates pass. If the list of vectors overflows, the whole row is examined again.
//
// Sums are relative to a reference that the lanes of a warp share. The reference moves only when exponents
// would become large. If each thread had a maximum of its own, the lanes would diverge.
//
// The logit and the threshold are both computed in fp32; the bound allows for the rounding errors of both.
// Bytes: 4 V a row, read. Order: all sums have a fixed order; candidates are sorted by class.
#include <algorithm>
#include <cfloat>

#include "kernels/cuda/device/kernel_code.h"
#include "kernels/cuda/kernels/filtered/filtered.h"
#include "kernels/cuda/kernels/filtered/filtered_row.cuh"
#include "kernels/cuda/kernels/row_loss_math.cuh"

namespace lossd::kernels::cuda {
namespace {

// Long rows keep 512 threads busy. For short rows, the work before and after the scan takes much of the time.
// So their blocks have half the size, with room for half as many candidates, and twice as many rows share a
// multiprocessor. kThreads_ and kMost_: threads of a block, and the most candidates of a row.
template <int kThreads_, int kMost_>
struct Block {
  static constexpr int kThreads = kThreads_;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kMost = kMost_;  // the most candidates of a row
  // The number of blocks on a multiprocessor.
  static constexpr int kResident(bool general) { return (general ? 1024 : 1536) / kThreads; }
};
using LongRow = Block<512, kMaxRowCandidates>;
using ShortRow = Block<256, kMaxRowCandidates / 2>;
constexpr int64_t kShortVectors = 16'384;  // the most vectors of a short row
constexpr int kListedVectors = 4096;       // room for vectors that are examined again

constexpr int kUnroll = 4;         // vectors that a thread loads at once
constexpr float kHighest = 64.0f;  // the most by which exponents may exceed the reference, in powers of two
constexpr int kEagerRounds = 4;    // after these rounds the bound is updated only every kLazyRounds rounds
constexpr int kLazyRounds = 4;
// The margin of the early bound. The log2 of a sum varies less than this with the order of the terms.
constexpr float kBelow = 0x1p-14f;

constexpr int kSize = Vec<float>::kSize;

// For fp32, softcaps are not computed more precisely, because the logits of selected classes are computed
// again (filtered_rows.cu).
template <bool kGeneral>
using Map = LogitMap<__nv_bfloat16, kGeneral>;

// The lists of a block, in shared memory: the vectors that are examined again, and then the candidates.
struct List {
  int32_t* vectors;             // [kListedVectors]: vectors with a logit that passed, in any order
  CandidateColumns candidates;  // [most]; `sorted` uses the memory of `vectors`

  __device__ __forceinline__ List(int32_t* memory, int most)
      : vectors(memory),
        candidates{memory + kListedVectors, reinterpret_cast<float*>(memory + kListedVectors + most),
                   reinterpret_cast<float*>(memory)} {}
  static int64_t Bytes(int64_t most) {
    return (kListedVectors + 2 * most) * static_cast<int64_t>(sizeof(int32_t));
  }
};
static_assert(kMaxRowCandidates <= kListedVectors);

template <int kWarps>
struct Shared {
  float logs[kWarps];      // log2 of the warps' sums, as published
  float words[kWarps][5];  // the warps' statistics at the end
  int listed;              // number of vectors that passed; may exceed the room
  RowCandidates row;
};

// The logits of vector v; -inf at the target and past the vocabulary. slack: the most by which rounding may
// have lowered a logit.
template <bool kGeneral>
__device__ __forceinline__ void MaskedLogits(const SelectRowsParams& p, const Map<kGeneral>& map,
                                             const uint4& raw, int v, int target, float (&z)[kSize],
                                             float (&slack)[kSize]) {
  const int first = v * kSize;
  const int vocab = static_cast<int>(p.logits.classes);
  float dots[kSize];
  Vec<float>::Unpack(raw, dots);
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    z[i] = map(dots[i], kGeneral ? min(first + i, vocab - 1) : 0).z;
    slack[i] = kGeneral ? kRoundoff * fabsf(map.scale * dots[i]) : 0.0f;
  }
  if (target >= first && target < first + kSize) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (first + i == target) z[i] = NegativeInfinity();
    }
  }
  if (first + kSize > vocab) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (first + i >= vocab) z[i] = NegativeInfinity();
    }
  }
}

// Running statistics of a thread. The sums are relative to `reference`, which all lanes of the warp have in
// common; it is in units of log 2, and -infinity before the first logit.
struct Running {
  float reference;
  float max;
  float sum;
  float spread;
  float weighted;
  int best;  // the first vector that has `max`
};

// Moves the warp's reference if the exponents of a lane have become too large, or if there is no reference
// yet.
__device__ __forceinline__ void KeepInRange(Running& s, float highest, float f) {
  const float top = highest * f;
  if (!__any_sync(0xffffffffu, top > s.reference + kHighest)) return;
  float reference = top > s.reference ? top : s.reference;
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    reference = fmaxf(reference, __shfl_xor_sync(0xffffffffu, reference, offset));
  }
  const float shift = s.reference - reference;
  const float factor = s.sum == 0.0f ? 0.0f : Exp2(shift);
  s.spread = s.sum == 0.0f ? 0.0f : factor * (s.spread + s.sum * shift);
  s.sum = s.sum == 0.0f ? 0.0f : s.sum * factor;
  s.reference = reference;
}

template <bool kGeneral>
__device__ __forceinline__ void AddVector(const SelectRowsParams& p, const Map<kGeneral>& map,
                                          const Target& target, const float (&z)[kSize], int v, float max,
                                          Running& s) {
  s.best = max > s.max ? v : s.best;
  s.max = fmaxf(s.max, max);
  const float reference = s.reference == NegativeInfinity() ? 0.0f : s.reference;  // only NaN so far
  float sums[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float d = fmaf(z[i], map.f, -reference);
    const float e = Exp2(d);
    sums[i & 1] += e;
    if constexpr (kGeneral) {
      if (e > 0.0f) s.spread += e * d;
      const int column = v * kSize + i;
      if (p.terms.smoothing > 0.0f && column < p.logits.classes && column != target.column) {
        s.weighted += ClassWeight(p.terms, column) * (z[i] - target.logit.z);
      }
    }
  }
  s.sum += sums[0] + sums[1];
}

__device__ __forceinline__ float LargestOf(const float (&z)[kSize]) {
  float max = fmaxf(z[0], z[1]);
#pragma unroll
  for (int i = 2; i < kSize; i += 2) max = fmaxf(max, fmaxf(z[i], z[i + 1]));
  return max;
}

// Publishes this warp's sum. Returns log2 of the sum of all sums that warps have published so far. wait:
// first waits until all warps of the block have published one.
template <int kWarps>
__device__ __forceinline__ float PublishSum(const Running& s, float* logs, bool wait) {
  const int lane = threadIdx.x & 31;
  const float sum = WarpSum(s.sum);
  if (lane == 0)
    atomicExch(logs + (threadIdx.x >> 5), sum > 0.0f ? s.reference + log2f(sum) : NegativeInfinity());
  if (wait) {
    __syncthreads();
  } else {
    __syncwarp();
  }
  // Read atomically, because other warps may be publishing.
  const float own =
      lane < kWarps ? __int_as_float(atomicOr(reinterpret_cast<int*>(logs + lane), 0)) : NegativeInfinity();
  float top = own;
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, offset));
  const float total = WarpSum(own == NegativeInfinity() ? 0.0f : Exp2(own - top));
  return top + log2f(total);
}

// Combines the warps' statistics into the statistics of the row, with the same result in all lanes of the
// calling warp.
template <bool kGeneral, int kWarps>
__device__ __forceinline__ Stats CombineWarps(const float (&words)[kWarps][5], float f) {
  const int lane = threadIdx.x & 31;
  Stats s = NoStats();
  if (lane < kWarps) {
    const float* w = words[lane];
    s = {w[0], w[1], w[2], w[3], __float_as_int(w[4])};
  }
  float max = s.max;
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, offset));
  s.arg = __reduce_min_sync(0xffffffffu, s.max == max ? s.arg : INT32_MAX);
  Rebase(s, max, f);
  s.sum = WarpSum(s.sum);
  if constexpr (kGeneral) {
    s.spread = WarpSum(s.spread);
    s.weighted = WarpSum(s.weighted);
  }
  return s;
}

// Writes the warp's statistics, relative to its maximum, to `words`.
template <bool kGeneral>
__device__ __forceinline__ void PutWarp(const SelectRowsParams& p, const Map<kGeneral>& map,
                                        const Target& target, const uint4* row, const Running& s,
                                        float* words) {
  float max = s.max;
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, offset));
  int32_t arg = INT32_MAX;
  if (s.max == max && s.best >= 0) {
    float z[kSize], slack[kSize];
    MaskedLogits(p, map, __ldg(row + s.best), s.best, target.column, z, slack);
#pragma unroll
    for (int i = kSize - 1; i >= 0; --i) {
      if (z[i] == max) arg = s.best * kSize + i;
    }
  }
  arg = __reduce_min_sync(0xffffffffu, arg);
  const float shift = s.reference - Reference(max, map.f);
  float sum = WarpSum(s.sum);
  float spread = kGeneral ? WarpSum(s.spread) : 0.0f;
  const float weighted = kGeneral ? WarpSum(s.weighted) : 0.0f;
  if (sum != 0.0f) {
    spread = Exp2(shift) * (spread + sum * shift);
    sum *= Exp2(shift);
  }
  if ((threadIdx.x & 31) != 0) return;
  words[0] = max;
  words[1] = sum;
  words[2] = spread;
  words[3] = weighted;
  words[4] = __int_as_float(arg);
}

// Scans the row: computes its statistics and lists the vectors that pass.
template <bool kGeneral, int kWarps>
__device__ __forceinline__ Running ScanRow(const SelectRowsParams& p, const Map<kGeneral>& map,
                                           const Target& target, const uint4* row, float log2_epsilon,
                                           const List& list, Shared<kWarps>& shared) {
  constexpr int kThreads = kWarps * 32;
  const int vectors = static_cast<int>(p.logits.ld / kSize);
  Running s = {NegativeInfinity(), NegativeInfinity(), 0.0f, 0.0f, 0.0f, -1};
  float threshold = kNone;
  const int rounds = (vectors + kThreads * kUnroll - 1) / (kThreads * kUnroll);
  for (int round = 0; round < rounds; ++round) {
    const int base = round * kThreads * kUnroll + static_cast<int>(threadIdx.x);
    uint4 raw[kUnroll];
    float tops[kUnroll];  // the largest z of a vector, plus its slack
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int v = base + u * kThreads;
      raw[u] = v < vectors ? __ldcs(row + v) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int v = base + u * kThreads;
      float z[kSize], slack[kSize];
      MaskedLogits(p, map, raw[u], v, target.column, z, slack);  // logits past the row's end are masked
      const float max = LargestOf(z);
      KeepInRange(s, max, map.f);
      AddVector(p, map, target, z, v, max, s);
      if constexpr (kGeneral) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) z[i] += slack[i];
      }
      tops[u] = kGeneral ? LargestOf(z) : max;
    }
    if (round < kEagerRounds || round % kLazyRounds == 0) {
      // The early bound: the threshold for a slightly smaller sum.
      const float sum = PublishSum<kWarps>(s, shared.logs, round == 0);
      threshold = Threshold(sum - kBelow * (1.0f + fabsf(sum)), log2_epsilon, map.f);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (!(tops[u] >= threshold)) continue;
      const int at = atomicAdd(&shared.listed, 1);
      if (at < kListedVectors) list.vectors[at] = base + u * kThreads;
    }
  }
  return s;
}

// Tests the logits of the listed vectors with the row's sum, or the logits of the whole row if the list has
// overflowed.
template <bool kGeneral, int kWarps>
__device__ __forceinline__ void FindCandidates(const SelectRowsParams& p, const Map<kGeneral>& map,
                                               const Target& target, const float* logits, const List& list,
                                               int most, Shared<kWarps>& shared) {
  const bool whole = shared.listed > kListedVectors;
  const int vocab = static_cast<int>(p.logits.classes);
  const int count = whole ? vocab : shared.listed * kSize;
  for (int i = threadIdx.x; i < count; i += kWarps * 32) {
    const int column = whole ? i : list.vectors[i / kSize] * kSize + i % kSize;
    if (column >= vocab || column == target.column) continue;
    const float dot = logits[column];
    const float z = map(dot, column).z;
    const float slack = kGeneral ? kRoundoff * fabsf(map.scale * dot) : 0.0f;
    if (z + slack >= shared.row.threshold) shared.row.Add(list.candidates, most, column, z * map.f);
  }
}

template <bool kGeneral, typename Block>
__global__ __launch_bounds__(Block::kThreads, Block::kResident(kGeneral)) void SelectRowsKernel(
    const __grid_constant__ SelectRowsParams p) {
  extern __shared__ int32_t list_memory[];
  __shared__ Shared<Block::kWarps> shared;
  const int64_t row = blockIdx.x;
  const float* logits = static_cast<const float*>(p.logits.data) + row * p.logits.ld;
  const auto* raw = reinterpret_cast<const uint4*>(logits);
  const int most = static_cast<int>(min(int64_t{Block::kMost}, p.logits.classes));
  const List list(list_memory, most);
  const Map<kGeneral> map(p.terms);
  Target target;
  target.column = target.place = p.in.targets[row];
  const float stored_dot = logits[target.column];
  const float target_dot = p.in.target_dots != nullptr ? p.in.target_dots[row] : stored_dot;
  target.logit = map(target_dot, target.column);
  target.stored_z = map(stored_dot, target.column).z;
  target.class_weight = kGeneral ? ClassWeight(p.terms, target.column) : 1.0f;
  if (threadIdx.x < Block::kWarps) shared.logs[threadIdx.x] = NegativeInfinity();
  if (threadIdx.x == 0) shared.listed = 0;
  __syncthreads();

  const float log2_epsilon = log2f(p.selection.epsilon);
  const Running running = ScanRow(p, map, target, raw, log2_epsilon, list, shared);
  PutWarp(p, map, target, raw, running, shared.words[threadIdx.x >> 5]);
  __syncthreads();
  if (threadIdx.x < 32) {
    const Stats others = CombineWarps<kGeneral>(shared.words, map.f);
    const RowResult result = Finish<kGeneral>(p.terms, p.in, row, target, others, map.f);
    Stats rebased = others;
    Rebase(rebased, fmaxf(others.max, target.logit.z), map.f);
    if (threadIdx.x == 0) {
      WriteRow(p.out, row, result);
      shared.row.Start(rebased, result, target_dot, log2_epsilon, map.f);
    }
  }
  __syncthreads();
  FindCandidates(p, map, target, logits, list, most, shared);
  __syncthreads();
  SelectCandidates<kGeneral, Block::kThreads>(p.selection, row, list.candidates, most, shared.row);
}

template <bool kGeneral, typename Block>
cudaError_t Launch(const SelectRowsParams& p, cudaStream_t stream) {
  auto* kernel = SelectRowsKernel<kGeneral, Block>;
  const auto shared = static_cast<int>(List::Bytes(std::min<int64_t>(Block::kMost, p.logits.classes)));
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(p.in.rows), Block::kThreads, static_cast<size_t>(shared), stream>>>(p);
  return cudaGetLastError();
}

template <bool kGeneral>
cudaError_t LaunchBlock(const SelectRowsParams& p, cudaStream_t stream) {
  return p.logits.ld / kSize <= kShortVectors ? Launch<kGeneral, ShortRow>(p, stream)
                                              : Launch<kGeneral, LongRow>(p, stream);
}

}  // namespace

cudaError_t LaunchSelectRows(const SelectRowsParams& params, cudaStream_t stream) {
  if (params.in.rows == 0) return cudaSuccess;
  return params.terms.IsGeneral() ? LaunchBlock<true>(params, stream) : LaunchBlock<false>(params, stream);
}

}  // namespace lossd::kernels::cuda

LOSSD_KERNEL_FILE(FilteredSelect)
