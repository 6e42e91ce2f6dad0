// SPDX-License-Identifier: Apache-2.0
// The level at which the list of a chunk fits, and the decision whether it becomes the gradient.
//
// Bytes: V (2 or 4) a row, read only if level 0 does not fit.
#include "kernels/cuda/kernels/element_type.cuh"
#include "kernels/cuda/kernels/sampled/sampled_row.cuh"

namespace lossd::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kDecideThreads = 1024;
// Levels whose entries are counted, one after the other; of those beyond, the row's sum says enough.
constexpr int kCounted = 3;

// Nothing if all rows fit at level 0. Counts what they need at the next levels.
template <typename T>
__global__ __launch_bounds__(kThreads) void CountLevelsKernel(const __grid_constant__ SampleRowsParams p,
                                                              int groups) {
  __shared__ float scratch[33];
  SampleCounters& counters = *p.list.counters;
  if (counters.level == 0) return;
  const int64_t row = blockIdx.x;
  if (p.with_gradient[row] == 0) return;
  const T* elements = static_cast<const T*>(p.elements.data) + row * p.elements.ld;
  const RowScale s = ScaleOf(p, row, BaseOf(p.threshold));
  float widths[kCounted] = {};  // at levels 1, 2, ..., in units of the base
  float sum = 0.0f;
  for (int g = static_cast<int>(threadIdx.x); g < groups; g += kThreads) {
    GroupOf<T> group;
    group.Load(elements, PaddedClasses(p), g);
    const uint32_t hot = p.hot.classes.bits != nullptr ? __ldg(p.hot.classes.bits + g) : 0;
    group.ForEach([&](int i, float x) {
      const float w = (hot >> i & 1) != 0 ? 0.0f : fabsf(x) * s.width;
      sum += w;
#pragma unroll
      for (int k = 0; k < kCounted; ++k) widths[k] += fminf(w, static_cast<float>(2 << k));
    });
  }
  for (int level = 1; level < kSampleLevels; ++level) {
    float width = sum;
#pragma unroll
    for (int k = 0; k < kCounted; ++k) {
      if (level == k + 1) width = widths[k];
    }
    if (level <= kCounted + 1) {
      __syncthreads();
      width = BlockSum(width, scratch);
      if (level == kCounted + 1) sum = width;
    }
    const int most = MostEntries(p, ldexpf(width, -level));
    if (threadIdx.x != 0) continue;
    atomicAdd(counters.totals + level, static_cast<unsigned long long>(most));
    atomicMax(counters.most + level, most);
  }
}

// One warp. known: levels whose counts are known.
__global__ void ChooseLevelKernel(SampleList list, int known) {
  const int lane = static_cast<int>(threadIdx.x);
  SampleCounters& counters = *list.counters;
  if (known > 1 && counters.level == 0) return;
  const bool fits = lane < known && counters.totals[lane] <= static_cast<unsigned long long>(list.capacity) &&
                    counters.most[lane] <= kMaxRowSamples;
  const unsigned levels = __ballot_sync(0xffffffffu, fits);
  if (lane != 0) return;
  counters.level = levels != 0 ? __ffs(static_cast<int>(levels)) - 1 : kSampleLevels - 1;
  if (counters.level > 0) counters.used = 0;
  if (known > 1 || counters.level == 0) counters.highest = max(counters.highest, counters.level);
}
static_assert(kSampleLevels == 32, "a warp has one lane for each");

// One thread.
__global__ void RaiseLevelKernel(SampleCounters* counters, const int32_t* levels, int parts) {
  int32_t largest = 0;
  for (int part = 0; part < parts; ++part) largest = max(largest, levels[part]);
  if (largest > counters->level) counters->used = 0;  // all rows are selected again
  counters->level = largest;
  counters->highest = max(counters->highest, largest);
}

// ---- decision ----

// One block.
__global__ void DecideSampledKernel(const __grid_constant__ DecideSampledParams p) {
  __shared__ float scratch[33];
  float variance = 0.0f, square = 0.0f;
  for (int64_t r = threadIdx.x; r < p.rows; r += kDecideThreads) {
    variance += p.list.variance[r];
    square += p.list.square[r];
  }
  variance = BlockSum(variance, scratch);
  __syncthreads();
  square = BlockSum(square, scratch);
  if (threadIdx.x != 0) return;
  const bool too_much = variance > p.max_error * p.max_error * square;
  *p.decision = too_much ? Decision::kTooMuchError : Decision::kAsPlanned;
  *p.chosen_threshold = ThresholdAt(p.threshold, p.list.counters->highest);
}

// One block.
__global__ void DecideListedKernel(const __grid_constant__ DecideListedParams p) {
  bool fits = true;
  for (int part = 0; part < p.parts; ++part) fits = fits && p.levels[part] == 0;
  if (threadIdx.x == 0) *p.decision = fits ? Decision::kAsPlanned : Decision::kTooManyCandidates;
  if (fits) return;
  for (int64_t r = threadIdx.x; r < p.rows; r += kDecideThreads) p.dropped_mass[r] = 0.0f;
}

template <typename T>
cudaError_t Launch(const SampleRowsParams& p, cudaStream_t stream) {
  ChooseLevelKernel<<<1, kSampleLevels, 0, stream>>>(p.list, 1);
  CountLevelsKernel<T><<<static_cast<unsigned>(p.in.rows), kThreads, 0, stream>>>(p, GroupsOf(p));
  ChooseLevelKernel<<<1, kSampleLevels, 0, stream>>>(p.list, kSampleLevels);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchChooseLevel(const SampleRowsParams& params, cudaStream_t stream) {
  return WithElement(params.elements.dtype,
                     [&](auto element) { return Launch<typename decltype(element)::Type>(params, stream); });
}

cudaError_t LaunchRaiseLevel(SampleCounters* counters, const int32_t* levels, int parts,
                             cudaStream_t stream) {
  RaiseLevelKernel<<<1, 1, 0, stream>>>(counters, levels, parts);
  return cudaGetLastError();
}

cudaError_t LaunchDecideListed(const DecideListedParams& params, cudaStream_t stream) {
  DecideListedKernel<<<1, kDecideThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t LaunchDecideSampled(const DecideSampledParams& params, cudaStream_t stream) {
  DecideSampledKernel<<<1, kDecideThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace lossd::kernels::cuda
