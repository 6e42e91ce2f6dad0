// SPDX-License-Identifier: Apache-2.0
// Computes the filtered gradients of a row from its candidates. Grid: one block a row.
//
// Math. With e_v = 2^d_v and M, S as in row_loss.cu:
//
//   z_v = w_v . x in fp32 for every candidate v, e_v from it
//   S = sum of e over the other classes, as the selection computed it, + sum of e_v over candidates + e_y
//   kept: e_v >= epsilon S;  dx = A sum over kept of e_v slope_v w_v + target w_y - uniform sum u_v w_v
//
// slope_v is dz/ds. A, target and uniform are the members softmax, target and uniform of the row's
// GradientRule. The last sum is over all classes.
//
// Two sums decide what is kept: the selection's (RowStart), from logits of the tensor cores, and the final S
// (RowEnd), from fp32 logits of the candidates. The "unlisted" classes of a row are neither candidates nor
// the target; their part of both sums is that of the selection.
//
// Plan: candidates are processed in batches. Each thread holds its columns of x and of the batch's rows of W,
// from the dot products until these rows are added to dx, so W is read once. S is known only after the last
// batch. Until then the sum of the selection decides which candidates are kept; the few candidates for which
// S decides differently are added or subtracted at the end.
//
// Bytes: candidates * D * 2 of W, where popular classes come from L2; 2 D of x and 2 D of dx a row. FLOP: 4 D
// a candidate. All sums have a fixed order; only the order of the kept list is not fixed.
#include <algorithm>

#include "kernels/cuda/device/kernel_code.h"
#include "kernels/cuda/kernels/filtered/filtered.h"
#include "kernels/cuda/kernels/filtered/filtered_row.cuh"
#include "kernels/cuda/kernels/row_loss_math.cuh"

namespace lossd::kernels::cuda {
namespace {

constexpr int kMaxWarps = 16;
constexpr int kBatchVectors = 8;  // vectors of W that a thread holds at once

// How a row is divided. kVectors: the 16-byte vectors that a thread holds. kThreads, kBlocks: the threads of
// a block and the blocks of a multiprocessor. They are chosen so that the registers suffice for the
// accumulators.
template <int kVectors>
struct Division;
template <>
struct Division<1> {
  static constexpr int kThreads = 512, kBlocks = 2;
};
template <>
struct Division<2> {
  static constexpr int kThreads = 320, kBlocks = 3;
};
template <>
struct Division<4> {
  static constexpr int kThreads = kMostFilterThreads, kBlocks = 1;
};

template <typename T, int kVectors>
__device__ __forceinline__ void Store(const FilterRowsParams& p, int64_t row,
                                      const Accumulator<T, kVectors>& gradient) {
  StoreRow(gradient, p.gradient_scale, p.hidden_gradient, p.gradient_dtype, row, p.ld);
}

// Values of the block's row that are known before the candidates are processed.
struct RowStart {
  int count;
  Stats unlisted;   // of all classes except the target and the candidates; relative to the row's maximum
  float kept;       // a class with 2^d of at least this counts as kept, by the sum of the selection
  float reference;  // M
  Target target;
};

// Values of the block's row that are known after the candidates have been processed.
struct RowEnd {
  float kept;         // as RowStart::kept, but from the final sum
  float inverse_sum;  // 1 / S
  GradientRule rule;
};

// Reads what the selection has written for the row.
template <typename T, bool kGeneral>
__device__ __forceinline__ RowStart StartRow(const FilterRowsParams& p, const LogitMap<T, kGeneral>& map,
                                             int64_t row) {
  const SelectedRow selected = p.selection.rows[row];
  RowStart start;
  start.count = selected.count;
  start.unlisted.max = selected.max;
  // Rounding may leave a value below 0. A NaN must stay, so that the row fails; fmaxf would turn it into 0.
  const float unlisted = selected.sum - selected.listed_sum;
  start.unlisted.sum = unlisted < 0.0f ? 0.0f : unlisted;
  start.unlisted.spread = selected.spread - selected.listed_spread;
  start.unlisted.weighted = selected.weighted;
  start.unlisted.arg = -1;
  start.kept = p.selection.epsilon * selected.total;
  start.reference = Reference(selected.max, map.f);
  start.target.column = start.target.place = p.in.targets[row];
  start.target.logit = map(selected.target_dot, start.target.column);
  start.target.stored_z = 0.0f;
  start.target.class_weight = kGeneral ? ClassWeight(p.terms, start.target.column) : 1.0f;
  return start;
}

template <typename T, int kVectors>
__device__ __forceinline__ void LoadWeight(const FilterRowsParams& p, int64_t column, int vectors,
                                           Columns<T, kVectors>& columns) {
  columns.Load(static_cast<const T*>(p.weight) + column * p.ld, vectors);
}

// Processes the candidates [first, first + kBatch): computes dot products over the block, writes exponentials
// to `exps` (and slopes), and adds the kept classes to the gradient, still without the factor A. partials and
// factors: scratch memory of the block.
template <typename T, bool kGeneral, int kVectors, int kBatch>
__device__ __forceinline__ void AddBatch(const FilterRowsParams& p, const LogitMap<T, kGeneral>& map,
                                         const RowStart& start, const Columns<T, kVectors>& x, int vectors,
                                         int first, const int* classes, float* exps, float* slopes,
                                         float (*partials)[kBatch], float* factors,
                                         Accumulator<T, kVectors>& gradient) {
  constexpr int kLanes = 32 / kBatch;
  Columns<T, kVectors> w[kBatch];
  float dots[kBatch];
#pragma unroll
  for (int b = 0; b < kBatch; ++b) LoadWeight(p, classes[min(first + b, start.count - 1)], vectors, w[b]);
#pragma unroll
  for (int b = 0; b < kBatch; ++b) dots[b] = w[b].Dot(x);
  const float sum = ReduceMany(dots);
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  if (lane % kLanes == 0) partials[warp][lane / kLanes] = sum;
  __syncthreads();
  if (threadIdx.x < kBatch) {
    const int b = static_cast<int>(threadIdx.x);
    const int warps = static_cast<int>(blockDim.x >> 5);
    float dot = 0.0f;
    for (int i = 0; i < warps; ++i) dot += partials[i][b];
    float factor = 0.0f;
    if (first + b < start.count) {
      const Logit logit = map(dot, classes[first + b]);
      const float e = Exp2(fmaf(logit.z, map.f, -start.reference));
      exps[first + b] = e;
      if (kGeneral) slopes[first + b] = logit.slope;
      factor = e >= start.kept ? e * logit.slope : 0.0f;
    }
    factors[b] = factor;
  }
  __syncthreads();
#pragma unroll
  for (int b = 0; b < kBatch; ++b) gradient.Add(factors[b], w[b]);
}

// Computes the sums over the candidates, and from the sums the results of the row. The statistics of the
// unlisted classes are relative to the selection's maximum, and so are `exps`; thus the sums can be added.
template <typename T, bool kGeneral>
__device__ __forceinline__ void FinishRow(const FilterRowsParams& p, int64_t row, const RowStart& start,
                                          const float* exps, float f, float* scratch, RowEnd& end) {
  float sum = 0.0f;
  float spread = 0.0f;
  for (int i = threadIdx.x; i < start.count; i += blockDim.x) {
    const float e = exps[i];
    sum += e;
    if (kGeneral && e > 0.0f) spread += e * log2f(e);
  }
  sum = BlockSum(sum, scratch);
  if constexpr (kGeneral) {
    __syncthreads();
    spread = BlockSum(spread, scratch);
  }
  if (threadIdx.x != 0) return;
  Stats all = start.unlisted;
  all.sum += sum;
  all.spread += spread;
  RowResult result = FinishSums<kGeneral>(p.terms, p.in, row, start.target, all, f);
  result.argmax = p.out.argmax[row];
  WriteRow(p.out, row, result);
  end.rule = MakeRule<kGeneral>(p.terms, p.in, row, start.target, result);
  end.inverse_sum = result.inverse_sum;
  end.kept = p.selection.epsilon / result.inverse_sum;
}

// Appends an element of class `column` to the list, for each thread of the warp with `has`. All threads of
// the warp call it.
__device__ __forceinline__ void AppendKept(const KeptList& kept, bool has, int column, int64_t row,
                                           float coef) {
  const unsigned lane = threadIdx.x & 31;
  const unsigned mask = __ballot_sync(0xffffffffu, has);
  if (mask == 0) return;
  int begin = 0;
  if (lane == 0) begin = atomicAdd(kept.count, __popc(mask));
  begin = __shfl_sync(0xffffffffu, begin, 0);
  if (!has) return;
  const int at = begin + __popc(mask & ((1u << lane) - 1));
  kept.keys[at] =
      (static_cast<uint64_t>(column) << kept.row_bits) | static_cast<uint64_t>(kept.first_row + row);
  kept.coefs[at] = coef;
}

// Lists the kept elements and the target, and writes the dropped mass of the row.
template <bool kGeneral>
__device__ __forceinline__ void ListKept(const FilterRowsParams& p, int64_t row, const RowStart& start,
                                         const RowEnd& end, const int* classes, const float* exps,
                                         const float* slopes, float* scratch) {
  const bool list = p.kept.keys != nullptr && p.accumulate[row] != 0 && end.rule.valid;
  float dropped = 0.0f;
  const int rounded = (start.count + 31) / 32 * 32;
  for (int i = threadIdx.x; i < rounded; i += blockDim.x) {
    const float e = i < start.count ? exps[i] : 0.0f;
    const bool is_kept = i < start.count && e >= end.kept;
    if (!is_kept) dropped += e;
    if (!list) continue;
    const float slope = kGeneral && is_kept ? slopes[i] : 1.0f;
    AppendKept(p.kept, is_kept, is_kept ? classes[i] : 0, row, e * slope * end.rule.softmax);
  }
  if (list && threadIdx.x < 32) {
    AppendKept(p.kept, threadIdx.x == 0, start.target.column, row, end.rule.target);
  }
  dropped = BlockSum(dropped, scratch);
  if (threadIdx.x == 0) {
    p.dropped_mass[row] = end.rule.valid ? (start.unlisted.sum + dropped) * end.inverse_sum : 0.0f;
  }
}

// Corrects the gradient for the candidates that reach epsilon of the final sum but not of the selection's
// sum, or the other way round.
template <typename T, bool kGeneral, int kVectors>
__device__ __forceinline__ void Reconsider(const FilterRowsParams& p, const RowStart& start,
                                           const RowEnd& end, int vectors, const int* classes,
                                           const float* exps, const float* slopes,
                                           Accumulator<T, kVectors>& gradient) {
  for (int i = 0; i < start.count; ++i) {
    const float e = exps[i];
    const bool was_kept = e >= start.kept;
    if (was_kept == (e >= end.kept)) continue;
    Columns<T, kVectors> w;
    LoadWeight(p, classes[i], vectors, w);
    const float factor = kGeneral ? e * slopes[i] : e;
    gradient.Add(was_kept ? -factor : factor, w);
  }
}

// Multiplies the sum by A, and adds the target and the uniform part.
template <typename T, int kVectors>
__device__ __forceinline__ void FinishGradient(const FilterRowsParams& p, const RowStart& start,
                                               const GradientRule& rule, int vectors,
                                               Accumulator<T, kVectors>& gradient) {
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
#pragma unroll
    for (int i = 0; i < Vec<T>::kSize; ++i) gradient.sums[k][i] *= rule.softmax;
  }
  Columns<T, kVectors> w;
  LoadWeight(p, start.target.column, vectors, w);
  gradient.Add(rule.target, w);
  if (p.weight_sum == nullptr) return;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int v = static_cast<int>(threadIdx.x + k * blockDim.x);
    if (v >= vectors) continue;
#pragma unroll
    for (int i = 0; i < Vec<T>::kSize; ++i) {
      gradient.sums[k][i] -= rule.uniform * __ldg(p.weight_sum + v * Vec<T>::kSize + i);
    }
  }
}

template <typename T, bool kGeneral, int kVectors>
__global__ __launch_bounds__(Division<kVectors>::kThreads, Division<kVectors>::kBlocks) void FilterRowsKernel(
    const __grid_constant__ FilterRowsParams p) {
  constexpr int kBatch = kBatchVectors / kVectors;
  extern __shared__ int classes[];  // [capacity], then exps and, if kGeneral, slopes
  __shared__ alignas(16) float partials[kMaxWarps][kBatch];
  __shared__ float factors[kBatch];
  __shared__ float scratch[33];
  __shared__ RowEnd end;
  const int64_t row = blockIdx.x;
  const int vectors = static_cast<int>(p.ld / Vec<T>::kSize);
  if (*p.selection.used > p.selection.capacity) return;  // too many candidates: the chunk will be exact
  Accumulator<T, kVectors> gradient;
  if (p.with_gradient[row] == 0) {
    if (threadIdx.x == 0) p.dropped_mass[row] = 0.0f;
    if (p.hidden_gradient != nullptr) Store(p, row, gradient);
    return;
  }
  const LogitMap<T, kGeneral> map(p.terms);
  const RowStart start = StartRow<T, kGeneral>(p, map, row);
  auto* exps = reinterpret_cast<float*>(classes + start.count);
  float* slopes = exps + start.count;
  Columns<T, kVectors> x;
  x.Load(static_cast<const T*>(p.hidden) + row * p.ld, vectors);
  const int32_t* candidates = p.selection.pool + p.selection.rows[row].begin;
  for (int i = threadIdx.x; i < start.count; i += blockDim.x) classes[i] = candidates[i];
  __syncthreads();

  for (int first = 0; first < start.count; first += kBatch) {
    AddBatch<T, kGeneral, kVectors, kBatch>(p, map, start, x, vectors, first, classes, exps, slopes, partials,
                                            factors, gradient);
  }
  FinishRow<T, kGeneral>(p, row, start, exps, map.f, scratch, end);
  __syncthreads();
  ListKept<kGeneral>(p, row, start, end, classes, exps, slopes, scratch);
  if (p.hidden_gradient == nullptr) return;
  if (end.rule.valid) {
    Reconsider<T, kGeneral, kVectors>(p, start, end, vectors, classes, exps, slopes, gradient);
    FinishGradient<T, kVectors>(p, start, end.rule, vectors, gradient);
  } else {
    gradient = {};
  }
  Store(p, row, gradient);
}

// ---- launch ----

template <typename T, bool kGeneral, int kVectors>
cudaError_t Launch(const FilterRowsParams& p, unsigned threads, cudaStream_t stream) {
  auto* kernel = FilterRowsKernel<T, kGeneral, kVectors>;
  const auto most = static_cast<int>(std::min<int64_t>(kMaxRowCandidates, p.terms.vocab));
  const int shared = most * (kGeneral ? 3 : 2) * static_cast<int>(sizeof(float));
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(p.in.rows), threads, static_cast<size_t>(shared), stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchFilterRows(const FilterRowsParams& params, cudaStream_t stream) {
  if (params.in.rows == 0) return cudaSuccess;
  const auto launch = [&](auto element, auto vectors, unsigned threads) {
    using T = typename decltype(element)::Type;
    constexpr int kVectors = decltype(vectors)::value;
    return params.terms.IsGeneral() ? Launch<T, true, kVectors>(params, threads, stream)
                                    : Launch<T, false, kVectors>(params, threads, stream);
  };
  return WithDivision<Division>(params.ld, params.dtype, launch);
}

}  // namespace lossd::kernels::cuda

LOSSD_KERNEL_FILE(FilteredRows)
