// SPDX-License-Identifier: Apache-2.0
// LayerNorm and RMSNorm forward. Bytes: reads x, writes y, and gain and shift from L1 or L2.
//
// A block holds a row in registers, a long one together with the next: of long rows gain and shift, in fp32,
// are twice what x and y are and would not stay in L1 beside them. Rows of more than kMostNormColumns columns
// or of a number that 8 does not divide are read again for each pass (the "any" kernel).
#include <algorithm>

#include "kernels/cuda/kernels/early_launch.h"
#include "kernels/cuda/kernels/element_type.cuh"
#include "kernels/cuda/kernels/norm/norm_rows.cuh"

namespace lossd::kernels::cuda {
namespace {

constexpr int64_t kPairColumns = 4096;  // rows of at least as many are worked on in pairs

// Any dtype and number of columns; one block a row.
__global__ __launch_bounds__(kNormThreads) void NormForwardAnyKernel(const __grid_constant__ NormParams p) {
  __shared__ float scratch[33];
  const int64_t row = blockIdx.x;
  const int64_t cols = p.x.cols;
  const float inverse_cols = 1.0f / static_cast<float>(cols);
  const void* x_row = AnyNormRow(p.x, p.source != nullptr ? p.source[row] : row);
  void* y_row = AnyNormRow(p.y, row);
  const bool aligned = NormAligned(p.x);
  float mean = 0.0f;
  if (p.centred) {
    float sum = 0.0f;
    ForEachEight(cols, [&](int64_t c) {
      float x[8];
      Load8(x_row, p.x.dtype, c, cols, aligned, x);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += x[j];
    });
    mean = BlockSum(sum, scratch) * inverse_cols;
  }
  float squares = 0.0f;
  ForEachEight(cols, [&](int64_t c) {
    float x[8];
    Load8(x_row, p.x.dtype, c, cols, aligned, x);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float d = c + j < cols ? x[j] - mean : 0.0f;
      squares += d * d;
    }
  });
  const float r = 1.0f / sqrtf(BlockSum(squares, scratch) * inverse_cols + p.epsilon);
  if (threadIdx.x == 0) {
    p.mean[row] = mean;
    p.inverse_deviation[row] = r;
  }
  ForEachEight(cols, [&](int64_t c) {
    float x[8], gain[8], shift[8];
    Load8(x_row, p.x.dtype, c, cols, aligned, x);
    Load8(p.gain, DType::kFloat32, c, cols, true, gain);
    if (p.centred) Load8(p.shift, DType::kFloat32, c, cols, true, shift);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      x[j] = (x[j] - mean) * r * gain[j] + (p.centred ? shift[j] : 0.0f);
      if (c + j >= cols) x[j] = 0.0f;
    }
    Store8(y_row, p.y.dtype, c, p.y.ld, NormAligned(p.y), x);
  });
}

// One thread's vectors of a row.
template <typename T>
struct HeldRow {
  static constexpr int kPieces = sizeof(T) / 2;  // of 16 bytes in a vector
  uint4 raw[kMostNormVectors][kPieces];

  __device__ __forceinline__ void Load(const T* row, const RowGroup<true>& group, int vectors) {
    const auto* from = reinterpret_cast<const uint4*>(row);
#pragma unroll
    for (int i = 0; i < kMostNormVectors; ++i) {
      const int v = group.thread + i * group.size;
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        raw[i][k] =
            v < vectors ? __ldcs(from + v * kPieces + k) : make_uint4(0, 0, 0, 0);  // read once: spare L1
      }
    }
  }
  __device__ __forceinline__ void Unpack(int i, float (&x)[8]) const { UnpackEight<T>(raw[i], x); }
};

// A block works on kRows rows at once, so that gain and shift are loaded once for them.
template <typename T, int kRows>
__global__ __launch_bounds__(kNormThreads, 2) void NormForwardKernel(const __grid_constant__ NormParams p) {
  using Sums = GroupValues<kRows>;
  __shared__ Sums scratch[2 * kNormThreads / 32];
  const RowGroup<true> group(static_cast<int>(blockDim.x));
  GroupSum<true, kRows> group_sum(group, scratch);
  AwaitKernelBefore();
  LetNextKernelStart();
  const int64_t first = int64_t{blockIdx.x} * kRows;
  const int vectors = static_cast<int>(p.x.cols) / 8;
  const float inverse_cols = 1.0f / static_cast<float>(p.x.cols);
  HeldRow<T> rows[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const int64_t row = min(first + k, p.rows - 1);
    rows[k].Load(NormRow<T>(p.x, p.source != nullptr ? p.source[row] : row), group, vectors);
  }
  Sums mean = {};
  if (p.centred) {
    Sums sum = {};
#pragma unroll
    for (int i = 0; i < kMostNormVectors; ++i) {
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        float x[8];
        rows[k].Unpack(i, x);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum.at[k] += x[j];
      }
    }
    mean = group_sum(sum);
#pragma unroll
    for (int k = 0; k < kRows; ++k) mean.at[k] *= inverse_cols;
  }
  Sums squares = {};
#pragma unroll
  for (int i = 0; i < kMostNormVectors; ++i) {
    if (group.thread + i * group.size >= vectors) continue;
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      float x[8];
      rows[k].Unpack(i, x);
#pragma unroll
      for (int j = 0; j < 8; ++j) squares.at[k] += (x[j] - mean.at[k]) * (x[j] - mean.at[k]);
    }
  }
  Sums r = group_sum(squares);
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    r.at[k] = rsqrtf(r.at[k] * inverse_cols + p.epsilon);
    if (group.thread == 0 && first + k < p.rows) {
      p.mean[first + k] = mean.at[k];
      p.inverse_deviation[first + k] = r.at[k];
    }
  }
#pragma unroll
  for (int i = 0; i < kMostNormVectors; ++i) {
    const int v = group.thread + i * group.size;
    if (v >= vectors) continue;
    float gain[8], shift[8];
    Load8(p.gain, DType::kFloat32, 8 * v, p.x.cols, true, gain);
    Load8(p.shift, DType::kFloat32, 8 * v, p.centred ? p.x.cols : 0, true, shift);
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      if (first + k >= p.rows) continue;
      float x[8];
      rows[k].Unpack(i, x);
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = fmaf((x[j] - mean.at[k]) * r.at[k], gain[j], shift[j]);
      Store8(AnyNormRow(p.y, first + k), p.y.dtype, 8 * v, p.y.cols, true, x);
    }
  }
}

template <typename T, int kRows>
cudaError_t LaunchHeld(const NormParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((p.rows + kRows - 1) / kRows);
  const auto threads = static_cast<unsigned>(NormGroupSize(p.x.cols, kMostNormVectors));
  EarlyLaunch launch(blocks, threads, 0, limits.has_clusters, stream);
  return cudaLaunchKernelEx(launch.config(), NormForwardKernel<T, kRows>, p);
}

template <typename T>
cudaError_t LaunchHeld(const NormParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  // Two fp32 rows do not fit into the registers.
  if constexpr (sizeof(T) == 2) {
    if (p.x.cols >= kPairColumns) return LaunchHeld<T, 2>(p, limits, stream);
  }
  return LaunchHeld<T, 1>(p, limits, stream);
}

absl::string_view WhyNotHeld(const NormParams& p) {
  if (p.x.cols % 8 != 0) return "8 does not divide the columns";
  if (p.x.cols > kMostNormColumns) return "long rows";
  return p.y.ld != p.x.cols || !NormAligned(p.x) || !NormAligned(p.y) ? "rows that are not aligned" : "";
}

}  // namespace

NormPlan PlanNormForward(const NormParams& params) {
  const absl::string_view reason = WhyNotHeld(params);
  return {reason.empty() ? NormRows::kRegisters : NormRows::kNowhere, reason};
}

cudaError_t LaunchNormForward(const NormParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  if (PlanNormForward(params).rows == NormRows::kNowhere) {
    NormForwardAnyKernel<<<static_cast<unsigned>(params.rows), NormThreadsForAny(params.x.cols), 0, stream>>>(
        params);
    return cudaGetLastError();
  }
  return WithElement(params.x.dtype, [&](auto element) {
    return LaunchHeld<typename decltype(element)::Type>(params, limits, stream);
  });
}

}  // namespace lossd::kernels::cuda
