// SPDX-License-Identifier: Apache-2.0
// Functions with which a thread block works on a row of fp32 dot products, or on a part of a row (RowPart):
// they compute its statistics (Stats), and write its gradient in the compute dtype, by the row's
// GradientRule. The gradient may overwrite the dot products. The kernels for whole rows (row_loss.cu) and for
// blocks of classes (recomputed_rows.cu) share them. row_loss.cu explains the formulas.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_ROW_PART_CUH_
#define LOSSD_KERNELS_CUDA_KERNELS_ROW_PART_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/row_loss_math.cuh"

namespace lossd::kernels::cuda {

// How many vectors a thread loads ahead of their use, from shared and from device memory.
inline constexpr int kSharedUnroll = 4;
inline constexpr int kGlobalUnroll = 4;

// ---- statistics in memory, between warps and blocks ----

inline constexpr int kStatsWords = 5;

__device__ __forceinline__ void Put(const Stats& s, float* words) {
  words[0] = s.max;
  words[1] = s.sum;
  words[2] = s.spread;
  words[3] = s.weighted;
  words[4] = __int_as_float(s.arg);
}

__device__ __forceinline__ Stats Get(const float* words) {
  return {words[0], words[1], words[2], words[3], __float_as_int(words[4])};
}

// The combined statistics of all lanes, the same bits in every lane.
template <bool kGeneral>
__device__ __forceinline__ Stats ReduceWarp(Stats s, float f) {
  float max = s.max;
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, offset));
  const int32_t arg = s.max == max ? s.arg : INT32_MAX;
  Rebase(s, max, f);
  s.arg = __reduce_min_sync(0xffffffffu, arg);
  s.sum = WarpSum(s.sum);
  if constexpr (kGeneral) {
    s.spread = WarpSum(s.spread);
    s.weighted = WarpSum(s.weighted);
  }
  return s;
}

// ---- gradient ----

template <bool kGeneral>
__device__ __forceinline__ float Gradient(const LossTerms& terms, const GradientRule& rule,
                                          const Logit& logit, float f, int column) {
  const float d = fmaf(logit.z, f, -rule.reference);
  const float e = Exp2(d);
  float g = e * rule.softmax;
  if constexpr (kGeneral) {
    if (rule.entropy != 0.0f && e > 0.0f) {
      g -= e * rule.entropy * ((d - rule.log2_sum) * kLn2 + rule.row_entropy);
    }
    if (rule.uniform != 0.0f) g -= rule.uniform * ClassWeight(terms, column);
    g *= logit.slope;
  }
  return g;
}

__device__ __forceinline__ uint4 LoadShared16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// ---- a part of a row ----

// Dot products in a vector.
inline constexpr int kDots = Vec<float>::kSize;

// The part of a row that this block works on, in vectors of 16 bytes. kResident: it is copied to shared
// memory.
template <bool kResident>
struct RowPart {
  static constexpr int kUnroll = kResident ? kSharedUnroll : kGlobalUnroll;
  float* row;       // the whole row
  uint32_t shared;  // address in shared memory of the copy of vectors [begin, end)
  int begin;
  int end;

  __device__ __forceinline__ uint4* global() const { return reinterpret_cast<uint4*>(row); }
  __device__ __forceinline__ void Fetch() const {
    if constexpr (kResident) {
      const uint4* from = global() + begin;
      for (int v = threadIdx.x; v < end - begin; v += blockDim.x) CopyAsync16(shared + 16u * v, from + v);
      AwaitAllCopies();
    }
  }
  // A thread reads only vectors that it has fetched itself.
  __device__ __forceinline__ uint4 Load(int v) const {
    if constexpr (kResident) return LoadShared16(shared + 16u * (v - begin));
    return __ldcg(global() + v);
  }
  // Whether this thread works on the column.
  __device__ __forceinline__ bool Owns(int column) const {
    const int v = column / kDots;
    return column >= 0 && v >= begin && v < end &&
           (v - begin) % static_cast<int>(blockDim.x) == static_cast<int>(threadIdx.x);
  }
  // Overwrites the value that the thread which owns `column` will load.
  __device__ __forceinline__ void Mask(int column, float value) const {
    if (!Owns(column)) return;
    if constexpr (kResident) {
      const uint32_t address = shared + static_cast<uint32_t>(sizeof(float)) * (column - begin * kDots);
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
    } else {
      row[column] = value;
    }
  }
};

// Applies body(raw vector, index) to this thread's vectors. A few vectors are loaded ahead of their use.
template <typename Part, typename Body>
__device__ __forceinline__ void ForEachVector(const Part& part, Body body) {
  constexpr int kUnroll = Part::kUnroll;
  const int step = static_cast<int>(blockDim.x);
  int v = part.begin + static_cast<int>(threadIdx.x);
  for (; v + (kUnroll - 1) * step < part.end; v += kUnroll * step) {
    uint4 raw[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) raw[i] = part.Load(v + i * step);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) body(raw[i], v + i * step);
  }
  for (; v < part.end; v += step) body(part.Load(v), v);
}

// The same, but all threads of the block wait for each other between the loads and the bodies. So a body may
// overwrite what any thread has loaded in this round or an earlier one. This is needed if a 16-bit gradient
// overwrites its dot products: vector v of the gradient lies where vector v / 2 of the dot products was.
template <typename Part, typename Body>
__device__ __forceinline__ void ForEachVectorInStep(const Part& part, Body body) {
  constexpr int kUnroll = Part::kUnroll;
  const int step = static_cast<int>(blockDim.x);
  for (int first = part.begin; first < part.end; first += kUnroll * step) {
    const int v = first + static_cast<int>(threadIdx.x);
    uint4 raw[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      raw[i] = v + i * step < part.end ? part.Load(v + i * step) : make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (v + i * step < part.end) body(raw[i], v + i * step);
    }
  }
}

// The last column whose bias and class weight may be read. If there are no classes, this is the first column
// of the padding.
__device__ __forceinline__ int LastColumn(int classes) { return max(classes - 1, 0); }

// The logits of vector v of a row. They are -inf in padding and at the target (for plain rows, MaskRow does
// this).
template <typename T, bool kGeneral>
__device__ __forceinline__ void VectorLogits(const LogitMap<T, kGeneral>& map, const uint4& raw, int v,
                                             int classes, int target, Logit (&logits)[kDots]) {
  constexpr int kSize = kDots;
  float dots[kSize];
  Vec<float>::Unpack(raw, dots);
  const int first = v * kSize;
  const int last = LastColumn(classes);
  // Only the last vectors have columns at or past `classes`; a read of their bias would be out of bounds.
#pragma unroll
  for (int i = 0; i < kSize; ++i) logits[i] = map(dots[i], kGeneral ? min(first + i, last) : 0);
  if constexpr (!kGeneral) return;
  if (target - first >= 0 && target - first < kSize) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (first + i == target) logits[i].z = NegativeInfinity();
    }
  }
  if (first + kSize > classes) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (first + i >= classes) logits[i].z = NegativeInfinity();
    }
  }
}

// The smallest class in vector `best` of a row that has the logit `max`.
template <typename T, bool kGeneral, bool kResident>
__device__ __forceinline__ int32_t FindClass(const LogitMap<T, kGeneral>& map, const RowPart<kResident>& part,
                                             int classes, const Target& target, int best, float max) {
  constexpr int kSize = kDots;
  if (best < 0) return INT32_MAX;
  Logit logits[kSize];
  VectorLogits(map, part.Load(best), best, classes, target.column, logits);
  int32_t found = INT32_MAX;
#pragma unroll
  for (int i = kSize - 1; i >= 0; --i) {
    if (logits[i].z == max) found = best * kSize + i;
  }
  return found;
}

// The statistics of a plain row (not kGeneral) in shared memory. Computes first the maximum and then the sum,
// both without branches.
template <typename T>
__device__ __forceinline__ Stats PlainStats(const LogitMap<T, false>& map, const RowPart<true>& part,
                                            int classes, const Target& target) {
  constexpr int kSize = kDots;
  Stats s = NoStats();
  int best = -1;
  ForEachVector(part, [&](const uint4& raw, int v) {
    const float max = Vec<float>::Max(raw);
    best = max > s.max ? v : best;
    s.max = fmaxf(s.max, max);
  });
  const float reference = Reference(s.max, map.f);
  float sums[2] = {0.0f, 0.0f};
  ForEachVector(part, [&](const uint4& raw, int) {
    float dots[kSize];
    Vec<float>::Unpack(raw, dots);
#pragma unroll
    for (int i = 0; i < kSize; ++i) sums[i & 1] += Exp2(fmaf(dots[i], map.f, -reference));
  });
  s.sum = sums[0] + sums[1];
  s.arg = FindClass(map, part, classes, target, best, s.max);
  return s;
}

template <typename T, bool kGeneral, bool kResident>
__device__ __forceinline__ Stats RowStats(const LossTerms& terms, const LogitMap<T, kGeneral>& map,
                                          const RowPart<kResident>& part, int classes, const Target& target) {
  if constexpr (!kGeneral && kResident) return PlainStats(map, part, classes, target);
  constexpr int kSize = kDots;
  Stats s = NoStats();
  int best = -1;
  float reference = 0.0f;
  const bool weigh = kGeneral && terms.smoothing > 0.0f;
  ForEachVector(part, [&](const uint4& raw, int v) {
    Logit logits[kSize];
    VectorLogits(map, raw, v, classes, target.column, logits);
    float max = fmaxf(logits[0].z, logits[1].z);
#pragma unroll
    for (int i = 2; i < kSize; i += 2) max = fmaxf(max, fmaxf(logits[i].z, logits[i + 1].z));
    if (max > s.max) {
      best = v;
      Rebase(s, max, map.f);
      reference = Reference(max, map.f);
    }
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const float d = fmaf(logits[i].z, map.f, -reference);
      const float e = Exp2(d);
      sums[i & 1] += e;
      if constexpr (kGeneral) {
        if (e > 0.0f) s.spread += e * d;
        const int column = v * kSize + i;
        if (weigh && column < classes && column != target.column) {
          s.weighted += ClassWeight(terms, column) * (logits[i].z - target.logit.z);
        }
      }
    }
    s.sum += sums[0] + sums[1];
  });
  s.arg = FindClass(map, part, classes, target, best, s.max);
  return s;
}

// fp16 cannot represent values far above the gradient unit.
template <typename T>
__device__ __forceinline__ float SaturateIf(float x) {
  return std::is_same_v<T, __half> ? SaturateHalf(x) : x;
}

// Writes the elements of vector v of a row, in T.
template <typename T>
__device__ __forceinline__ void StoreElements(T* row, int v, const float (&x)[kDots]) {
  if constexpr (std::is_same_v<T, float>) {
    reinterpret_cast<uint4*>(row)[v] = Vec<float>::Pack(x);
  } else if constexpr (std::is_same_v<T, __half>) {
    alignas(8) const __half2 pairs[2] = {__floats2half2_rn(x[0], x[1]), __floats2half2_rn(x[2], x[3])};
    reinterpret_cast<uint2*>(row)[v] = *reinterpret_cast<const uint2*>(pairs);
  } else {
    alignas(8) const __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(x[0], x[1]),
                                                __floats2bfloat162_rn(x[2], x[3])};
    reinterpret_cast<uint2*>(row)[v] = *reinterpret_cast<const uint2*>(pairs);
  }
}

// Writes element(logit, column) for each column of the part, and dL/ds of the target, to the row `to`. `to`
// may begin where the row of dot products begins. In this case, if the part is not resident, it must be the
// whole row: the gradient of a part lies over the dot products of another part.
template <typename T, bool kGeneral, bool kResident, typename Element>
__device__ __forceinline__ void WriteElements(const LogitMap<T, kGeneral>& map,
                                              const RowPart<kResident>& part, int classes,
                                              const Target& target, const GradientRule& rule, T* to,
                                              Element element) {
  const auto write = [&](const uint4& raw, int v) {
    const int first = v * kDots;
    Logit logits[kDots];
    VectorLogits(map, raw, v, classes, target.column, logits);
    float g[kDots];
#pragma unroll
    for (int i = 0; i < kDots; ++i) {
      g[i] = element(logits[i], kGeneral ? min(first + i, LastColumn(classes)) : 0);
      if (kGeneral && first + i >= classes) g[i] = 0.0f;
      g[i] = SaturateIf<T>(g[i]);
    }
    StoreElements(to, v, g);
  };
  if constexpr (kResident || sizeof(T) == sizeof(float)) {
    ForEachVector(part, write);
  } else {
    ForEachVectorInStep(part, write);
  }
  if (part.Owns(target.column)) {
    // The uniform part is rounded in the same way as rule.target, because the two must be equal if there is
    // only one class.
    const float uniform = __fmul_rn(__fmul_rn(rule.uniform, target.class_weight), rule.target_slope);
    to[target.column] = static_cast<T>(SaturateIf<T>(rule.target - uniform));
  }
}

// Writes dL/ds of the part.
template <typename T, bool kGeneral, bool kResident>
__device__ __forceinline__ void WriteGradient(const LossTerms& terms, const LogitMap<T, kGeneral>& map,
                                              const RowPart<kResident>& part, int classes,
                                              const Target& target, const GradientRule rule, T* to) {
  WriteElements(map, part, classes, target, rule, to, [&](const Logit& logit, int column) {
    return Gradient<kGeneral>(terms, rule, logit, map.f, column);
  });
}

template <typename T, typename Part>
__device__ __forceinline__ void WriteZeros(const Part& part, T* to) {
  const float zeros[kDots] = {};
  for (int v = part.begin + static_cast<int>(threadIdx.x); v < part.end; v += blockDim.x) {
    StoreElements(to, v, zeros);
  }
}

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_ROW_PART_CUH_
