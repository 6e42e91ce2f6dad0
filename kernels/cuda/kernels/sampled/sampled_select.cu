// From a matrix of ds to the list of sampled gradients, one block a row. The rule is that of docs/math.md, with
// a = |element| * relative, relative = |factor| / kappa:
//
//   taken at tau: the target; a >= tau; else with probability a / tau
//
// Nearly all classes are passed over, so the loop over a row does as little for an element as it can: one hash
// for two classes gives the upper 16 bits of their numbers, and these are compared with a / tau. The few
// vectors that have an element which may be taken are looked at again with the whole numbers.
//
// What is taken at a threshold is a part of what is taken at half of it. So the block can also count, for every
// class it takes, up to which level (tau 2^level) it would be taken. If the counts of all rows say that the
// list is too small for level 0, the rows are read again at the first level that fits.
//
// Bytes: V (2 or 4) a row, read once or twice. Order: entries of a row are sorted by class; all sums fixed.
#include <algorithm>

#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/row_loss_math.cuh"
#include "kernels/cuda/kernels/sampled/sampled.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;
constexpr int kResident = 4;  // blocks of a multiprocessor
constexpr int kDecideThreads = 1024;
// More than the roundings of a / tau * 2^16 in the first comparison, which may only err on the side of taking.
constexpr float kCoarseSlack = 1.0f + 0x1p-18f;

// ---- a row ----

// What all threads know of their row.
struct RowScale {
  float relative;   // a over |element|
  float kappa;      // over the gradient unit
  float factor;     // of the elements
  float threshold;  // of a
  float coarse;     // |element| to a / tau * 2^16
  SampleKey key;
  int target;
};

// kappa, over the gradient unit.
__device__ __forceinline__ float KappaOf(const SampleRowsParams& p, int64_t row, int target) {
  const float c = p.in.coef_loss[row];
  const float hard = ClassWeight(p.terms, target) * (1.0f - p.terms.smoothing);
  const float share = p.terms.smoothing / static_cast<float>(p.terms.vocab);
  const float softmax =
      c * (hard + share * p.terms.class_weight_sum + 2.0f * p.terms.z_loss * p.lse[row]) + p.in.coef_lse[row];
  return fabsf(softmax) + fabsf(p.in.coef_entropy[row]);
}

__device__ __forceinline__ RowScale ScaleOf(const SampleRowsParams& p, int64_t row, int level) {
  RowScale s;
  s.target = p.in.targets[row];
  s.key = p.keys[row];
  s.kappa = KappaOf(p, row, s.target);
  s.factor = p.factors != nullptr ? p.factors[row] : 1.0f;
  const float relative = fabsf(s.factor) / s.kappa;
  s.relative = isfinite(relative) ? relative : 0.0f;  // no loss, or not finite: nothing but the target
  s.threshold = ldexpf(p.threshold, level);
  s.coarse = s.relative / s.threshold * 65536.0f * kCoarseSlack;
  return s;
}

// In shared memory.
struct RowList {
  int32_t* columns;  // [kMaxRowSamples], in any order
  float* elements;
  float* sorted;  // elements in the order of columns
};

struct Shared {
  int count;                  // may be more than there is room for
  int levels[kSampleLevels];  // classes whose last level this is
  int begin;
  float scratch[33];
};

// The last level at which a class is taken that is taken at `threshold`.
__device__ __forceinline__ int LastLevel(float size, float threshold, float sample) {
  int level = 0;
  while (level < kSampleLevels - 1 && SampledSize(size, threshold * 2.0f, sample) > 0.0f) {
    threshold *= 2.0f;
    ++level;
  }
  return level;
}

__device__ __forceinline__ void Append(const RowList& list, Shared& shared, int column, float element,
                                       int level) {
  atomicAdd(shared.levels + level, 1);
  const int at = atomicAdd(&shared.count, 1);
  if (at >= kMaxRowSamples) return;
  list.columns[at] = column;
  list.elements[at] = element;
}

// Whether some element of the vector may be taken. 2^23 + x is x in the low bits of a number, which costs less
// than a conversion.
template <typename T>
__device__ __forceinline__ bool MayTake(const uint4& raw, int v, const RowScale& s) {
  constexpr int kSize = Vec<T>::kSize;
  constexpr uint32_t kBase = 0x4b000000u;
  float x[kSize];
  Vec<T>::Unpack(raw, x);
  bool some = false;
#pragma unroll
  for (int i = 0; i < kSize; i += 2) {
    const uint32_t pair = CoarseSamplePair(s.key, static_cast<uint32_t>((v * kSize + i) / 2));
    const float low = __uint_as_float(kBase | (pair & 0xffffu)) - 0x1p23f;
    const float high = __uint_as_float(kBase | (pair >> 16)) - 0x1p23f;
    some = some || fabsf(x[i]) * s.coarse >= low;
    some = some || fabsf(x[i + 1]) * s.coarse >= high;
  }
  return some;
}

template <typename T>
__device__ __forceinline__ void TakeVector(const SampleRowsParams& p, const T* row, int v, const RowScale& s,
                                           const RowList& list, Shared& shared) {
  constexpr int kSize = Vec<T>::kSize;
  float x[kSize];
  Vec<T>::Unpack(*(reinterpret_cast<const uint4*>(row) + v), x);
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const int column = v * kSize + i;
    if (column == s.target || column >= p.elements.classes) continue;
    const float size = fabsf(x[i]) * s.relative;
    const float sample = SampleOf(s.key, static_cast<uint32_t>(column));
    if (!(SampledSize(size, s.threshold, sample) > 0.0f)) continue;
    Append(list, shared, column, x[i], LastLevel(size, s.threshold, sample));
  }
}

template <typename T>
__device__ __forceinline__ void ScanRow(const SampleRowsParams& p, const T* row, const RowScale& s,
                                        const RowList& list, Shared& shared) {
  const auto* raw_row = reinterpret_cast<const uint4*>(row);
  const int vectors = static_cast<int>(p.elements.ld / Vec<T>::kSize);
  for (int base = static_cast<int>(threadIdx.x); base < vectors; base += kThreads * kUnroll) {
    uint4 raw[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int v = base + u * kThreads;
      raw[u] = v < vectors ? __ldg(raw_row + v) : make_uint4(0, 0, 0, 0);
    }
    uint32_t some = 0;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      some |= MayTake<T>(raw[u], base + u * kThreads, s) ? 1u << u : 0u;
    }
    while (some != 0) {
      const int u = __ffs(static_cast<int>(some)) - 1;
      some &= some - 1;
      if (base + u * kThreads < vectors) TakeVector(p, row, base + u * kThreads, s, list, shared);
    }
  }
}

// One warp: the row's counts at every level into those of the chunk.
__device__ __forceinline__ void CountLevels(const SampleList& list, const Shared& shared) {
  const int lane = static_cast<int>(threadIdx.x);
  int at_least = shared.levels[lane];
#pragma unroll
  for (int offset = 1; offset < 32; offset <<= 1) {
    const int above = __shfl_down_sync(0xffffffffu, at_least, offset);
    at_least += lane + offset < 32 ? above : 0;
  }
  atomicAdd(list.counters->totals + lane, at_least);
  atomicMax(list.counters->most + lane, at_least);
}
static_assert(kSampleLevels == 32, "a warp has one lane for each");

// What an element counts, over the gradient unit.
__device__ __forceinline__ float ValueOf(const RowScale& s, int column, float element) {
  const float value = element * s.factor;
  const float size = fabsf(element) * s.relative;
  return column == s.target || size >= s.threshold ? value : copysignf(s.threshold * s.kappa, value);
}

// The entries of the row in the order of classes, into the list of the chunk.
__device__ __forceinline__ void WriteEntries(const SampleList& to, const RowScale& s, const RowList& list,
                                             const Shared& shared) {
  for (int i = static_cast<int>(threadIdx.x); i < shared.count; i += kThreads) {
    const int column = list.columns[i];
    int rank = 0;
    for (int j = 0; j < shared.count; ++j) rank += list.columns[j] < column ? 1 : 0;
    list.sorted[rank] = column == s.target ? -1.0f : fabsf(list.elements[i]) * s.relative;
    const int at = shared.begin + rank;
    if (at < to.capacity) to.entries[at] = {column, ValueOf(s, column, list.elements[i])};
  }
}

// Estimates from what was taken. target: its element.
__device__ __forceinline__ void SumErrors(const SampleList& to, int64_t row, const RowScale& s, float target,
                                          const RowList& list, Shared& shared) {
  float variance = 0.0f, square = 0.0f;
  for (int i = static_cast<int>(threadIdx.x); i < shared.count; i += kThreads) {
    const float a = list.sorted[i];
    if (a < 0.0f) continue;  // the target
    if (a < s.threshold) variance += s.threshold * (s.threshold - a);
    square += a * fmaxf(a, s.threshold);
  }
  variance = BlockSum(variance, shared.scratch);
  __syncthreads();
  square = BlockSum(square, shared.scratch);
  if (threadIdx.x != 0) return;
  const float value = target * s.factor;
  const float kappa_square = s.kappa * s.kappa;
  to.variance[row] = variance > 0.0f ? variance * kappa_square : 0.0f;
  to.square[row] = (square > 0.0f ? square * kappa_square : 0.0f) + value * value;
}

template <typename T>
__global__ __launch_bounds__(kThreads, kResident) void SampleRowsKernel(
    const __grid_constant__ SampleRowsParams p, bool again) {
  extern __shared__ int32_t memory[];
  __shared__ Shared shared;
  const SampleList& to = p.list;
  const int level = again ? to.counters->level : 0;
  if (again && level == 0) return;
  const int64_t row = blockIdx.x;
  if (p.with_gradient[row] == 0) {
    if (threadIdx.x == 0) {
      to.rows[row] = {0, 0};
      to.variance[row] = to.square[row] = 0.0f;
    }
    return;
  }
  auto* floats = reinterpret_cast<float*>(memory);
  const RowList list = {memory, floats + kMaxRowSamples, floats + 2 * kMaxRowSamples};
  const T* elements = static_cast<const T*>(p.elements.data) + row * p.elements.ld;
  const RowScale s = ScaleOf(p, row, level);
  const float target = static_cast<float>(elements[s.target]);
  if (threadIdx.x == 0) shared.count = 0;
  if (threadIdx.x < kSampleLevels) shared.levels[threadIdx.x] = 0;
  __syncthreads();
  if (threadIdx.x == 0) Append(list, shared, s.target, target, kSampleLevels - 1);
  ScanRow(p, elements, s, list, shared);
  __syncthreads();
  if (!again && threadIdx.x < 32) CountLevels(to, shared);
  const bool fits = shared.count <= kMaxRowSamples;
  if (threadIdx.x == 0) {
    shared.begin = fits ? atomicAdd(&to.counters->used, shared.count) : 0;
    to.rows[row] = {shared.begin, fits ? shared.count : 0};
  }
  if (!fits) return;  // the chunk takes another level
  __syncthreads();
  WriteEntries(to, s, list, shared);
  __syncthreads();
  SumErrors(to, row, s, target, list, shared);
}

// One warp.
__global__ void ChooseLevelKernel(SampleList list) {
  const int lane = static_cast<int>(threadIdx.x);
  SampleCounters& counters = *list.counters;
  const bool fits = counters.totals[lane] <= list.capacity && counters.most[lane] <= kMaxRowSamples;
  const unsigned levels = __ballot_sync(0xffffffffu, fits);
  if (lane != 0) return;
  counters.level = levels != 0 ? __ffs(static_cast<int>(levels)) - 1 : kSampleLevels - 1;
  if (counters.level > 0) counters.used = 0;
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
  *p.chosen_threshold = ldexpf(p.threshold, p.list.counters->level);
}

template <typename T>
cudaError_t Launch(const SampleRowsParams& p, cudaStream_t stream) {
  auto* kernel = SampleRowsKernel<T>;
  constexpr int kShared = 3 * kMaxRowSamples * static_cast<int>(sizeof(float));
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  const auto rows = static_cast<unsigned>(p.in.rows);
  kernel<<<rows, kThreads, kShared, stream>>>(p, false);
  ChooseLevelKernel<<<1, kSampleLevels, 0, stream>>>(p.list);
  kernel<<<rows, kThreads, kShared, stream>>>(p, true);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchSampleRows(const SampleRowsParams& params, cudaStream_t stream) {
  if (params.in.rows == 0) return cudaSuccess;
  switch (params.elements.dtype) {
    case DType::kFloat32:
      return Launch<float>(params, stream);
    case DType::kFloat16:
      return Launch<__half>(params, stream);
    case DType::kBFloat16:
      return Launch<__nv_bfloat16>(params, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t LaunchDecideSampled(const DecideSampledParams& params, cudaStream_t stream) {
  DecideSampledKernel<<<1, kDecideThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace lossd::kernels::cuda
