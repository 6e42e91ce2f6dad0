// SPDX-License-Identifier: Apache-2.0
// From a matrix of ds to the list of sampled gradients, one block a row, by the rule of docs/math.md. In
// units of the threshold a class is as wide as w = min(|element| * relative / tau, 1), relative = |factor| /
// kappa; those on which a point omega, omega + 1, ... falls are taken, and the target.
//
// 1. The row is divided into groups of 32 classes. A thread gets a group and leaves the sum of its widths in
//    shared memory: three instructions an element.
// 2. A scan over the groups says where each begins.
// 3. Only groups on which a point falls are read again, a thread each, and gone through class by class.
//
// The sum of a row's widths is the number of its entries but for one, so whether the list has room for all
// rows does not depend on chance. If it has not, another pass counts what the next levels (tau 2^level, or
// 2^(level - 24) if that is more) need, and the selection is repeated at the first level that fits.
//
// Bytes: V (2 or 4) a row, read once; three times if the level is not 0. Order: all sums fixed; entries of a
// row are in the order of classes.
#include <algorithm>

#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/element_type.cuh"
#include "kernels/cuda/kernels/sampled/sampled.h"
#include "kernels/cuda/kernels/sampled/sampled_row.cuh"
#include "kernels/decision.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kResident = 5;  // blocks of a multiprocessor

// ---- shared memory ----

// Groups of a thread lie side by side in the scan and apart in memory.
__device__ __forceinline__ int At(int group) { return group + group / 32; }

// Where each group begins, in widths, and the groups that are gone through.
struct RowMemory {
  float* begins;     // At(groups) + 1
  uint16_t* picked;  // [kMaxRowSamples]

  __device__ __forceinline__ RowMemory(int32_t* memory, int groups)
      : begins(reinterpret_cast<float*>(memory)),
        picked(reinterpret_cast<uint16_t*>(memory + At(groups) + 1)) {}
  static size_t Bytes(int groups) {
    return static_cast<size_t>(groups + groups / 32 + 1) * sizeof(float) + kMaxRowSamples * sizeof(uint16_t);
  }
};

struct Shared {
  float floats[kWarps + 1];
  int ints[kWarps + 1];
  float scratch[33];
  int begin;
};

// The sum of what the threads before this one have; total: of all. The same bits always.
template <typename Number>
__device__ __forceinline__ Number ScanBlock(Number own, Number* words, Number& total) {
  const int lane = static_cast<int>(threadIdx.x & 31), warp = static_cast<int>(threadIdx.x >> 5);
  Number upto = own;
#pragma unroll
  for (int offset = 1; offset < 32; offset <<= 1) {
    const Number before = __shfl_up_sync(0xffffffffu, upto, offset);
    if (lane >= offset) upto += before;
  }
  __syncthreads();
  if (lane == 31) words[warp] = upto;
  __syncthreads();
  Number first = 0;
  total = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) first = total;
    total += words[w];
  }
  return first + (upto - own);
}

// ---- hot classes ----

static_assert(kGroup == kHotGroup, "a word of bits is a group");

// Takes the hot classes of a group out of its width, into the dense part; adds their squares to `square`.
template <typename T>
__device__ __forceinline__ float TakeHot(const HotPart& hot, const T* row, int64_t index, const RowScale& s,
                                         int g, float width, float& square) {
  uint32_t bits = __ldg(hot.classes.bits + g);
  T* to = static_cast<T*>(hot.elements) + index * kHotClasses;
  for (int slot = bits != 0 ? __ldg(hot.classes.bases + g) : 0; bits != 0; bits &= bits - 1, ++slot) {
    const int column = g * kGroup + __ffs(static_cast<int>(bits)) - 1;
    const T element = row[column];
    to[slot] = element;
    if (column == s.target) continue;  // it had no width
    const float a = fabsf(static_cast<float>(element)) * s.relative;
    width -= fminf(a / s.threshold, 1.0f);
    square += a * a;
  }
  return fmaxf(width, 0.0f);
}

// What of a row's dense part belongs to no class.
template <typename T>
__device__ __forceinline__ void ClearHot(const HotPart& hot, int64_t index, int from) {
  T* to = static_cast<T*>(hot.elements) + index * kHotClasses;
  for (int slot = from + static_cast<int>(threadIdx.x); slot < kHotClasses; slot += kThreads) {
    to[slot] = static_cast<T>(0.0f);
  }
}

// ---- selection ----

template <typename T>
__device__ __forceinline__ float WidthOf(const GroupOf<T>& group, const RowScale& s, int masked) {
  float sum[2] = {0.0f, 0.0f};
  const float widest = 1.0f / s.width;
  group.ForEach([&](int i, float x) {
    if (masked < 0 || i != masked) sum[i & 1] += fminf(fabsf(x), widest);
  });
  return (sum[0] + sum[1]) * s.width;
}

// The widths of the groups, without target and hot classes. square: of what the thread has of hot classes.
template <typename T>
__device__ __forceinline__ void MeasureGroups(const SampleRowsParams& p, const T* row, int64_t index,
                                              const RowScale& s, int groups, const RowMemory& memory,
                                              float& square) {
  const bool has_hot = p.hot.classes.bits != nullptr;
  for (int g = static_cast<int>(threadIdx.x); g < groups; g += kThreads) {
    GroupOf<T> group;
    group.Load(row, PaddedClasses(p), g);
    float width = 0.0f;
    if (s.width > 0.0f) {
      width = g == s.target_group ? WidthOf(group, s, s.target % kGroup) : WidthOf(group, s, -1);
    }
    if (has_hot) width = TakeHot(p.hot, row, index, s, g, width, square);
    memory.begins[At(g)] = width;
  }
  __syncthreads();
}

// Where the groups begin; returns the row's width.
__device__ __forceinline__ float PlaceGroups(int groups, const RowMemory& memory, Shared& shared) {
  const int each = (groups + kThreads - 1) / kThreads;
  const int first = min(static_cast<int>(threadIdx.x) * each, groups), last = min(first + each, groups);
  float own = 0.0f;
  for (int g = first; g < last; ++g) own += memory.begins[At(g)];
  float total;
  float begin = ScanBlock(own, shared.floats, total);
  for (int g = first; g < last; ++g) {
    const float width = memory.begins[At(g)];
    memory.begins[At(g)] = begin;
    begin += width;
  }
  if (threadIdx.x == 0) memory.begins[At(groups)] = total;
  __syncthreads();
  return total;
}

// Whether a point falls on the group, or may. What is as wide as a point's distance always has one.
__device__ __forceinline__ bool IsPicked(const RowMemory& memory, int g, const RowScale& s, float omega) {
  const float begin = memory.begins[At(g)], end = memory.begins[At(g + 1)];
  return floorf(end - omega) > floorf(begin - omega) || end - begin > 0.99f ||
         g == s.target_group;  // the target is taken anyway
}

// The groups that are gone through, in order; returns how many.
__device__ __forceinline__ int PickGroups(const RowScale& s, float omega, int groups, const RowMemory& memory,
                                          Shared& shared) {
  const int each = (groups + kThreads - 1) / kThreads;
  const int first = min(static_cast<int>(threadIdx.x) * each, groups), last = min(first + each, groups);
  int own = 0;
  for (int g = first; g < last; ++g) own += IsPicked(memory, g, s, omega) ? 1 : 0;
  int total;
  int at = ScanBlock(own, shared.ints, total);
  for (int g = first; g < last; ++g) {
    if (!IsPicked(memory, g, s, omega)) continue;
    if (at < kMaxRowSamples) memory.picked[at] = static_cast<uint16_t>(g);
    ++at;
  }
  __syncthreads();
  return min(total, kMaxRowSamples);
}

// The classes of a group that are taken, a bit each.
template <typename T>
__device__ __forceinline__ uint32_t TakenOf(const SampleRowsParams& p, const GroupOf<T>& group,
                                            const RowScale& s, float omega, float begin, int g) {
  const int target = g == s.target_group ? s.target % kGroup : -1;
  const uint32_t hot = p.hot.classes.bits != nullptr ? __ldg(p.hot.classes.bits + g) : 0;
  const int classes = static_cast<int>(p.elements.classes) - g * kGroup;
  SystematicSampler<float> sampler(omega, begin);
  uint32_t taken = 0;
  group.ForEach([&](int i, float x) {
    if ((hot >> i & 1) != 0) return;
    if (i == target || (i < classes && sampler.Take(fabsf(x) * s.width))) taken |= 1u << i;
  });
  return taken;
}

// What an element counts, over the gradient unit.
__device__ __forceinline__ float ValueOf(const RowScale& s, bool target, float element) {
  const float value = element * s.factor;
  const float size = fabsf(element) * s.relative;
  return target || size >= s.threshold ? value : copysignf(s.threshold * s.kappa, value);
}

// What a thread adds to the estimates of variance and square, over kappa squared.
struct ErrorSums {
  float variance = 0.0f, square = 0.0f;

  __device__ __forceinline__ void Add(float a, float threshold) {
    if (a < threshold) variance += threshold * (threshold - a);
    square += a * fmaxf(a, threshold);
  }
};

// Goes through the picked groups, a thread each, and writes their entries from `begin` on; returns how many.
template <typename T>
__device__ __forceinline__ int WriteEntries(const SampleRowsParams& p, const T* row, const RowScale& s,
                                            float omega, int picked, int begin, const RowMemory& memory,
                                            Shared& shared, ErrorSums& sums) {
  const SampleList& to = p.list;
  int written = 0;
  for (int round = 0; round < picked; round += kThreads) {
    const int i = round + static_cast<int>(threadIdx.x);
    const int g = i < picked ? memory.picked[i] : 0;
    uint32_t taken = 0;
    if (i < picked) {
      GroupOf<T> group;
      group.Load(row, PaddedClasses(p), g);
      taken = TakenOf(p, group, s, omega, memory.begins[At(g)], g);
    }
    int total;
    int at = begin + written + ScanBlock(__popc(taken), shared.ints, total);
    written += total;
    for (; taken != 0; taken &= taken - 1, ++at) {
      const int column = g * kGroup + __ffs(static_cast<int>(taken)) - 1;
      const float element = static_cast<float>(row[column]);
      const bool is_target = column == s.target;
      if (at < to.capacity) to.entries[to.first + at] = {column, ValueOf(s, is_target, element)};
      if (!is_target) sums.Add(fabsf(element) * s.relative, s.threshold);
    }
  }
  return written;
}

__device__ __forceinline__ void WriteErrors(const SampleList& to, int64_t row, const RowScale& s,
                                            float target, const ErrorSums& sums, float* scratch) {
  const float variance = BlockSum(sums.variance, scratch);
  __syncthreads();
  const float square = BlockSum(sums.square, scratch);
  if (threadIdx.x != 0) return;
  const float value = target * s.factor;
  const float kappa_square = s.kappa * s.kappa;
  to.variance[row] = variance > 0.0f ? variance * kappa_square : 0.0f;
  to.square[row] = (square > 0.0f ? square * kappa_square : 0.0f) + value * value;
}

template <typename T>
__global__ __launch_bounds__(kThreads,
                             kResident) void SampleRowsKernel(const __grid_constant__ SampleRowsParams p,
                                                              int groups, bool again) {
  extern __shared__ int32_t shared_memory[];
  __shared__ Shared shared;
  const SampleList& to = p.list;
  const int level = again ? to.counters->level : 0;
  if (again && level == 0) return;
  const int64_t row = blockIdx.x;
  const bool has_hot = p.hot.classes.bits != nullptr;
  if (p.with_gradient[row] == 0) {
    if (threadIdx.x == 0) {
      to.rows[row] = {-1, 0};
      to.variance[row] = to.square[row] = 0.0f;
      if (has_hot) p.hot.widths[row] = 0.0f;
    }
    if (has_hot) ClearHot<T>(p.hot, row, 0);
    return;
  }
  const RowMemory memory(shared_memory, groups);
  const T* elements = static_cast<const T*>(p.elements.data) + row * p.elements.ld;
  const RowScale s = ScaleOf(p, row, ThresholdAt(p.threshold, level));
  const float omega = p.omega[row];
  float hot_square = 0.0f;
  MeasureGroups(p, elements, row, s, groups, memory, hot_square);
  if (has_hot) {
    ClearHot<T>(p.hot, row, *p.hot.classes.count);
    if (threadIdx.x == 0) p.hot.widths[row] = s.width;
  }
  const float width = PlaceGroups(groups, memory, shared);
  const int most = MostEntries(p, width);
  if (!again && threadIdx.x == 0) {
    atomicAdd(to.counters->totals, static_cast<unsigned long long>(most));
    atomicMax(to.counters->most, most);
  }
  if (most > kMaxRowSamples) {  // the chunk takes another level
    if (threadIdx.x == 0) to.rows[row] = {0, 0};
    return;
  }
  if (threadIdx.x == 0) shared.begin = atomicAdd(&to.counters->used, most);
  const int picked = PickGroups(s, omega, groups, memory, shared);
  ErrorSums sums;
  sums.square = hot_square;
  const int begin = shared.begin;
  const int count = WriteEntries(p, elements, s, omega, picked, begin, memory, shared, sums);
  if (threadIdx.x == 0) to.rows[row] = {to.first + begin, count};
  const float target = s.target < 0 ? 0.0f : static_cast<float>(elements[s.target]);
  WriteErrors(to, row, s, target, sums, shared.scratch);
}

// again: at the level that the first selection has led to; nothing if that is 0.
template <typename T>
cudaError_t Launch(const SampleRowsParams& p, bool again, cudaStream_t stream) {
  auto* kernel = SampleRowsKernel<T>;
  const int groups = GroupsOf(p);
  const size_t shared = RowMemory::Bytes(groups);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(p.in.rows), kThreads, shared, stream>>>(p, groups, again);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchSelectSamples(const SampleRowsParams& params, bool again, cudaStream_t stream) {
  if (params.in.rows == 0) return cudaSuccess;
  return WithElement(params.elements.dtype, [&](auto element) {
    return Launch<typename decltype(element)::Type>(params, again, stream);
  });
}

cudaError_t LaunchSampleRows(const SampleRowsParams& params, cudaStream_t stream) {
  if (params.in.rows == 0) return cudaSuccess;
  cudaError_t error = LaunchSelectSamples(params, /*again=*/false, stream);
  if (error == cudaSuccess) error = LaunchChooseLevel(params, stream);
  return error == cudaSuccess ? LaunchSelectSamples(params, /*again=*/true, stream) : error;
}

}  // namespace lossd::kernels::cuda
