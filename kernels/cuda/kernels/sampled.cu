// SPDX-License-Identifier: Apache-2.0
// The kernels of sampled gradients: the list of a chunk, the level at which it fits, dx from the list, and
// the choice of hot classes. docs/math.md has the formulas.
//
// What the kernels share (loss_rows.h):
// - The list has an entry for each class that a row has taken. A row's entries are consecutive; the rows are
//   in any order.
// - The threshold tau decides how many classes rows take. If the list of a chunk has too little room, it is
//   made again at a higher level, with a larger threshold.
// - Hot classes have no entries. Their elements are copied to a dense matrix.
#include <algorithm>

#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/device/kernel_code.h"
#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/filtered/filtered_row.cuh"
#include "kernels/cuda/kernels/row_loss_math.cuh"
#include "kernels/cuda/kernels/sampled.h"
#include "kernels/decision.h"

namespace lossd::kernels::cuda {
namespace {

// ---- a row of a matrix of ds: sizes and widths of its elements, and its groups of classes ----

constexpr int kGroup = 32;  // classes

inline int GroupsOf(const SampleRowsParams& p) {
  return static_cast<int>((p.elements.classes + kGroup - 1) / kGroup);
}

// Values of a row that all threads know. a is the size of an element, |element * factor| / kappa, and w its
// width, min(a / threshold, 1) (see "the list" below).
struct RowScale {
  float kappa;      // upper bound of the row's gradient, divided by the gradient unit
  float factor;     // factor of the elements
  float relative;   // a divided by |element|
  float threshold;  // the threshold for a
  float width;      // w divided by |element|, before w is limited to 1
  int target;       // -1: on another device
  int target_group;
};

// The thresholds of all levels except level 0 are multiples of this. It has a lower bound, so that at the
// last level few classes are taken for any tau.
__device__ __forceinline__ float BaseOf(float threshold) { return fmaxf(threshold, 0x1p-24f); }

// At level 0 the threshold has a lower bound so that widths do not overflow, even if tau is 0: elements are
// up to 2^60 times as large as sizes.
__device__ __forceinline__ float ThresholdAt(float threshold, int level) {
  return level == 0 ? fmaxf(threshold, 0x1p-60f) : ldexpf(BaseOf(threshold), level);
}

__device__ __forceinline__ RowScale ScaleOf(const SampleRowsParams& p, int64_t row, float threshold) {
  RowScale s;
  s.target = p.in.targets[row];
  s.target_group = s.target < 0 ? -1 : s.target / kGroup;
  s.kappa = p.kappas != nullptr ? p.kappas[row]
                                : GradientFactor(p.terms, p.in, row, p.lse[row], p.target_logprob[row]);
  s.factor = p.factors != nullptr ? p.factors[row] : 1.0f;
  const float relative = fabsf(s.factor) / s.kappa;
  s.relative = isfinite(relative) ? relative : 0.0f;  // kappa is 0 or not finite: only the target is taken
  s.threshold = threshold;
  s.width = s.relative / s.threshold;
  return s;
}

// The columns of the matrix that hold classes or zeros; columns beyond them may hold anything.
__device__ __forceinline__ int64_t PaddedClasses(const SampleRowsParams& p) {
  return (p.elements.classes + 7) / 8 * 8;
}

// The elements of a group of kGroup classes of a row, in registers.
template <typename T>
struct GroupOf {
  static constexpr int kVectors = kGroup / Vec<T>::kSize;

  uint4 raw[kVectors];  // 0 past the end of the row

  __device__ __forceinline__ void Load(const T* row, int64_t columns, int group) {
    const auto* vectors = reinterpret_cast<const uint4*>(row);
    const int count = static_cast<int>(columns / Vec<T>::kSize);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = group * kVectors + i;
      raw[i] = v < count ? __ldg(vectors + v) : make_uint4(0, 0, 0, 0);
    }
  }
  // Calls body(index in the group, element) for each element.
  template <typename Body>
  __device__ __forceinline__ void ForEach(Body body) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float x[Vec<T>::kSize];
      Vec<T>::Unpack(raw[i], x);
#pragma unroll
      for (int j = 0; j < Vec<T>::kSize; ++j) body(i * Vec<T>::kSize + j, x[j]);
    }
  }
};

// An upper bound of the number of entries of a row with this sum of widths: one entry for each point that
// falls on the line of widths, the target, and entries that rounding may add; at most all classes.
__device__ __forceinline__ int MostEntries(const SampleRowsParams& p, float width) {
  return min(static_cast<int>(fminf(width, 1e9f)) + kSpareEntries, static_cast<int>(p.elements.classes));
}

// ---- the list ----
//
// Turns a matrix of ds into the list of sampled gradients, by the rule of docs/math.md. Grid: one block a
// row. In units of the threshold tau a class is as wide as
//   w = min(|element| * relative / tau, 1),   relative = |factor| / kappa.
// The classes lie side by side on a line. The points omega, omega + 1, ... of this line take the classes on
// which they fall (SystematicSampler in kernels/decision.h). The target is taken, too.
//
// 1. The row is divided into groups of 32 classes. A thread takes a group and writes the sum of its widths
//    to shared memory: three instructions an element.
// 2. A scan over the groups computes where each group begins.
// 3. Only the groups on which a point falls are read again, one thread for each, class by class.
//
// The number of a row's entries differs from the sum of the row's widths by less than one. So it does not
// depend on chance whether all rows fit into the list. If they do not fit, another pass counts the entries
// that the next levels need (thresholds tau 2^level, or 2^(level - 24) if that is larger), and the selection
// is repeated at the first level that fits.
//
// Bytes: 2 V or 4 V a row, read once, or three times if the level is not 0. Order: all sums have a fixed
// order; the entries of a row are in the order of classes.

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kResident = 5;  // blocks on a multiprocessor

// ---- the list: shared memory ----

// The index in memory of a group. The groups of one thread are consecutive in the scan; in memory there are
// gaps between them.
__device__ __forceinline__ int At(int group) { return group + group / 32; }

// The place on the line of widths where each group begins, and the groups that are read again.
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

// The sum of the values of all threads before this thread. `total` becomes the sum over all threads. The
// result always has the same bits.
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

// ---- the list: hot classes of a row ----

static_assert(kGroup == kHotGroup, "a word of bits is a group");

// Copies the elements of a group's hot classes to the dense part. Returns `width`, the width of the group,
// without these classes. Adds the squares of their sizes to `square`.
template <typename T>
__device__ __forceinline__ float TakeHot(const HotPart& hot, const T* row, int64_t index, const RowScale& s,
                                         int g, float width, float& square) {
  uint32_t bits = __ldg(hot.classes.bits + g);
  T* to = static_cast<T*>(hot.elements) + index * kHotClasses;
  for (int slot = bits != 0 ? __ldg(hot.classes.bases + g) : 0; bits != 0; bits &= bits - 1, ++slot) {
    const int column = g * kGroup + __ffs(static_cast<int>(bits)) - 1;
    const T element = row[column];
    to[slot] = element;
    if (column == s.target) continue;  // its width was not counted
    const float a = fabsf(static_cast<float>(element)) * s.relative;
    width -= fminf(a / s.threshold, 1.0f);
    square += a * a;
  }
  return fmaxf(width, 0.0f);
}

// Zeroes the columns of a row's dense part that have no class.
template <typename T>
__device__ __forceinline__ void ClearHot(const HotPart& hot, int64_t index, int from) {
  T* to = static_cast<T*>(hot.elements) + index * kHotClasses;
  for (int slot = from + static_cast<int>(threadIdx.x); slot < kHotClasses; slot += kThreads) {
    to[slot] = static_cast<T>(0.0f);
  }
}

// ---- the list: selection ----

// The width of a group, without the element `masked`; -1: of all elements.
template <typename T>
__device__ __forceinline__ float WidthOf(const GroupOf<T>& group, const RowScale& s, int masked) {
  float sum[2] = {0.0f, 0.0f};
  const float widest = 1.0f / s.width;
  group.ForEach([&](int i, float x) {
    if (masked < 0 || i != masked) sum[i & 1] += fminf(fabsf(x), widest);
  });
  return (sum[0] + sum[1]) * s.width;
}

// Computes the widths of the groups, without the target and hot classes. square: the sum of squares of the
// thread's hot classes.
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
    // PlaceGroups() turns the widths into the places where the groups begin.
    memory.begins[At(g)] = width;
  }
  __syncthreads();
}

// Computes where the groups begin. Returns the row's width.
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

// Whether a point falls on the group, or may fall on it because of rounding. A group that is at least as wide
// as the distance between two points always has a point.
__device__ __forceinline__ bool IsPicked(const RowMemory& memory, int g, const RowScale& s, float omega) {
  const float begin = memory.begins[At(g)], end = memory.begins[At(g + 1)];
  return floorf(end - omega) > floorf(begin - omega) || end - begin > 0.99f ||
         g == s.target_group;  // the target is always taken
}

// Lists the groups that are read again, in order. Returns their number.
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

// The classes of a group that are taken, one bit for each.
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

// The value of an entry, divided by the gradient unit: the element, or the threshold if the element is
// smaller.
__device__ __forceinline__ float ValueOf(const RowScale& s, bool target, float element) {
  const float value = element * s.factor;
  const float size = fabsf(element) * s.relative;
  return target || size >= s.threshold ? value : copysignf(s.threshold * s.kappa, value);
}

// A thread's part of the estimates of variance and square, divided by kappa squared. A taken class below the
// threshold was taken with probability a / threshold. So each term of the exact sums (docs/math.md) is
// divided by this probability.
struct ErrorSums {
  float variance = 0.0f, square = 0.0f;

  __device__ __forceinline__ void Add(float a, float threshold) {
    if (a < threshold) variance += threshold * (threshold - a);
    square += a * fmaxf(a, threshold);
  }
};

// Reads the picked groups, one thread for each, and writes their entries from `begin` on. Returns their
// number.
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

// again: see Launch().
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
  if (most > kMaxRowSamples) {  // the chunk will take another level
    if (threadIdx.x == 0) to.rows[row] = {0, 0};
    return;
  }
  // Reserves the row's entries. If they lie past the end of the list, WriteEntries() leaves them out, and the
  // chunk will take another level.
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

// again: selects at the level that was chosen after the first selection; does nothing if that level is 0.
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

// ---- the level at which the list of a chunk fits, and the decision whether it becomes the gradient ----
//
// Bytes: 2 V or 4 V a row, read only if the list does not fit at level 0.

namespace {

constexpr int kDecideThreads = 1024;
// The number of levels above 0 whose entries are counted exactly; for higher levels a bound from the row's
// sum is enough.
constexpr int kCounted = 3;

// Counts the entries that the rows need at the next levels. Does nothing if all rows fit at level 0. The
// counts include the target's width, so they are upper bounds.
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
  // At level i, a width is at most 2^i in units of the base threshold. `sum` has no such limit.
  float widths[kCounted] = {};  // at levels 1, 2, ..., in units of the base threshold
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
    // Up to level kCounted + 1, `width` is this thread's part, and the block adds it up. Then `sum` is the
    // sum over the row, in all threads, which higher levels use.
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

// Launched with one warp, twice: lane i tests whether all rows fit at level i. known: the number of levels
// whose counts are known. The first launch knows only level 0. If the rows do not fit, it writes any level
// but 0, which makes CountLevelsKernel count, and empties the list (`used`), because the list will be made
// again. The second launch, with all counts, writes the level, or does nothing if that is 0.
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

// Launched with one thread. levels: the levels that the devices have chosen for the same rows.
__global__ void RaiseLevelKernel(SampleCounters* counters, const int32_t* levels, int parts) {
  int32_t largest = 0;
  for (int part = 0; part < parts; ++part) largest = max(largest, levels[part]);
  if (largest > counters->level) counters->used = 0;  // all rows are selected again
  counters->level = largest;
  counters->highest = max(counters->highest, largest);
}

// ---- the level: decision ----

// Launched with one block.
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
  // The predicted relative error is sqrt(variance / square).
  const bool too_much = variance > p.max_error * p.max_error * square;
  *p.decision = too_much ? Decision::kTooMuchError : Decision::kAsPlanned;
  *p.chosen_threshold = ThresholdAt(p.threshold, p.list.counters->highest);
}

// Launched with one block.
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

// ---- dx ----
//
// Computes dx of sampled gradients from the list. The part of the hot classes, `dense`, has been computed
// before and is the initial value. Grid: one block a row. Each thread holds its columns of dx and adds the
// rows of W that the list names, a batch of loads at a time.
//
// Bytes: entries * D * 2 of W, where popular classes come from L2, and 2 D of dx a row. FLOP: 2 D an entry.
// Order: entries are added in the order of classes.

namespace {

constexpr int kBatchVectors = 8;  // vectors of W that a thread holds at once
constexpr int kShared = 256;      // entries that the block loads together
constexpr int kTakenOnce = 16;    // one count, in units of HotClasses::taken

// How a row is divided: the number of 16-byte vectors that a thread holds, and for that the threads of a
// block and the blocks of a multiprocessor.
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

// Writes the entries of the row in the form that the weight gradient needs.
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

// Adds the entries [0, count) in shared memory to dx.
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

// Sets the thread's columns of dx to the part of the hot classes.
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

// Subtracts the uniform part of label smoothing (SampledHiddenParams), which is not sampled.
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
  // sampled.begin is -1 if the row has no gradient.
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

// ---- the choice of hot classes ----
//
// The popularity of a class is a count of the rows that have taken it; at each choice, the old popularity is
// multiplied by kFading and the new count is added. Hot classes are the classes whose popularity falls into
// the highest bins of a histogram. Bins are added from the highest one down, as long as they have at most
// kHotClasses classes together. Counts are integers, so the same chunks in the same order give the same
// choice.

namespace {

constexpr int kNumberThreads = 512;
constexpr int kCountThreads = 512;
constexpr int kCountRows = 64;  // rows of a block
constexpr float kFading = 0.5f;
constexpr float kTakenUnit = 1.0f / 16;

// The bin of a popularity. There are eight bins for each power of two above `least`. -1: the popularity is
// below `least`.
__device__ __forceinline__ int BinOf(float popularity, float least) {
  if (!(popularity >= least)) return -1;
  return min(static_cast<int>(8.0f * log2f(popularity / least)), kHotBins - 1);
}

// Updates the popularity of each class, zeroes its count, and fills the histogram.
__global__ void UpdatePopularityKernel(HotClasses hot, float least) {
  __shared__ int bins[kHotBins];
  for (int i = static_cast<int>(threadIdx.x); i < kHotBins; i += kThreads) bins[i] = 0;
  __syncthreads();
  const int64_t v = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (v < hot.vocab) {
    const float popularity = kFading * hot.popularity[v] + kTakenUnit * static_cast<float>(hot.taken[v]);
    hot.popularity[v] = popularity;
    hot.taken[v] = 0;
    const int bin = BinOf(popularity, least);
    if (bin >= 0) atomicAdd(bins + bin, 1);
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kHotBins; i += kThreads) {
    if (bins[i] > 0) atomicAdd(hot.histogram + i, bins[i]);
  }
}

// The lowest bin such that it and the bins above it have at most kHotClasses classes. Called by one thread,
// in shared memory.
__device__ __forceinline__ int LowestBin(const int32_t* histogram) {
  int bin = kHotBins;
  for (int classes = 0; bin > 0 && classes + histogram[bin - 1] <= kHotClasses; --bin) {
    classes += histogram[bin - 1];
  }
  return bin;
}

// Marks the hot classes in `bits`. One warp for each group, one lane for each class.
__global__ void MarkHotKernel(HotClasses hot, float least) {
  __shared__ int32_t histogram[kHotBins];
  __shared__ int lowest;
  for (int i = static_cast<int>(threadIdx.x); i < kHotBins; i += kThreads) histogram[i] = hot.histogram[i];
  __syncthreads();
  if (threadIdx.x == 0) lowest = LowestBin(histogram);
  __syncthreads();
  const int64_t v = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const bool is_hot = v < hot.vocab && BinOf(hot.popularity[v], least) >= lowest;
  const unsigned bits = __ballot_sync(0xffffffffu, is_hot);
  if (v % kHotGroup == 0 && v < hot.vocab) hot.bits[v / kHotGroup] = bits;
}

// Launched with one block. Numbers the hot classes in ascending order: writes ids, bases and count. Each
// thread has consecutive groups. Also zeroes the histogram for the next choice.
__global__ __launch_bounds__(kNumberThreads) void NumberHotKernel(HotClasses hot, int groups) {
  __shared__ int warps[kNumberThreads / 32];
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  const int each = (groups + kNumberThreads - 1) / kNumberThreads;
  const int first = min(thread * each, groups), last = min(first + each, groups);
  for (int i = thread; i < kHotBins; i += kNumberThreads) hot.histogram[i] = 0;
  int own = 0;
  for (int g = first; g < last; ++g) own += __popc(hot.bits[g]);
  int upto = own;
  for (int offset = 1; offset < 32; offset <<= 1) {
    const int before = __shfl_up_sync(0xffffffffu, upto, offset);
    if (lane >= offset) upto += before;
  }
  if (lane == 31) warps[warp] = upto;
  __syncthreads();
  int at = upto - own, total = 0;
  for (int w = 0; w < kNumberThreads / 32; ++w) {
    if (w < warp) at += warps[w];
    total += warps[w];
  }
  for (int g = first; g < last; ++g) {
    hot.bases[g] = at;
    for (uint32_t bits = hot.bits[g]; bits != 0; bits &= bits - 1, ++at) {
      hot.ids[at] = g * kHotGroup + __ffs(static_cast<int>(bits)) - 1;
    }
  }
  if (thread == 0) *hot.count = total;
}

// A thread sums one column over the block's rows: the expected number of rows that would take the class.
template <typename T>
__global__ __launch_bounds__(kCountThreads) void CountHotKernel(const __grid_constant__ CountHotParams p) {
  const int slot = static_cast<int>(blockIdx.y * kCountThreads + threadIdx.x);
  if (slot >= *p.hot.count) return;
  const int64_t first = blockIdx.x * int64_t{kCountRows};
  const int64_t last = min(first + kCountRows, p.rows);
  const T* elements = static_cast<const T*>(p.elements);
  float sum = 0.0f;
  for (int64_t row = first; row < last; ++row) {
    sum += fminf(fabsf(static_cast<float>(elements[row * kHotClasses + slot])) * p.widths[row], 1.0f);
  }
  atomicAdd(p.hot.taken + p.hot.ids[slot], __float2int_rn(sum / kTakenUnit));
}

// Grid: one block for each hot class. `vectors`: 16-byte vectors of a row.
__global__ void GatherHotKernel(HotClasses hot, const uint4* weight, int64_t vectors, uint4* to) {
  const int64_t slot = blockIdx.x;
  const bool exists = slot < *hot.count;
  const int64_t id = exists ? hot.ids[slot] : 0;
  for (int64_t v = threadIdx.x; v < vectors; v += kThreads) {
    to[slot * vectors + v] = exists ? __ldg(weight + id * vectors + v) : make_uint4(0, 0, 0, 0);
  }
}

__global__ void ScatterHotKernel(const __grid_constant__ ScatterHotParams p) {
  const int64_t slot = blockIdx.x;
  if (slot >= *p.hot.count) return;
  const int64_t id = p.hot.ids[slot];
  float* to = p.weight_gradient + id * p.ld;
  const float* from = p.from + slot * p.ld;
  for (int64_t c = threadIdx.x; c < p.ld; c += kThreads) to[c] += p.scale * from[c];
  if (p.bias_gradient != nullptr && threadIdx.x == 0) p.bias_gradient[id] += p.bias_from[slot];
}

}  // namespace

cudaError_t LaunchChooseHot(const HotClasses& hot, float least, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(CeilDiv(hot.vocab, kThreads));
  UpdatePopularityKernel<<<blocks, kThreads, 0, stream>>>(hot, least);
  MarkHotKernel<<<blocks, kThreads, 0, stream>>>(hot, least);
  NumberHotKernel<<<1, kNumberThreads, 0, stream>>>(hot, static_cast<int>(hot.groups()));
  return cudaGetLastError();
}

cudaError_t LaunchCountHot(const CountHotParams& params, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  const dim3 blocks(static_cast<unsigned>(CeilDiv(params.rows, kCountRows)),
                    static_cast<unsigned>(CeilDiv(kHotClasses, kCountThreads)));
  return WithElement(params.dtype, [&](auto element) {
    CountHotKernel<typename decltype(element)::Type><<<blocks, kCountThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

cudaError_t LaunchGatherHot(const HotClasses& hot, const void* weight, DType dtype, int64_t ld, void* to,
                            cudaStream_t stream) {
  const int64_t vectors = ld * static_cast<int64_t>(SizeOf(dtype)) / 16;
  GatherHotKernel<<<kHotClasses, kThreads, 0, stream>>>(hot, static_cast<const uint4*>(weight), vectors,
                                                        static_cast<uint4*>(to));
  return cudaGetLastError();
}

cudaError_t LaunchScatterHot(const ScatterHotParams& params, cudaStream_t stream) {
  ScatterHotKernel<<<kHotClasses, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace lossd::kernels::cuda

LOSSD_KERNEL_FILE(Sampled)
