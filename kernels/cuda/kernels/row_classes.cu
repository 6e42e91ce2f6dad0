// SPDX-License-Identifier: Apache-2.0
// Kernels for single classes of a row (row_classes.h): the top k classes, and classes that the caller names.
//
// Classes are compared by a 64-bit key: the upper half is the logit, as an unsigned number with the same
// order, and the lower half is the complement of the class. So a larger key comes first, and no two keys are
// equal.
//
// Selection (SelectTopKernel). Grid: one thread block a row; the row is read once. Classes that come before
// the k-th best class so far go into a list in shared memory. Before the list becomes too long, it is sorted,
// all but the first k are dropped, and the k-th becomes the new threshold. If logits are in random order,
// about k ln(V / k) classes get into the list. In the worst order, which is ascending, all classes get into
// the list, and it is sorted after every kSubTile classes.
//
// Selection from exponentials (SelectTopOfExponentialsKernel) works in the same way, in two steps.
// Exponentials are compared by their bits. If z_a >= z_b, the bits of b's exponential exceed the bits of a's
// exponential by at most one. So the first k classes by logits are among the classes whose bits are at least
// the k-th largest bits minus one. Most rows have only few more than k such classes. The kernel computes the
// logits of these classes, each by one warp, and sorts them. If there are so many ties that the list would
// become too long, the logits of the listed classes are computed earlier, and the first k are kept. The
// stored exponential of the target may have any value, so the target's logit is always computed. The first
// threshold is the k-th of the maxima that the threads find in their first classes.
//
// Bytes: rows * V * 4 are read; from exponentials rows * V * 2, and rows * k * D * 2 of the weight. Logits of
// given classes: rows * count * D * (2 or 4) of the weight, most of it from L2 if rows name the same classes.
#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/row_classes.h"
#include "kernels/cuda/kernels/row_loss_math.cuh"

namespace lossd::kernels::cuda {
namespace {

using Key = unsigned long long;

constexpr int kThreads = 256;
constexpr int kVectors = 4;             // vectors that a thread loads ahead
constexpr int kSubTile = kThreads * 4;  // classes of one vector of each thread
constexpr int kListKeys = 2048;         // a power of two; at least kMostSelected + kSubTile
constexpr int kMostCount = 256;         // most given classes of a row
static_assert(kListKeys >= kMostSelected + kSubTile);

// A logit that is NaN counts as -infinity.
__device__ __forceinline__ Key KeyOf(float z, int32_t place) {
  if (isnan(z)) z = NegativeInfinity();
  if (z == 0.0f) z = 0.0f;  // turns -0 into 0
  const uint32_t bits = __float_as_uint(z);
  const uint32_t ordered = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<Key>(ordered) << 32 | ~static_cast<uint32_t>(place);
}

__device__ __forceinline__ float LogitOf(Key key) {
  const auto ordered = static_cast<uint32_t>(key >> 32);
  return __uint_as_float((ordered & 0x80000000u) != 0 ? ordered & 0x7fffffffu : ~ordered);
}

__device__ __forceinline__ int32_t PlaceOf(Key key) {
  return static_cast<int32_t>(~static_cast<uint32_t>(key));
}

// The key of an entry for which there is no class.
__device__ __forceinline__ Key NoKey() { return KeyOf(NegativeInfinity(), INT32_MAX); }

// The dot product of two rows of n elements, computed by a warp; every lane gets it.
template <typename T>
__device__ __forceinline__ float WarpDot(const uint4* x, const uint4* w, int64_t n) {
  constexpr int kSize = Vec<T>::kSize;
  float sum = 0.0f;
#pragma unroll 4
  for (int64_t v = static_cast<int>(threadIdx.x) & 31; v < n / kSize; v += 32) {
    float a[kSize], b[kSize];
    Vec<T>::Unpack(x[v], a);
    Vec<T>::Unpack(w[v], b);
#pragma unroll
    for (int j = 0; j < kSize; ++j) sum = fmaf(a[j], b[j], sum);
  }
  return WarpSum(sum);
}

struct SharedList {
  Key keys[kListKeys];
  Key threshold;  // smaller or equal keys need not be listed
  int count;
};

// Sorts `count` keys, the largest first. Called by all threads. `keys` must have room for the next power of
// two.
__device__ void Sort(Key* keys, int count) {
  int size = 2;
  while (size < count) size *= 2;
  for (int i = count + static_cast<int>(threadIdx.x); i < size; i += kThreads) keys[i] = 0;
  for (int width = 2; width <= size; width *= 2) {
    for (int stride = width / 2; stride > 0; stride /= 2) {
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < size / 2; i += kThreads) {
        const int low = 2 * i - (i & (stride - 1)), high = low + stride;
        const Key a = keys[low], b = keys[high];
        const bool descending = (low & width) == 0;
        if ((a < b) != descending) continue;
        keys[low] = b;
        keys[high] = a;
      }
    }
  }
  __syncthreads();
}

// Sorts the list and drops all but the first k. Called by all threads.
__device__ void Prune(SharedList& list, int k) {
  __syncthreads();
  const int count = list.count;
  Sort(list.keys, count);
  if (threadIdx.x == 0) {
    list.count = min(count, k);
    if (count >= k) list.threshold = list.keys[k - 1];
  }
  __syncthreads();
}

// T: the dtype that the product multiplied.
template <typename T>
__global__ __launch_bounds__(kThreads) void SelectTopKernel(const __grid_constant__ SelectTopParams p) {
  __shared__ SharedList list;
  const int64_t row = blockIdx.x;
  const LogitMap<T, true> map(p.terms);  // the terms count classes from the block's first class
  const auto* const vectors =
      reinterpret_cast<const float4*>(static_cast<const float*>(p.logits.data) + row * p.logits.ld);
  const int classes = static_cast<int>(p.logits.classes);
  const auto first_place = static_cast<int32_t>(p.terms.first_class + p.first_class);
  const bool goes_on = p.before.logits != nullptr;
  if (threadIdx.x == 0) {
    list.count = goes_on ? p.k : 0;
    list.threshold = 0;  // smaller than the key of any class
  }
  for (int i = static_cast<int>(threadIdx.x); goes_on && i < p.k; i += kThreads) {
    list.keys[i] = KeyOf(p.before.logits[row * p.k + i], p.before.places[row * p.k + i]);
    if (i == p.k - 1) list.threshold = list.keys[i];
  }
  __syncthreads();

  const int all = (classes + 3) / 4;  // rows are padded to whole vectors
  for (int tile = 0; tile < all; tile += kThreads * kVectors) {
    float z[kVectors][4];
    const Key threshold = list.threshold;
    bool any = false;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int index = tile + v * kThreads + static_cast<int>(threadIdx.x);
      const float4 dots = index < all ? vectors[index] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      const float x[4] = {dots.x, dots.y, dots.z, dots.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = 4 * index + i;
        const bool here = column < classes;
        z[v][i] = here ? map(x[i], column).z : NegativeInfinity();
        any = any || (here && KeyOf(z[v][i], first_place + column) > threshold);
      }
    }
    // The threshold only grows, so no class of this tile comes into the list.
    if (__syncthreads_or(any ? 1 : 0) == 0) continue;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int count = list.count;
      __syncthreads();  // all threads have read it
      if (count > kListKeys - kSubTile) Prune(list, p.k);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = 4 * (tile + v * kThreads + static_cast<int>(threadIdx.x)) + i;
        const Key key = KeyOf(z[v][i], first_place + column);
        if (column < classes && key > list.threshold) list.keys[atomicAdd(&list.count, 1)] = key;
      }
      __syncthreads();
    }
  }
  Prune(list, p.k);
  const int count = list.count;
  for (int i = static_cast<int>(threadIdx.x); i < p.k; i += kThreads) {
    const Key key = i < count ? list.keys[i] : NoKey();
    p.top.logits[row * p.k + i] = LogitOf(key);
    p.top.places[row * p.k + i] = PlaceOf(key);
  }
}

// ---- from exponentials ----

constexpr int kExpLane = 8;                       // exponentials in a uint4
constexpr int kExpSubTile = kThreads * kExpLane;  // classes of one vector of each thread
constexpr int kExpTile = kExpSubTile * kVectors;  // classes that all threads load ahead
constexpr int kExpListKeys = 4096;                // a power of two
constexpr int kFull = 1024;                       // the list is pruned when it has more keys than this
constexpr int kMostTies = 512;                    // if it still has more keys than this, logits are computed
constexpr uint32_t kInfiniteBits = 0x7f80;        // infinity in bf16
static_assert(kExpListKeys >= kFull + kExpSubTile + kMostSelected + 1);
static_assert(kThreads >= kMostSelected, "a maximum of each thread");

// A key of the list: the bits of the exponential and, below them, the complement of the class.
struct ExponentialList {
  Key keys[kExpListKeys];
  int count;
  uint32_t floor;           // classes with smaller bits need not be listed
  Key best[kMostSelected];  // the best classes whose logits have been computed; keys of KeyOf
  int best_count;
};

// The bits by which exponentials are compared. NaN counts as the smallest; it makes its row fail anyway.
__device__ __forceinline__ uint32_t BitsOf(uint32_t half) { return half > kInfiniteBits ? 0u : half; }

// The bits of exponential i of a vector, and the largest bits of a vector.
__device__ __forceinline__ uint32_t HalfOf(const uint4& v, int i) {
  const uint32_t word = i < 4 ? (i < 2 ? v.x : v.y) : (i < 6 ? v.z : v.w);
  return (i & 1) != 0 ? word >> 16 : word & 0xffffu;
}

__device__ __forceinline__ uint32_t LargestHalf(const uint4& v) {
  const uint32_t pair = __vmaxu2(__vmaxu2(v.x, v.y), __vmaxu2(v.z, v.w));
  return max(pair & 0xffffu, pair >> 16);
}

// The smallest bits of a class that may have a larger logit than a class with these bits.
__device__ __forceinline__ uint32_t FloorOf(uint32_t bits) { return bits == 0 ? 0u : bits - 1; }

// Computes the logits of the classes in the list. The first k of these classes and of `best` become `best`,
// and the list becomes empty. Called by all threads.
__device__ void Resolve(ExponentialList& list, const SelectTopOfExponentialsParams& p, int64_t row) {
  using T = __nv_bfloat16;
  __syncthreads();
  const int count = list.count, before = list.best_count;
  const LogitMap<T, true> map(p.terms);
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const auto* const x = reinterpret_cast<const uint4*>(static_cast<const T*>(p.hidden) + row * p.inner);
  for (int i = static_cast<int>(threadIdx.x) >> 5; i < count; i += kThreads / 32) {
    const int32_t column = PlaceOf(list.keys[i]);
    const auto* const w =
        reinterpret_cast<const uint4*>(static_cast<const T*>(p.weight) + int64_t{column} * p.inner);
    const float dot = WarpDot<T>(x, w, p.inner);
    const auto place = static_cast<int32_t>(p.terms.first_class) + column;
    if (lane == 0) list.keys[i] = KeyOf(map(dot, column).z, place);
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < before; i += kThreads) list.keys[count + i] = list.best[i];
  __syncthreads();
  Sort(list.keys, count + before);
  const int kept = min(count + before, p.k);
  for (int i = static_cast<int>(threadIdx.x); i < kept; i += kThreads) list.best[i] = list.keys[i];
  if (threadIdx.x == 0) {
    list.best_count = kept;
    list.count = 0;
  }
  __syncthreads();
}

// Drops the classes below the floor that follows from the list itself. If many remain, because of ties,
// computes their logits and keeps the first k in `best` (Resolve). Called by all threads.
__device__ void Prune(ExponentialList& list, const SelectTopOfExponentialsParams& p, int64_t row) {
  __syncthreads();
  const int count = list.count;
  Sort(list.keys, count);
  const auto bits_at = [&](int i) { return static_cast<uint32_t>(list.keys[i] >> 32); };
  const uint32_t floor = count < p.k ? list.floor : max(list.floor, FloorOf(bits_at(p.k - 1)));
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    if (bits_at(i) >= floor && (i + 1 == count || bits_at(i + 1) < floor)) list.count = i + 1;
  }
  if (threadIdx.x == 0) list.floor = floor;
  __syncthreads();
  const bool resolves = list.count > kMostTies;
  __syncthreads();  // all threads have read it
  if (resolves) Resolve(list, p, row);
}

// Grid: one thread block a row.
__global__ __launch_bounds__(kThreads) void SelectTopOfExponentialsKernel(
    const __grid_constant__ SelectTopOfExponentialsParams p) {
  __shared__ ExponentialList list;
  const int64_t row = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x), target = p.targets[row];
  const auto* const vectors =
      reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.exponentials) + row * p.ld);
  const int classes = static_cast<int>(p.terms.vocab), all = static_cast<int>(p.ld / kExpLane);
  const auto is_class = [&](int column) { return column < classes && column != target; };

  uint4 v[kVectors];
  const auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int index = first / kExpLane + i * kThreads + thread;
      v[i] = index < all ? vectors[index] : make_uint4(0, 0, 0, 0);
    }
  };
  const auto column_of = [&](int first, int i, int element) {
    return first + i * kExpSubTile + thread * kExpLane + element;
  };
  load(0);
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
#pragma unroll
    for (int e = 0; e < kExpLane; ++e) {
      if (is_class(column_of(0, i, e))) largest = max(largest, BitsOf(HalfOf(v[i], e)));
    }
  }
  // The first floor. The memory of the list sorts the threads' maxima. At least k classes have the k-th of
  // these bits or more, and the top k of the row may have bits that are smaller by one (FloorOf).
  list.keys[thread] = largest;
  __syncthreads();
  Sort(list.keys, kThreads);
  if (thread == 0) {
    list.count = list.best_count = 0;
    list.floor = FloorOf(static_cast<uint32_t>(list.keys[p.k - 1]));
  }
  __syncthreads();

  for (int first = 0; first < static_cast<int>(p.ld); first += kExpTile) {
    if (first > 0) load(first);
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) most = max(most, LargestHalf(v[i]));
    if (__syncthreads_or(most >= list.floor ? 1 : 0) == 0) continue;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int count = list.count;
      __syncthreads();  // all threads have read it
      if (count > kFull) Prune(list, p, row);
      if (const uint32_t floor = list.floor; LargestHalf(v[i]) >= floor) {
#pragma unroll
        for (int e = 0; e < kExpLane; ++e) {
          const uint32_t bits = BitsOf(HalfOf(v[i], e));
          const int column = column_of(first, i, e);
          if (bits < floor || !is_class(column)) continue;
          list.keys[atomicAdd(&list.count, 1)] =
              static_cast<Key>(bits) << 32 | ~static_cast<uint32_t>(column);
        }
      }
      __syncthreads();
    }
  }
  Prune(list, p, row);
  if (thread == 0 && target >= 0 && target < classes) {
    // Resolve() reads only the class of a key, so this key needs no bits of an exponential.
    list.keys[list.count++] = ~static_cast<uint32_t>(target);
  }
  Resolve(list, p, row);
  for (int i = thread; i < p.k; i += kThreads) {
    const Key key = i < list.best_count ? list.best[i] : NoKey();
    p.top.logits[row * p.k + i] = LogitOf(key);
    p.top.places[row * p.k + i] = PlaceOf(key);
  }
}

// Grid: one thread block a row, one thread for each rank within a part. The rank of an entry among all
// entries is its rank in its own part plus, for each other part, the number of entries that come before it.
__global__ __launch_bounds__(kMostSelected) void MergeTopKernel(const __grid_constant__ MergeTopParams p) {
  const int64_t row = blockIdx.x;
  const auto key_at = [&](int part, int i) {
    const int64_t entry = part * p.stride + row * p.k + i;
    return KeyOf(p.all.logits[entry], p.all.places[entry]);
  };
  const int i = static_cast<int>(threadIdx.x);
  if (i >= p.k) return;
  for (int part = 0; part < p.parts; ++part) {
    const Key key = key_at(part, i);
    int rank = i;
    for (int other = 0; other < p.parts && rank < p.k; ++other) {
      if (other == part) continue;
      int low = 0, high = p.k;  // the first entry that does not come before it is in [low, high]
      while (low < high) {
        const int middle = (low + high) / 2;
        if (key_at(other, middle) > key) {
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      rank += low;
    }
    if (rank >= p.k) continue;
    p.top.logits[row * p.k + rank] = LogitOf(key);
    p.top.places[row * p.k + rank] = PlaceOf(key);
  }
}

// Grid: one thread block a row. Each warp computes one class at a time.
template <typename T>
__global__ __launch_bounds__(kThreads) void ClassLogitsKernel(const __grid_constant__ ClassLogitsParams p) {
  __shared__ int32_t places[kMostCount];
  const int64_t row = blockIdx.x;
  for (int i = static_cast<int>(threadIdx.x); i < p.count; i += kThreads) {
    places[i] = p.classes[row * p.count + i] - static_cast<int32_t>(p.terms.first_class);
  }
  __syncthreads();  // all have been read, so logits may overwrite them
  const LogitMap<T, true> map(p.terms);
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const auto* x = reinterpret_cast<const uint4*>(static_cast<const T*>(p.hidden) + row * p.ld);
  for (int i = static_cast<int>(threadIdx.x) >> 5; i < p.count; i += kThreads / 32) {
    const int place = places[i];
    if (place < 0 || place >= p.terms.vocab) {
      if (lane == 0) p.logits[row * p.count + i] = 0.0f;
      continue;
    }
    const auto* w = reinterpret_cast<const uint4*>(static_cast<const T*>(p.weight) + int64_t{place} * p.ld);
    const float dot = WarpDot<T>(x, w, p.ld);
    if (lane == 0) p.logits[row * p.count + i] = map(dot, place).z;
  }
}

}  // namespace

cudaError_t LaunchSelectTop(const SelectTopParams& params, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  SelectTopParams p = params;
  p.terms = params.terms.From(params.first_class);
  const auto blocks = static_cast<unsigned>(params.rows);
  if (params.compute == DType::kFloat32) {
    SelectTopKernel<float><<<blocks, kThreads, 0, stream>>>(p);
  } else {
    SelectTopKernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

cudaError_t LaunchSelectTopOfExponentials(const SelectTopOfExponentialsParams& params, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  SelectTopOfExponentialsKernel<<<static_cast<unsigned>(params.rows), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t LaunchMergeTop(const MergeTopParams& params, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  MergeTopKernel<<<static_cast<unsigned>(params.rows), kMostSelected, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t LaunchClassLogits(const ClassLogitsParams& params, cudaStream_t stream) {
  if (params.rows == 0 || params.count == 0) return cudaSuccess;
  if (params.count > kMostCount) return cudaErrorInvalidValue;
  const auto blocks = static_cast<unsigned>(params.rows);
  switch (params.dtype) {
    case DType::kFloat32:
      ClassLogitsKernel<float><<<blocks, kThreads, 0, stream>>>(params);
      break;
    case DType::kFloat16:
      ClassLogitsKernel<__half><<<blocks, kThreads, 0, stream>>>(params);
      break;
    case DType::kBFloat16:
      ClassLogitsKernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(params);
      break;
  }
  return cudaGetLastError();
}

}  // namespace lossd::kernels::cuda
