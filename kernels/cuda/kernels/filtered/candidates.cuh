// SPDX-License-Identifier: Apache-2.0
// The candidates of a row, one block a row: from the classes whose logit passed a threshold to the row's
// entry of a RowSelection.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_FILTERED_CANDIDATES_CUH_
#define LOSSD_KERNELS_CUDA_KERNELS_FILTERED_CANDIDATES_CUH_

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "kernels/cuda/kernels/filtered/filtered.h"
#include "kernels/cuda/kernels/row_loss_math.cuh"

namespace lossd::kernels::cuda {

// The roundoff of a logit: the sums of tensor cores are truncated at every step.
constexpr float kRoundoff = 0x1p-15f;

// A threshold that every finite logit passes; masked ones are -inf.
constexpr float kNone = -FLT_MAX;

// The smallest z that may reach epsilon of a sum with this logarithm, if it was rounded, and so were those
// that the sum was formed of. What a bias has cancelled of them is not seen here. NaN stays NaN: nothing
// passes.
__device__ __forceinline__ float Threshold(float log2_sum, float log2_epsilon, float f) {
  const float exact = (log2_sum + log2_epsilon) / f;
  const float allowed = kRoundoff * (fabsf(exact) + fabsf(log2_sum / f));
  const float threshold = exact - allowed;
  return threshold < kNone ? kNone : threshold;
}

// In shared memory, in any order but for `sorted`.
struct CandidateColumns {
  int32_t* columns;
  float* exponents;  // z f, not yet relative to M
  float* sorted;     // exponents in the order of columns, relative to M
};

// In shared memory: what the block knows of its row.
struct RowCandidates {
  int count;  // may be more than there is room for
  int begin;
  float threshold;  // z of a candidate is not below it
  float reference;  // M
  SelectedRow selected;
  alignas(16) float scratch[33];  // a vector of it holds nothing else

  // One thread. others: of all classes but the target, rebased to the largest logit of the row.
  __device__ __forceinline__ void Start(const Stats& others, const RowResult& result, float target_dot,
                                        float log2_epsilon, float f) {
    count = 0;
    threshold = Threshold(result.reference + result.log2_sum, log2_epsilon, f);
    reference = result.reference;
    selected = {0,
                0,
                isfinite(result.lse) && isfinite(result.loss) ? 1 : 0,
                others.max,
                others.sum,
                others.spread,
                others.weighted,
                1.0f / result.inverse_sum,
                target_dot,
                0.0f,
                0.0f};
  }
  __device__ __forceinline__ void Add(const CandidateColumns& list, int most, int column, float exponent) {
    const int at = atomicAdd(&count, 1);
    if (at >= most) return;
    list.columns[at] = column;
    list.exponents[at] = exponent;
  }
};

// Puts the candidates into the pool in the order of classes.
template <int kThreads>
__device__ __forceinline__ void RankCandidates(const RowSelection& selection, const CandidateColumns& list,
                                               RowCandidates& row) {
  const int count = row.count;
  if (threadIdx.x == 0) row.begin = count > 0 ? atomicAdd(selection.used, count) : 0;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int32_t column = list.columns[i];
    int rank = 0;
    for (int j = 0; j < count; ++j) rank += list.columns[j] < column ? 1 : 0;
    list.sorted[rank] = list.exponents[i] - row.reference;
    const int at = row.begin + rank;
    if (at < selection.capacity) selection.pool[at] = column;
  }
}

template <bool kGeneral, int kThreads>
__device__ __forceinline__ void SumCandidates(const float* sorted, RowCandidates& row) {
  float sum = 0.0f, spread = 0.0f;
  for (int i = threadIdx.x; i < row.count; i += kThreads) {
    const float e = Exp2(sorted[i]);
    sum += e;
    if (kGeneral && e > 0.0f) spread += e * sorted[i];
  }
  sum = BlockSum(sum, row.scratch);
  if constexpr (kGeneral) {
    __syncthreads();
    spread = BlockSum(spread, row.scratch);
  }
  if (threadIdx.x != 0) return;
  row.selected.begin = row.begin;
  row.selected.count = row.count;
  row.selected.listed_sum = sum;
  row.selected.listed_spread = spread;
}

// The row's entry of the selection, from its candidates; or, if there are more than `most`, says that lists
// are incomplete. The whole block, after a barrier.
template <bool kGeneral, int kThreads>
__device__ __forceinline__ void SelectCandidates(const RowSelection& selection, int64_t index,
                                                 const CandidateColumns& list, int most, RowCandidates& row) {
  if (row.count > most) {
    if (threadIdx.x == 0) atomicMax(selection.used, selection.capacity + 1);
  } else {
    RankCandidates<kThreads>(selection, list, row);
    __syncthreads();
    SumCandidates<kGeneral, kThreads>(list.sorted, row);
  }
  if (threadIdx.x == 0) selection.rows[index] = row.selected;
}

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_FILTERED_CANDIDATES_CUH_
