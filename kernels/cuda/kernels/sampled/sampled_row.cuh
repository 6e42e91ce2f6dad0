// SPDX-License-Identifier: Apache-2.0
// A row of a matrix of ds as the kernels of sampled gradients see it: what makes sizes and widths of its
// elements, and its groups of classes.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_SAMPLED_SAMPLED_ROW_CUH_
#define LOSSD_KERNELS_CUDA_KERNELS_SAMPLED_SAMPLED_ROW_CUH_

#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/gradient_factor.cuh"
#include "kernels/cuda/kernels/row_loss_math.cuh"
#include "kernels/cuda/kernels/sampled/sampled.h"

namespace lossd::kernels::cuda {

inline constexpr int kGroup = 32;  // classes

inline int GroupsOf(const SampleRowsParams& p) {
  return static_cast<int>((p.elements.classes + kGroup - 1) / kGroup);
}

// What all threads know of their row.
struct RowScale {
  float kappa;      // over the gradient unit
  float factor;     // of the elements
  float relative;   // a over |element|
  float threshold;  // of a
  float width;      // w over |element|
  int target;       // -1: elsewhere
  int target_group;
};

// All levels but 0 are multiples of this: at the last level few classes are taken whatever tau is.
__device__ __forceinline__ float BaseOf(float threshold) { return fmaxf(threshold, 0x1p-24f); }

// At level 0 no less than what widths do not overflow with: elements are up to 2^60 times as large as sizes.
__device__ __forceinline__ float ThresholdAt(float threshold, int level) {
  return level == 0 ? fmaxf(threshold, 0x1p-60f) : ldexpf(BaseOf(threshold), level);
}

__device__ __forceinline__ RowScale ScaleOf(const SampleRowsParams& p, int64_t row, float threshold) {
  RowScale s;
  s.target = p.in.targets[row];
  s.target_group = s.target < 0 ? -1 : s.target / kGroup;
  s.kappa = GradientFactor(p.terms, p.in, row, p.lse[row]);
  s.factor = p.factors != nullptr ? p.factors[row] : 1.0f;
  const float relative = fabsf(s.factor) / s.kappa;
  s.relative = isfinite(relative) ? relative : 0.0f;  // no loss, or not finite: nothing but the target
  s.threshold = threshold;
  s.width = s.relative / s.threshold;
  return s;
}

// Columns of the matrix that hold classes or zeros; what is beyond may hold anything.
__device__ __forceinline__ int64_t PaddedClasses(const SampleRowsParams& p) {
  return (p.elements.classes + 7) / 8 * 8;
}

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
  // Calls body(index in the group, element).
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

// Entries that a row of this width has at most: its points, the target, and what rounding may add; or all
// classes.
__device__ __forceinline__ int MostEntries(const SampleRowsParams& p, float width) {
  return min(static_cast<int>(fminf(width, 1e9f)) + kSpareEntries, static_cast<int>(p.elements.classes));
}

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_SAMPLED_SAMPLED_ROW_CUH_
