// SPDX-License-Identifier: Apache-2.0
// Helpers for the kernels of filtered and sampled gradients in which each block works on one row.
// SelectCandidates writes the row's part of a RowSelection (filtered.h) from the classes whose logits passed
// a threshold. Columns and Accumulator hold the columns of a matrix row that belong to a thread.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_FILTERED_FILTERED_ROW_CUH_
#define LOSSD_KERNELS_CUDA_KERNELS_FILTERED_FILTERED_ROW_CUH_

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/filtered/filtered.h"
#include "kernels/cuda/kernels/row_loss_math.cuh"

namespace lossd::kernels::cuda {

// ---- candidates ----

// The relative rounding error of a logit. It is this large because tensor cores truncate the sum at every
// step.
constexpr float kRoundoff = 0x1p-15f;

// A threshold that every finite logit passes. Logits of masked classes are -inf and do not pass.
constexpr float kNone = -FLT_MAX;

// The smallest logit z whose probability may reach epsilon, if log2_sum is the logarithm of the row's sum. It
// allows for the rounding errors of z and of the logits in the sum, but not for digits that were lost when a
// bias was added. If the sum is NaN, the result is NaN, and no logit passes.
__device__ __forceinline__ float Threshold(float log2_sum, float log2_epsilon, float f) {
  const float exact = (log2_sum + log2_epsilon) / f;
  const float allowed = kRoundoff * (fabsf(exact) + fabsf(log2_sum / f));
  const float threshold = exact - allowed;
  return threshold < kNone ? kNone : threshold;
}

// The candidates of a row in shared memory. All but `sorted` are in any order.
struct CandidateColumns {
  int32_t* columns;
  float* exponents;  // z f, not relative to M
  float* sorted;     // exponents relative to M, in the order of columns
};

// Values of the block's row, in shared memory.
struct RowCandidates {
  int count;  // may exceed the room
  int begin;
  float threshold;  // z of a candidate is at least this
  float reference;  // M
  SelectedRow selected;
  alignas(16) float scratch[33];  // alignas: 16-byte vectors of it

  // Called by one thread. `others`: the statistics of all classes but the target, rebased to the largest
  // logit of the row.
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
  // Adds a candidate, if the list has fewer than `most`; counts it in any case.
  __device__ __forceinline__ void Add(const CandidateColumns& list, int most, int column, float exponent) {
    const int at = atomicAdd(&count, 1);
    if (at >= most) return;
    list.columns[at] = column;
    list.exponents[at] = exponent;
  }
};

// Copies the candidates to the pool, in the order of classes. The place of a candidate among the candidates
// of the row is the number of candidates with a smaller class.
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

// Writes begin, count, listed_sum and listed_spread of the row. The sums are in the order of classes, so they
// do not depend on the order in which candidates were found.
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

// Writes the row's entry of the selection from its candidates. If there are more than `most` candidates,
// marks the selection as incomplete: `used` becomes larger than the capacity. Called by the whole block,
// after a barrier.
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

// ---- the columns of a matrix row that belong to a thread of a block ----

// Sums kCount values over a warp at once. Lane l gets the sum of value l / (32 / kCount).
template <int kCount>
__device__ __forceinline__ float ReduceMany(float (&values)[kCount]) {
  const int lane = threadIdx.x & 31;
  int offset = 16;
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2, offset /= 2) {
    const bool high = (lane & offset) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float sent = high ? values[i] : values[i + half];
      const float own = high ? values[i + half] : values[i];
      values[i] = own + __shfl_xor_sync(0xffffffffu, sent, offset);
    }
  }
  float sum = values[0];
  for (; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  return sum;
}

// The columns of a matrix row that belong to a thread: vectors threadIdx.x, threadIdx.x + blockDim.x, ...
template <typename T, int kVectors>
struct Columns {
  uint4 raw[kVectors];

  __device__ __forceinline__ void Load(const T* row, int vectors) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int v = static_cast<int>(threadIdx.x + k * blockDim.x);
      raw[k] = v < vectors ? __ldg(reinterpret_cast<const uint4*>(row) + v) : make_uint4(0, 0, 0, 0);
    }
  }
  __device__ __forceinline__ float Dot(const Columns& other) const {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      float a[Vec<T>::kSize], b[Vec<T>::kSize];
      Vec<T>::Unpack(raw[k], a);
      Vec<T>::Unpack(other.raw[k], b);
#pragma unroll
      for (int i = 0; i < Vec<T>::kSize; ++i) sum = fmaf(a[i], b[i], sum);
    }
    return sum;
  }
};

// A thread's fp32 sums, over several rows, of the columns that belong to it.
template <typename T, int kVectors>
struct Accumulator {
  float sums[kVectors][Vec<T>::kSize] = {};

  __device__ __forceinline__ void Add(float factor, const Columns<T, kVectors>& columns) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      float x[Vec<T>::kSize];
      Vec<T>::Unpack(columns.raw[k], x);
#pragma unroll
      for (int i = 0; i < Vec<T>::kSize; ++i) sums[k][i] = fmaf(factor, x[i], sums[k][i]);
    }
  }
};

// Writes scale times the sums to row `row` of a matrix [rows, ld] of `dtype`, which is T or fp32.
template <typename T, int kVectors>
__device__ __forceinline__ void StoreRow(const Accumulator<T, kVectors>& from, float scale, void* to,
                                         DType dtype, int64_t row, int64_t ld) {
  constexpr int kSize = Vec<T>::kSize;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int v = static_cast<int>(threadIdx.x + k * blockDim.x);
    if (v >= static_cast<int>(ld / kSize)) continue;
    float out[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) out[i] = scale * from.sums[k][i];
    if (dtype == DType::kFloat32) {
      auto* at = static_cast<float*>(to) + row * ld + v * kSize;
#pragma unroll
      for (int i = 0; i < kSize; i += 4) {
        *reinterpret_cast<float4*>(at + i) = make_float4(out[i], out[i + 1], out[i + 2], out[i + 3]);
      }
    } else {
      reinterpret_cast<uint4*>(static_cast<T*>(to) + row * ld)[v] = Vec<T>::Pack(out);
    }
  }
}

// ---- Host: how a row is divided ----

// Calls launch(Element<T>(), std::integral_constant<int, kVectors>(), threads), where kVectors is the
// smallest number of 16-byte vectors a thread for which one block can hold a row of `ld` elements, and
// `threads` is the number of threads needed. Division<kVectors> is the most threads that a block of the
// kernel may have for this kVectors. cudaErrorInvalidValue if no block can hold the row.
template <template <int> class Division, typename LaunchFn>
cudaError_t WithDivision(int64_t ld, DType dtype, LaunchFn launch) {
  return WithElement(dtype, [&](auto element) {
    const int64_t vectors = ld / Vec<typename decltype(element)::Type>::kSize;
    const auto with = [&](auto per_thread) {
      constexpr int kVectors = decltype(per_thread)::value;
      if (vectors > int64_t{kVectors} * Division<kVectors>::kThreads) return cudaErrorInvalidValue;
      const int64_t threads = (vectors + kVectors - 1) / kVectors;
      return launch(element, per_thread, static_cast<unsigned>((threads + 31) / 32 * 32));
    };
    if (vectors <= Division<1>::kThreads) return with(std::integral_constant<int, 1>());
    if (vectors <= 2 * Division<2>::kThreads) return with(std::integral_constant<int, 2>());
    return with(std::integral_constant<int, 4>());
  });
}

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_FILTERED_FILTERED_ROW_CUH_
