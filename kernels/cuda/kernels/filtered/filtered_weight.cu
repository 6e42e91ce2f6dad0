// SPDX-License-Identifier: Apache-2.0
// The weight gradient of filtered gradients (filtered.h): dW[v] += the sum of coef * x_row over the entries
// of class v. The file also has the steps before it: the decision whether the chunk is filtered (one thread),
// and the sort of the entries.
//
// Plan: entries are sorted by class and row (CUB's radix sort), so the entries of a class follow each other;
// they are a run. A warp works on one tile of columns of a class (Tile<T>::kColumns): it adds the run's
// entries in order, and reads and writes dW once. A run of at least kLongRun entries gets a block of warps,
// which share the entries and add their sums in a fixed order. Work goes tile by tile over all classes, so
// the columns of x that are in use at a time stay in L2.
//
// Bytes: entries * D * 2 of x from L2; 8 D of dW for each class that has entries. FLOP: 2 D an entry.
#include <algorithm>
#include <cub/device/device_radix_sort.cuh>

#include "kernels/cuda/device/kernel_code.h"
#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/filtered/filtered.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kLongRun = 64;
constexpr int kBlocksPerMultiprocessor = 5;
constexpr int kAtOnce = 4;                      // entries whose rows of x are loaded together
constexpr unsigned long long kItemsAtOnce = 4;  // short runs that a warp takes at once
constexpr uint64_t kNoEntry = ~uint64_t{0};

// ---- decision ----

// Launched with one thread.
__global__ void DecideKernel(const __grid_constant__ DecideParams p) {
  const bool overflow = *p.selection.used > p.selection.capacity;
  *p.decision = overflow ? Decision::kTooManyCandidates : Decision::kAsPlanned;
}

// ---- runs ----

// Finds the runs among the sorted entries. Each thread looks at one entry. runs[0 ... short_runs): where
// short runs begin. runs[count ... count + long_runs): where long runs begin. The runs are in any order; each
// is added up by itself.
__global__ void FindRunsKernel(const __grid_constant__ FilteredWeightParams p) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const uint64_t key = i < p.count ? p.keys[i] : kNoEntry;
  const auto class_of = [&p](uint64_t k) { return k >> p.row_bits; };
  const bool begins = key != kNoEntry && (i == 0 || class_of(p.keys[i - 1]) != class_of(key));
  const int64_t last = i + kLongRun - 1;
  const bool is_long =
      begins && last < p.count && p.keys[last] != kNoEntry && class_of(p.keys[last]) == class_of(key);
  const unsigned lane = threadIdx.x & 31;
  for (int kind = 0; kind < 2; ++kind) {
    const bool mine = begins && is_long == (kind == 1);
    const unsigned mask = __ballot_sync(0xffffffffu, mine);
    if (mask == 0) continue;
    int at = 0;
    if (lane == 0) at = atomicAdd(kind == 0 ? &p.counters->short_runs : &p.counters->long_runs, __popc(mask));
    at = __shfl_sync(0xffffffffu, at, 0) + __popc(mask & ((1u << lane) - 1));
    if (mine) p.runs[kind * p.count + at] = static_cast<int32_t>(i);
  }
}

// ---- sums ----

// The columns of dW that a warp works on at a time: one 16-byte vector of x for each lane.
template <typename T>
struct Tile {
  static constexpr int kSize = Vec<T>::kSize;
  static constexpr int kColumns = 32 * kSize;
};

// Adds the entries of [begin, begin + 32) that belong to the run of class `column` to `sums`, which has this
// lane's columns from `first` on. Each lane also adds its entry's factor to `bias`. Returns true if all 32
// entries belong to the run, which may then have more.
template <typename T>
__device__ __forceinline__ bool AddEntries(const FilteredWeightParams& p, int64_t begin, int64_t column,
                                           int64_t first, float (&sums)[Vec<T>::kSize], float& bias) {
  const int lane = threadIdx.x & 31;
  const int64_t i = begin + lane;
  const uint64_t key = i < p.count ? p.keys[i] : kNoEntry;
  const bool same = key != kNoEntry && static_cast<int64_t>(key >> p.row_bits) == column;
  const int entries = __popc(__ballot_sync(0xffffffffu, same));  // a run has no gaps
  const int row = same ? static_cast<int>(key & ((uint64_t{1} << p.row_bits) - 1)) : 0;
  const float coef = same && p.keep[row] != 0 ? p.coefs[i] : 0.0f;
  bias += coef;
  const bool inside = first < p.ld;
  for (int e = 0; e < entries; e += kAtOnce) {
    uint4 raw[kAtOnce];
    float factors[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int64_t from = __shfl_sync(0xffffffffu, row, min(e + j, 31));
      factors[j] = __shfl_sync(0xffffffffu, coef, min(e + j, 31));
      const auto* x = reinterpret_cast<const uint4*>(static_cast<const T*>(p.hidden) + from * p.ld + first);
      raw[j] = inside && e + j < entries ? __ldg(x) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      float x[Vec<T>::kSize];
      Vec<T>::Unpack(raw[j], x);
#pragma unroll
      for (int k = 0; k < Vec<T>::kSize; ++k) sums[k] = fmaf(factors[j], x[k], sums[k]);
    }
  }
  return entries == 32;
}

template <int kSize>
__device__ __forceinline__ void LoadFloats(const float* from, float (&to)[kSize]) {
#pragma unroll
  for (int k = 0; k < kSize; k += 4) {
    const float4 v = *reinterpret_cast<const float4*>(from + k);
    to[k] = v.x;
    to[k + 1] = v.y;
    to[k + 2] = v.z;
    to[k + 3] = v.w;
  }
}

// Writes to = old + scale * sums.
template <int kSize>
__device__ __forceinline__ void StoreSum(float* to, const float (&old)[kSize], float scale,
                                         const float (&sums)[kSize]) {
#pragma unroll
  for (int k = 0; k < kSize; k += 4) {
    *reinterpret_cast<float4*>(to + k) =
        make_float4(fmaf(scale, sums[k], old[k]), fmaf(scale, sums[k + 1], old[k + 1]),
                    fmaf(scale, sums[k + 2], old[k + 2]), fmaf(scale, sums[k + 3], old[k + 3]));
  }
}

__device__ __forceinline__ float SumLanes(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// One warp for each pair of run and tile.
template <typename T>
__device__ __forceinline__ void AddShortRun(const FilteredWeightParams& p, int64_t begin, int64_t tile) {
  constexpr int kSize = Tile<T>::kSize;
  const int lane = threadIdx.x & 31;
  const auto column = static_cast<int64_t>(p.keys[begin] >> p.row_bits);
  const int64_t first = tile * Tile<T>::kColumns + lane * kSize;
  float* to = p.weight_gradient + column * p.ld + first;
  float old[kSize] = {};
  // The old value is loaded early, so that it has arrived when the sum is complete.
  if (first < p.ld) LoadFloats(to, old);
  float sums[kSize] = {};
  float bias = 0.0f;
  while (AddEntries<T>(p, begin, column, first, sums, bias)) begin += 32;
  if (first < p.ld) StoreSum(to, old, p.scale, sums);
  if (tile > 0 || p.bias_gradient == nullptr) return;
  bias = SumLanes(bias);
  if (lane == 0) p.bias_gradient[column] += p.scale * bias;
}

// One block for each pair of run and tile. Warp w takes the entries [32 w, 32 w + 32), and then the entries
// 32 * kWarps further on.
template <typename T>
__device__ __forceinline__ void AddLongRun(const FilteredWeightParams& p, int64_t begin, int64_t tile,
                                           float (*partials)[Tile<T>::kColumns], float* biases) {
  constexpr int kSize = Tile<T>::kSize;
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const auto column = static_cast<int64_t>(p.keys[begin] >> p.row_bits);
  const int64_t first = tile * Tile<T>::kColumns + lane * kSize;
  float sums[kSize] = {};
  float bias = 0.0f;
  begin += 32 * warp;
  while (AddEntries<T>(p, begin, column, first, sums, bias)) begin += 32 * kWarps;
  bias = SumLanes(bias);
  __syncthreads();  // the earlier partial sums have been read
  if (lane == 0) biases[warp] = bias;
#pragma unroll
  for (int k = 0; k < kSize; ++k) partials[warp][lane * kSize + k] = sums[k];
  __syncthreads();
  for (int c = threadIdx.x; c < Tile<T>::kColumns; c += kThreads) {
    const int64_t at = tile * Tile<T>::kColumns + c;
    if (at >= p.ld) continue;
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += partials[w][c];
    p.weight_gradient[column * p.ld + at] += p.scale * sum;
  }
  if (threadIdx.x == 0 && tile == 0 && p.bias_gradient != nullptr) {
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += biases[w];
    p.bias_gradient[column] += p.scale * sum;
  }
}

// Processes long runs first. Then each warp takes the next short runs as soon as it is free, so that no warp
// waits for the longest run.
template <typename T>
__global__ __launch_bounds__(kThreads, kBlocksPerMultiprocessor) void AddRunsKernel(
    const __grid_constant__ FilteredWeightParams p) {
  __shared__ float partials[kWarps][Tile<T>::kColumns];
  __shared__ float biases[kWarps];
  const int64_t tiles = (p.ld + Tile<T>::kColumns - 1) / Tile<T>::kColumns;
  const int64_t long_runs = p.counters->long_runs;
  for (int64_t item = blockIdx.x; item < long_runs * tiles; item += gridDim.x) {
    const int64_t tile = item / long_runs;
    AddLongRun<T>(p, p.runs[p.count + item - tile * long_runs], tile, partials, biases);
  }
  const int64_t short_runs = p.counters->short_runs;
  const int64_t items = short_runs * tiles;
  while (true) {
    unsigned long long item = 0;
    if ((threadIdx.x & 31) == 0) item = atomicAdd(&p.counters->next_item, kItemsAtOnce);
    item = __shfl_sync(0xffffffffu, item, 0);
    if (static_cast<int64_t>(item) >= items) return;
    const int64_t end = min(static_cast<int64_t>(item + kItemsAtOnce), items);
    for (auto i = static_cast<int64_t>(item); i < end; ++i) {
      const int64_t tile = i / short_runs;
      AddShortRun<T>(p, p.runs[i - tile * short_runs], tile);
    }
  }
}

// ---- label smoothing ----

// A block adds to the rows of some classes.
__global__ void UniformWeightKernel(const __grid_constant__ UniformWeightParams p) {
  for (int64_t v = blockIdx.x; v < p.vocab; v += gridDim.x) {
    const float factor = p.scale * (p.class_weights != nullptr ? __ldg(p.class_weights + v) : 1.0f);
    for (int64_t c = threadIdx.x * 4; c < p.ld; c += kThreads * 4) {
      float sums[4], old[4];
      float* to = p.weight_gradient + v * p.ld + c;
      LoadFloats(p.hidden_sum + c, sums);
      LoadFloats(to, old);
      StoreSum(to, old, factor, sums);
    }
  }
}

// Launched with one block, which sums the coefficients and then adds the sum to every class.
__global__ void UniformBiasKernel(const __grid_constant__ UniformWeightParams p) {
  __shared__ float scratch[33];
  float sum = 0.0f;
  for (int64_t r = threadIdx.x; r < p.rows; r += blockDim.x) sum += p.keep[r] != 0 ? p.coefs[r] : 0.0f;
  sum = BlockSum(sum, scratch);
  for (int64_t v = threadIdx.x; v < p.vocab; v += blockDim.x) {
    p.bias_gradient[v] += p.scale * (p.class_weights != nullptr ? __ldg(p.class_weights + v) : 1.0f) * sum;
  }
}

template <typename T>
cudaError_t LaunchRuns(const FilteredWeightParams& p, int multiprocessors, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(multiprocessors * kBlocksPerMultiprocessor);
  AddRunsKernel<T><<<blocks, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchDecide(const DecideParams& params, cudaStream_t stream) {
  DecideKernel<<<1, 1, 0, stream>>>(params);
  return cudaGetLastError();
}

// Sorts the kept elements into the order in which the weight gradient adds them: by class, then by row. Keys
// are unique, so the result does not depend on the order in which the elements were listed.
cudaError_t LaunchSortKept(SortParams& p, cudaStream_t stream) {
  cub::DoubleBuffer<uint64_t> keys(p.keys[0], p.keys[1]);
  cub::DoubleBuffer<float> coefs(p.coefs[0], p.coefs[1]);
  size_t bytes = 0;
  cudaError_t error =
      cub::DeviceRadixSort::SortPairs(nullptr, bytes, keys, coefs, p.count, 0, p.key_bits, stream);
  if (error != cudaSuccess) return error;
  if (bytes > SortScratchBytes(p.count)) return cudaErrorMemoryAllocation;
  error = cub::DeviceRadixSort::SortPairs(p.scratch, bytes, keys, coefs, p.count, 0, p.key_bits, stream);
  p.keys[0] = keys.Current();
  p.keys[1] = keys.Alternate();
  p.coefs[0] = coefs.Current();
  p.coefs[1] = coefs.Alternate();
  return error;
}

cudaError_t LaunchFilteredWeight(const FilteredWeightParams& params, int multiprocessors,
                                 cudaStream_t stream) {
  if (params.count == 0) return cudaSuccess;
  FindRunsKernel<<<static_cast<unsigned>((params.count + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      params);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  return WithElement(params.dtype, [&](auto element) {
    return LaunchRuns<typename decltype(element)::Type>(params, multiprocessors, stream);
  });
}

cudaError_t LaunchUniformWeight(const UniformWeightParams& params, cudaStream_t stream) {
  if (params.vocab == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(params.vocab, 1 << 16));
  UniformWeightKernel<<<blocks, kThreads, 0, stream>>>(params);
  if (params.bias_gradient != nullptr) UniformBiasKernel<<<1, 1024, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace lossd::kernels::cuda

LOSSD_KERNEL_FILE(FilteredWeight)
