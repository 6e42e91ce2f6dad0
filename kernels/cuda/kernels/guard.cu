// SPDX-License-Identifier: Apache-2.0
// The guard of a chunk: one block a slice over the results of its rows, one warp a row over dx.
//
// Bytes: about 40 a row, and D (2 or 4) a row of dx, which has just been written and mostly lies in L2.
#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/gradient_factor.cuh"
#include "kernels/cuda/kernels/guard.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int kGuardThreads = 1024;  // often one block for all rows
constexpr int kRowWarps = 8;

__device__ __forceinline__ bool IsFiniteRow(const GuardParams& p, bool with_entropy, int32_t r) {
  const float lse = p.out.lse[r];
  if (!isfinite(p.out.loss[r]) || !isfinite(lse) || !isfinite(p.out.target_logprob[r])) return false;
  if (with_entropy && !isfinite(p.out.entropy[r])) return false;
  return isfinite(GradientFactor(p.terms, p.in, r, lse) * p.gradient_scale);
}

__global__ void GuardKernel(const __grid_constant__ GuardParams p, bool with_entropy) {
  __shared__ int32_t warp_first[kGuardThreads / 32];
  const int64_t slice = blockIdx.x;
  const int32_t begin = p.slice_begin[slice];
  const int32_t end = p.slice_begin[slice + 1];
  int32_t first = INT32_MAX;
  for (int32_t r = begin + static_cast<int32_t>(threadIdx.x); r < end; r += kGuardThreads) {
    if (p.checks[r] != RowCheck::kNothing && !IsFiniteRow(p, with_entropy, r)) first = min(first, r);
  }
  for (int offset = 16; offset > 0; offset >>= 1) {
    first = min(first, __shfl_xor_sync(0xffffffffu, first, offset));
  }
  if ((threadIdx.x & 31) == 0) warp_first[threadIdx.x >> 5] = first;
  __syncthreads();
  for (int i = 0; i < kGuardThreads / 32; ++i) first = min(first, warp_first[i]);
  const bool good = first == INT32_MAX;
  if (threadIdx.x == 0) p.first_bad[slice] = good ? -1 : first;
  for (int32_t r = begin + static_cast<int32_t>(threadIdx.x); r < end; r += kGuardThreads) {
    p.keep[r] = good && p.accumulate[r] != 0 ? 1 : 0;
  }
}

__global__ void HiddenGuardKernel(const __grid_constant__ HiddenGuardParams p) {
  const int64_t row = p.begin + blockIdx.x * int64_t{kRowWarps} + (threadIdx.x >> 5);
  if (row >= p.end || p.checks[row] != RowCheck::kHiddenGradient) return;
  const DeviceMatrix& m = p.gradient;
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int64_t first = row * m.ld;
  bool bad = false;
  for (int64_t c = lane * 8; c < m.cols; c += 32 * 8) {
    float x[8];
    Load8(m.data, m.dtype, first + c, first + m.cols, true, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      bad |= p.may_overflow ? isnan(x[i]) : !isfinite(x[i] * p.scale);  // 0 past the last column
    }
  }
  if (__any_sync(0xffffffffu, bad) == 0 || lane != 0) return;
  p.loss[row] = NAN;
  const bool not_accumulated = p.accumulate != nullptr && p.accumulate[row] == 0;
  if (p.lost != nullptr && (p.keep[row] != 0 || not_accumulated)) *p.lost = 1;
}

}  // namespace

cudaError_t LaunchGuard(const GuardParams& params, cudaStream_t stream) {
  if (params.slices == 0) return cudaSuccess;
  GuardKernel<<<static_cast<unsigned>(params.slices), kGuardThreads, 0, stream>>>(
      params, params.terms.NeedsEntropy());
  return cudaGetLastError();
}

cudaError_t LaunchHiddenGuard(const HiddenGuardParams& params, cudaStream_t stream) {
  if (params.end <= params.begin) return cudaSuccess;
  const auto blocks = static_cast<unsigned>((params.end - params.begin + kRowWarps - 1) / kRowWarps);
  HiddenGuardKernel<<<blocks, kRowWarps * 32, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace lossd::kernels::cuda
