// SPDX-License-Identifier: Apache-2.0
// The columns of a matrix row that each thread of a block has, sums over them, and how they are stored.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_FILTERED_ROW_COLUMNS_CUH_
#define LOSSD_KERNELS_CUDA_KERNELS_FILTERED_ROW_COLUMNS_CUH_

#include <type_traits>

#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/element_type.cuh"

namespace lossd::kernels::cuda {

// The sums over a warp of kCount values at once; lane l gets that of value l / (32 / kCount).
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

// A thread's columns of a matrix row: vectors threadIdx.x, threadIdx.x + blockDim.x, ...
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

// scale times the sums as row `row` of a matrix [rows, ld] of `dtype`: T or fp32.
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

// A kernel's Division<kVectors> says with how many threads a block may be launched whose threads hold so many
// 16-byte vectors each. Calls launch(Element<T>(), std::integral_constant<int, kVectors>(), threads) with the
// fewest vectors that hold a row of `ld` elements, and with the threads that this takes. A row that none
// holds is cudaErrorInvalidValue.
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

#endif  // LOSSD_KERNELS_CUDA_KERNELS_FILTERED_ROW_COLUMNS_CUH_
