// SPDX-License-Identifier: Apache-2.0
// dx of sampled gradients from the list, one block a row: each thread holds its columns of dx and adds the
// rows of W that the list names, a batch of loads at a time.
//
// Bytes: entries * D * 2 of W, of which popular classes come from L2; 2 D of dx a row. FLOP: 2 D an entry.
// Order: entries in the order of classes.
#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/kernels/filtered/row_columns.cuh"
#include "kernels/cuda/kernels/sampled/sampled.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int kBatchVectors = 8;  // of W a thread holds at once
constexpr int kShared = 256;      // entries that the block looks at together
constexpr int kTakenOnce = 16;    // HotClasses::taken

// How a row is divided: 16-byte vectors a thread holds, and with how many threads and blocks a
// multiprocessor.
template <int kVectors>
struct Division;
template <>
struct Division<1> {
  static constexpr int kThreads = 512, kBlocks = 3;
};
template <>
struct Division<2> {
  static constexpr int kThreads = 320, kBlocks = 4;
};
template <>
struct Division<4> {
  static constexpr int kThreads = 512, kBlocks = 1;
};

// The entries of the row, as the weight gradient wants them.
__device__ __forceinline__ void Keep(const SampledHiddenParams& p, int64_t row, const SampledRow& sampled) {
  if (p.kept.keys == nullptr || p.accumulate[row] == 0) return;
  for (int i = static_cast<int>(threadIdx.x); i < sampled.count; i += static_cast<int>(blockDim.x)) {
    const int at = sampled.begin + i;
    const SampleEntry entry = p.list.entries[at];
    if (p.taken != nullptr) atomicAdd(p.taken + entry.column, kTakenOnce);
    p.kept.keys[at] = (static_cast<uint64_t>(entry.column) << p.kept.row_bits) |
                      static_cast<uint64_t>(p.kept.first_row + row);
    p.kept.coefs[at] = entry.value;
  }
}

// Entries [0, count) of those in shared memory.
template <typename T, int kVectors>
__device__ __forceinline__ void AddEntries(const SampledHiddenParams& p, const SampleEntry* entries,
                                           int count, int vectors, Accumulator<T, kVectors>& gradient) {
  constexpr int kBatch = kBatchVectors / kVectors;
  const T* weight = static_cast<const T*>(p.weight);
  int first = 0;
  for (; first + kBatch <= count; first += kBatch) {
    Columns<T, kVectors> w[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      w[b].Load(weight + static_cast<int64_t>(entries[first + b].column) * p.ld, vectors);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) gradient.Add(entries[first + b].value, w[b]);
  }
  for (; first < count; ++first) {
    Columns<T, kVectors> w;
    w.Load(weight + static_cast<int64_t>(entries[first].column) * p.ld, vectors);
    gradient.Add(entries[first].value, w);
  }
}

template <typename T, int kVectors>
__device__ __forceinline__ void LoadDense(const SampledHiddenParams& p, int64_t row, int vectors,
                                          Accumulator<T, kVectors>& gradient) {
  constexpr int kSize = Vec<T>::kSize;
  const float factor = p.dense_factors != nullptr ? p.dense_factors[row] : 1.0f;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int v = static_cast<int>(threadIdx.x + k * blockDim.x);
    if (v >= vectors) continue;
#pragma unroll
    for (int i = 0; i < kSize; i += 4) {
      const float4 x = __ldcs(reinterpret_cast<const float4*>(p.dense + row * p.ld + v * kSize + i));
      gradient.sums[k][i] = factor * x.x;
      gradient.sums[k][i + 1] = factor * x.y;
      gradient.sums[k][i + 2] = factor * x.z;
      gradient.sums[k][i + 3] = factor * x.w;
    }
  }
}

template <typename T, int kVectors>
__device__ __forceinline__ void SubtractUniform(const SampledHiddenParams& p, int64_t row, int vectors,
                                                Accumulator<T, kVectors>& gradient) {
  const float uniform =
      p.in.coef_loss[row] * p.terms.smoothing / static_cast<float>(p.terms.vocab + p.terms.elsewhere);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int v = static_cast<int>(threadIdx.x + k * blockDim.x);
    if (v >= vectors) continue;
#pragma unroll
    for (int i = 0; i < Vec<T>::kSize; ++i) {
      gradient.sums[k][i] -= uniform * __ldg(p.weight_sum + v * Vec<T>::kSize + i);
    }
  }
}

template <typename T, int kVectors>
__global__ __launch_bounds__(
    Division<kVectors>::kThreads,
    Division<kVectors>::kBlocks) void SampledHiddenKernel(const __grid_constant__ SampledHiddenParams p) {
  __shared__ SampleEntry entries[kShared];
  const int64_t row = blockIdx.x;
  const int vectors = static_cast<int>(p.ld / Vec<T>::kSize);
  const SampledRow sampled = p.list.rows[row];
  Keep(p, row, sampled);
  if (p.hidden_gradient == nullptr) return;
  Accumulator<T, kVectors> gradient;
  if (p.dense != nullptr) LoadDense(p, row, vectors, gradient);
  for (int first = 0; first < sampled.count; first += kShared) {
    const int count = min(kShared, sampled.count - first);
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
      entries[i] = p.list.entries[sampled.begin + first + i];
    }
    __syncthreads();
    AddEntries(p, entries, count, vectors, gradient);
  }
  if (p.weight_sum != nullptr && sampled.begin >= 0) SubtractUniform(p, row, vectors, gradient);
  StoreRow(gradient, p.gradient_scale, p.hidden_gradient, p.gradient_dtype, row, p.ld);
}

}  // namespace

cudaError_t LaunchSampledHidden(const SampledHiddenParams& params, cudaStream_t stream) {
  if (params.in.rows == 0) return cudaSuccess;
  const auto launch = [&](auto element, auto vectors, unsigned threads) {
    SampledHiddenKernel<typename decltype(element)::Type, decltype(vectors)::value>
        <<<static_cast<unsigned>(params.in.rows), threads, 0, stream>>>(params);
    return cudaGetLastError();
  };
  return WithDivision<Division>(params.ld, params.dtype, launch);
}

}  // namespace lossd::kernels::cuda
