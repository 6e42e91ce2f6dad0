// SPDX-License-Identifier: Apache-2.0
// Kernels that move, mask, reduce and guard rows. All are bound by memory: each element is read once and
// written once, eight at a time. Nothing uses atomics; sums have a fixed order.
#include <algorithm>

#include "kernels/cuda/device/kernel_code.h"
#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/row_loss_math.cuh"
#include "kernels/cuda/kernels/rows.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1 << 20;
constexpr int kPartialColumns = 32;  // columns, and groups of partials, that a block of AddPartials processes
constexpr int kPartialGroups = 16;
constexpr int kPartialLoads = 9;

__device__ __forceinline__ void* RowOf(const DeviceMatrix& m, int64_t row) {
  const int64_t offset = row * m.ld * (m.dtype == DType::kFloat32 ? 4 : 2);
  return static_cast<uint8_t*>(m.data) + offset;
}

// True if every eighth element of every row lies on a 16-byte boundary.
__host__ __device__ __forceinline__ bool Aligned(const DeviceMatrix& m) {
  return m.ld % 8 == 0 && reinterpret_cast<uintptr_t>(m.data) % 16 == 0;
}

__global__ void GatherRowsKernel(DeviceMatrix from, DeviceMatrix to, const int32_t* map, int64_t rows) {
  const bool from_aligned = Aligned(from);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int32_t target = map[row];
    if (target < 0) continue;
    const void* source_row = RowOf(from, row);
    void* target_row = RowOf(to, target);
    for (int64_t c = threadIdx.x * 8; c < to.ld; c += kThreads * 8) {
      float x[8];
      Load8(source_row, from.dtype, c, from.cols, from_aligned, x);
      Store8(target_row, to.dtype, c, to.ld, true, x);
    }
  }
}

__global__ void ScatterRowsKernel(DeviceMatrix from, DeviceMatrix to, const int32_t* map, int64_t rows,
                                  float scale) {
  const bool to_aligned = Aligned(to);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int32_t source = map[row];
    void* target_row = RowOf(to, row);
    for (int64_t c = threadIdx.x * 8; c < to.cols; c += kThreads * 8) {
      float x[8] = {};
      if (source >= 0) Load8(RowOf(from, source), from.dtype, c, from.ld, true, x);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] *= scale;
      Store8(target_row, to.dtype, c, to.cols, to_aligned, x);
    }
  }
}

// Zeroes each row r with flags[r] < limit: with limit 0 the rows that a map leaves out (-1), with limit 1 the
// rows that are not kept (0).
__global__ void ZeroRowsKernel(DeviceMatrix matrix, const int32_t* flags, int32_t limit, int64_t rows) {
  const bool aligned = Aligned(matrix);
  const float zeros[8] = {};
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    if (flags[row] >= limit) continue;
    void* data = RowOf(matrix, row);
    for (int64_t c = threadIdx.x * 8; c < matrix.cols; c += kThreads * 8) {
      Store8(data, matrix.dtype, c, matrix.cols, aligned, zeros);
    }
  }
}

__global__ void ScaleRowsKernel(DeviceMatrix matrix, const float* factors, float scale, const int32_t* keep,
                                int64_t rows) {
  const bool aligned = Aligned(matrix);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const bool kept = keep == nullptr || keep[row] != 0;
    const float factor = scale * factors[row];
    void* data = RowOf(matrix, row);
    for (int64_t c = threadIdx.x * 8; c < matrix.cols; c += kThreads * 8) {
      float x[8];
      Load8(data, matrix.dtype, c, matrix.cols, aligned, x);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = kept ? factor * x[i] : 0.0f;
      Store8(data, matrix.dtype, c, matrix.cols, aligned, x);
    }
  }
}

// partials[split, c]: the sum over the rows of this split. A thread sums eight columns.
__global__ void ColumnSumKernel(DeviceMatrix matrix, const int32_t* keep, const float* factors, int64_t rows,
                                int64_t rows_per_split, float* partials) {
  const int64_t c = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) * 8;
  if (c >= matrix.cols) return;
  const int64_t begin = blockIdx.y * rows_per_split;
  const int64_t end = min(begin + rows_per_split, rows);
  const bool aligned = Aligned(matrix);
  float sum[8] = {};
#pragma unroll 4
  for (int64_t r = begin; r < end; ++r) {
    if (keep != nullptr && keep[r] == 0) continue;
    const float factor = factors != nullptr ? factors[r] : 1.0f;
    float x[8];
    Load8(RowOf(matrix, r), matrix.dtype, c, matrix.cols, aligned, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = fmaf(factor, x[i], sum[i]);
  }
  float* out = partials + blockIdx.y * matrix.cols;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (c + i < matrix.cols) out[c + i] = sum[i];
  }
}

// A block sums kPartialColumns columns. Each of its kPartialGroups groups of threads sums every
// kPartialGroups-th part, with kPartialLoads loads in flight; then the groups are added in order. blockIdx.y:
// 0 for `first`, 1 for `second`.
__global__ void AddPartialsKernel(const float* partials, int64_t parts, int64_t cols, float scale,
                                  float* first, float* second) {
  __shared__ float sums[kPartialGroups][kPartialColumns];
  AwaitKernelBefore();
  LetNextKernelStart();
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kPartialColumns + threadIdx.x;
  const float* from = partials + blockIdx.y * parts * cols + c;
  float* to = (blockIdx.y == 0 ? first : second) + c;
  const float before = threadIdx.y == 0 && c < cols ? *to : 0.0f;
  float sum = 0.0f;
  for (int64_t i = threadIdx.y; i < parts; i += kPartialGroups * kPartialLoads) {
    float loaded[kPartialLoads];
#pragma unroll
    for (int k = 0; k < kPartialLoads; ++k) {
      const int64_t part = i + k * kPartialGroups;
      loaded[k] = part < parts && c < cols ? from[part * cols] : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < kPartialLoads; ++k) sum += loaded[k];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || c >= cols) return;
  for (int i = 1; i < kPartialGroups; ++i) sum += sums[i][threadIdx.x];
  *to = fmaf(scale, sum, before);
}

unsigned RowBlocks(int64_t rows) { return static_cast<unsigned>(std::min(rows, kMaxBlocks)); }

}  // namespace

cudaError_t LaunchGatherRows(const DeviceMatrix& from, const DeviceMatrix& to, const int32_t* map,
                             int64_t rows, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  GatherRowsKernel<<<RowBlocks(rows), kThreads, 0, stream>>>(from, to, map, rows);
  return cudaGetLastError();
}

cudaError_t LaunchScatterRows(const DeviceMatrix& from, const DeviceMatrix& to, const int32_t* map,
                              int64_t rows, float scale, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  ScatterRowsKernel<<<RowBlocks(rows), kThreads, 0, stream>>>(from, to, map, rows, scale);
  return cudaGetLastError();
}

cudaError_t LaunchZeroUnmappedRows(const DeviceMatrix& rows, const int32_t* map, int64_t count,
                                   cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  ZeroRowsKernel<<<RowBlocks(count), kThreads, 0, stream>>>(rows, map, 0, count);
  return cudaGetLastError();
}

cudaError_t LaunchZeroDroppedRows(const DeviceMatrix& matrix, const int32_t* keep, int64_t rows,
                                  cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  ZeroRowsKernel<<<RowBlocks(rows), kThreads, 0, stream>>>(matrix, keep, 1, rows);
  return cudaGetLastError();
}

cudaError_t LaunchScaleRows(const DeviceMatrix& matrix, const float* factors, float scale,
                            const int32_t* keep, int64_t rows, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  ScaleRowsKernel<<<RowBlocks(rows), kThreads, 0, stream>>>(matrix, factors, scale, keep, rows);
  return cudaGetLastError();
}

cudaError_t LaunchColumnSum(const DeviceMatrix& matrix, const int32_t* keep, const float* factors,
                            int64_t rows, float scale, float* partials, float* accumulator,
                            cudaStream_t stream) {
  if (rows == 0 || matrix.cols == 0) return cudaSuccess;
  const int64_t column_blocks = (matrix.cols + kThreads * 8 - 1) / (kThreads * 8);
  // Enough blocks to fill the device, but at least 16 rows each.
  const int64_t wanted = std::clamp<int64_t>(1024 / column_blocks, 1, kColumnSplits);
  const int64_t rows_per_split = std::max<int64_t>((rows + wanted - 1) / wanted, 16);
  const int64_t splits = (rows + rows_per_split - 1) / rows_per_split;
  const dim3 grid(static_cast<unsigned>(column_blocks), static_cast<unsigned>(splits));
  ColumnSumKernel<<<grid, kThreads, 0, stream>>>(matrix, keep, factors, rows, rows_per_split, partials);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  return LaunchAddPartials(partials, splits, matrix.cols, scale, accumulator, nullptr, false, stream);
}

cudaError_t LaunchAddPartials(const float* partials, int64_t parts, int64_t cols, float scale, float* first,
                              float* second, bool start_early, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((cols + kPartialColumns - 1) / kPartialColumns),
                  second != nullptr ? 2 : 1);
  EarlyLaunch launch(grid, dim3(kPartialColumns, kPartialGroups), 0, start_early, stream);
  return cudaLaunchKernelEx(launch.config(), AddPartialsKernel, partials, parts, cols, scale, first, second);
}

// ---- the guard ----
//
// Grid: one block a slice for the results of its rows; one warp a row for dx.
//
// Bytes: about 40 a row, and for dx 2 D or 4 D a row. dx has just been written and is mostly in L2.

namespace {

constexpr int kRowWarps = 8;

__device__ __forceinline__ bool IsFiniteRow(const GuardParams& p, bool with_entropy, int32_t r) {
  const float lse = p.out.lse[r];
  if (!isfinite(p.out.loss[r]) || !isfinite(lse) || !isfinite(p.out.target_logprob[r])) return false;
  if (with_entropy && !isfinite(p.out.entropy[r])) return false;
  return isfinite(GradientFactor(p.terms, p.in, r, lse, p.out.target_logprob[r]) * p.gradient_scale);
}

__global__ void GuardKernel(const __grid_constant__ GuardParams p, bool with_entropy) {
  const int32_t begin = p.slice_begin[blockIdx.x];
  const int32_t end = p.slice_begin[blockIdx.x + 1];
  int32_t first = INT32_MAX;
  for (int32_t r = begin + static_cast<int32_t>(threadIdx.x); r < end; r += kGuardThreads) {
    if (p.checks[r] != RowCheck::kNothing && !IsFiniteRow(p, with_entropy, r)) first = min(first, r);
  }
  GuardSlice(p, begin, end, first);
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
  p.loss[row] = NAN;  // the next guard finds the row by it
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

LOSSD_KERNEL_FILE(Rows)
