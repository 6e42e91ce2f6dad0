// SPDX-License-Identifier: Apache-2.0
// Kernels for embedding rows (embedding.h): they gather rows of the weight, or add gradients of such rows to
// the gradient of the weight. All kernels are bound by memory.
//
// Gather: one warp a row. If the element types are the same and rows are 16-byte aligned, a lane copies
// 16-byte vectors, four at a time; otherwise eight elements at a time are converted. Bytes: 2 N D elements;
// the rows of frequent classes come from L2.
//
// Scatter-add: the host has ordered the rows by class (ClassRuns). For a short run, a warp sums kTileColumns
// columns of the run's rows in order, and reads and writes the gradient once. A long run is summed by a block
// instead of a warp: each of the block's warps takes every kWarps-th row, and the sums of the warps are added
// in order. Nothing uses atomics, so the same rows give the same bits. Bytes: 2 N D elements, for the check
// and for the sum, and 8 D of the gradient for each class that has rows.
#include <algorithm>

#include "kernels/cuda/device/kernel_code.h"
#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/embedding.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTileColumns = 32 * 8;  // eight columns a lane
constexpr int kAtOnce = 4;            // loads of a lane in flight

__host__ __device__ constexpr int64_t BytesOf(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// ---- gather ----

// The class of row i; -1: row i of the output becomes 0.
__device__ __forceinline__ int64_t ClassOfRow(const GatherClassesParams& p, int64_t i) {
  const int64_t at = p.map != nullptr ? p.map[i] : i;
  const int64_t place = at < 0 ? -1 : p.targets[at];
  return place < p.classes ? place : -1;
}

// Copies `vectors` 16-byte vectors of each row. Both matrices have the same dtype, and their rows are 16-byte
// aligned.
__global__ void CopyClassesKernel(const __grid_constant__ GatherClassesParams p, int64_t vectors) {
  const int64_t row = blockIdx.x * int64_t{kWarps} + (threadIdx.x >> 5);
  if (row >= p.rows) return;
  const int64_t place = ClassOfRow(p, row);
  const int64_t element = BytesOf(p.out.dtype);
  auto* const to = reinterpret_cast<uint4*>(static_cast<uint8_t*>(p.out.data) + row * p.out.ld * element);
  const auto* const from = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(p.weight.data) +
                                                          max(place, int64_t{0}) * p.weight.ld * element);
  for (int64_t c = threadIdx.x & 31; c < vectors; c += 32 * kAtOnce) {
    uint4 x[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      x[k] = make_uint4(0, 0, 0, 0);
      if (place >= 0 && c + 32 * k < vectors) x[k] = from[c + 32 * k];
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (c + 32 * k < vectors) to[c + 32 * k] = x[k];
    }
  }
}

// As CopyClassesKernel, for other dtypes or rows that are not aligned: converts eight elements at a time.
__global__ void ConvertClassesKernel(const __grid_constant__ GatherClassesParams p, bool aligned) {
  const int64_t row = blockIdx.x * int64_t{kWarps} + (threadIdx.x >> 5);
  if (row >= p.rows) return;
  const int64_t place = ClassOfRow(p, row);
  void* const to = static_cast<uint8_t*>(p.out.data) + row * p.out.ld * BytesOf(p.out.dtype);
  const void* const from = static_cast<const uint8_t*>(p.weight.data) +
                           max(place, int64_t{0}) * p.weight.ld * BytesOf(p.weight.dtype);
  for (int64_t c = (threadIdx.x & 31) * 8; c < p.out.cols; c += kTileColumns) {
    float x[8] = {};
    if (place >= 0) Load8(from, p.weight.dtype, c, p.out.cols, true, x);
    Store8(to, p.out.dtype, c, p.out.cols, aligned, x);
  }
}

// ---- gradients of rows ----

template <typename T>
constexpr DType kTypeOf = DType::kFloat32;
template <>
constexpr DType kTypeOf<__half> = DType::kFloat16;
template <>
constexpr DType kTypeOf<__nv_bfloat16> = DType::kBFloat16;

template <typename T>
__device__ __forceinline__ const T* RawRow(const RawRows& g, int64_t raw) {
  const T* const from = static_cast<const T*>(raw < g.first_rows ? g.first : g.second);
  return from + (raw < g.first_rows ? raw : raw - g.first_rows) * g.cols;
}

// Whether every eighth element of every row lies on a 16-byte boundary.
__host__ __device__ __forceinline__ bool IsAligned(const RawRows& g) {
  return g.cols % 8 == 0 &&
         (reinterpret_cast<uintptr_t>(g.first) | reinterpret_cast<uintptr_t>(g.second)) % 16 == 0;
}

// Grid: one warp a row.
template <typename T>
__global__ void CheckRowGradientsKernel(const __grid_constant__ CheckRowGradientsParams p) {
  const int64_t row = blockIdx.x * int64_t{kWarps} + (threadIdx.x >> 5);
  if (row >= p.rows) return;
  const T* const from = RawRow<T>(p.gradients, p.raw_of_compact[row]);
  const float factor = p.factors[row];
  const bool aligned = IsAligned(p.gradients);
  const int lane = static_cast<int>(threadIdx.x & 31);
  bool bad = false;
#pragma unroll 4
  for (int64_t c = lane * 8; c < p.gradients.cols; c += kTileColumns) {
    float x[8];
    Load8(from, kTypeOf<T>, c, p.gradients.cols, aligned, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) bad |= !isfinite(x[i]) || !isfinite(x[i] * factor);  // 0 past the last column
  }
  bad = __any_sync(0xffffffffu, bad) != 0;
  if (lane == 0) p.bad[row] = bad ? 1.0f : 0.0f;
}

// Grid: one block a slice.
__global__ void GuardRowGradientsKernel(const __grid_constant__ GuardRowGradientsParams p) {
  const int32_t begin = p.slice_begin[blockIdx.x];
  const int32_t end = p.slice_begin[blockIdx.x + 1];
  int32_t first = INT32_MAX;
  for (int32_t r = begin + static_cast<int32_t>(threadIdx.x); r < end; r += kGuardThreads) {
    if (p.bad[r] != 0.0f) first = min(first, r);
  }
  GuardSlice(p, begin, end, first);
}

// Adds the kRows rows at row_order[at], row_order[at + stride], ... to `sums`, for the columns from c on.
// Returns whether one of them is kept.
template <typename T, int kRows>
__device__ __forceinline__ bool AddRowsInOrder(const AddClassRunsParams& p, int64_t at, int64_t stride,
                                               int64_t c, bool aligned, float (&sums)[8]) {
  float x[kRows][8];
  float factor[kRows];
  bool kept[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const int32_t row = p.row_order[at + k * stride];
    kept[k] = p.keep[row] != 0;
    factor[k] = p.factors[row];
    Load8(RawRow<T>(p.gradients, p.raw_of_compact[row]), kTypeOf<T>, c, p.gradients.cols, aligned, x[k]);
  }
  bool any = false;
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    any |= kept[k];
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] = kept[k] ? fmaf(factor[k], x[k][i], sums[i]) : sums[i];
  }
  return any;
}

// The same for every stride-th row of [begin, end).
template <typename T>
__device__ __forceinline__ bool SumRowsInOrder(const AddClassRunsParams& p, int64_t begin, int64_t end,
                                               int64_t stride, int64_t c, float (&sums)[8]) {
  const bool aligned = IsAligned(p.gradients);
  bool any = false;
  int64_t i = begin;
  for (; i + (kAtOnce - 1) * stride < end; i += kAtOnce * stride) {
    any |= AddRowsInOrder<T, kAtOnce>(p, i, stride, c, aligned, sums);
  }
  for (; i < end; i += stride) any |= AddRowsInOrder<T, 1>(p, i, stride, c, aligned, sums);
  return any;
}

// Adds `sums` to the gradient of a class, for the columns from c on, but not beyond the last column.
__device__ __forceinline__ void AddToClass(const AddClassRunsParams& p, int64_t place, int64_t c,
                                           const float (&sums)[8]) {
  float* const to = p.weight_gradient + place * p.ld;
  float total[8];
  Load8(to, DType::kFloat32, c, p.gradients.cols, true, total);
#pragma unroll
  for (int i = 0; i < 8; ++i) total[i] += sums[i];
  Store8(to, DType::kFloat32, c, p.gradients.cols, true, total);
}

// Grid: each of the first long_runs * tiles blocks takes one tile of columns of a long run. Each warp of the
// other blocks takes one tile of a short run. Long runs come first in the arrays. The gradient of a class
// without kept rows is neither read nor written.
template <typename T>
__global__ __launch_bounds__(kThreads) void AddClassRunsKernel(const __grid_constant__ AddClassRunsParams p,
                                                               int64_t tiles) {
  __shared__ float partials[kWarps][kTileColumns];
  const int64_t lane_columns = (threadIdx.x & 31) * 8;
  const int64_t warp = threadIdx.x >> 5;
  const int64_t long_blocks = p.long_runs * tiles;
  float sums[8] = {};
  if (blockIdx.x < long_blocks) {
    const int64_t run = blockIdx.x / tiles;
    const int64_t first_column = (blockIdx.x - run * tiles) * kTileColumns;
    const int64_t begin = p.run_begin[run];
    const int64_t end = begin + p.run_rows[run];
    const bool any = SumRowsInOrder<T>(p, begin + warp, end, kWarps, first_column + lane_columns, sums);
#pragma unroll
    for (int i = 0; i < 8; ++i) partials[warp][lane_columns + i] = sums[i];
    if (__syncthreads_or(any) == 0 || warp > 0) return;
    for (int w = 1; w < kWarps; ++w) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i] += partials[w][lane_columns + i];
    }
    AddToClass(p, p.targets[p.row_order[begin]], first_column + lane_columns, sums);
    return;
  }
  const int64_t item = (blockIdx.x - long_blocks) * kWarps + warp;
  const int64_t run = p.long_runs + item / tiles;
  if (run >= p.runs) return;
  const int64_t c = item % tiles * kTileColumns + lane_columns;
  const int64_t begin = p.run_begin[run];
  if (!SumRowsInOrder<T>(p, begin, begin + p.run_rows[run], 1, c, sums)) return;
  AddToClass(p, p.targets[p.row_order[begin]], c, sums);
}

unsigned WarpBlocks(int64_t warps) { return static_cast<unsigned>((warps + kWarps - 1) / kWarps); }

}  // namespace

cudaError_t LaunchGatherClasses(const GatherClassesParams& params, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  const DeviceMatrix& out = params.out;
  const bool aligned = out.ld % 8 == 0 && reinterpret_cast<uintptr_t>(out.data) % 16 == 0;
  if (aligned && out.cols % 8 == 0 && out.dtype == params.weight.dtype) {
    const int64_t vectors = out.cols * BytesOf(out.dtype) / static_cast<int64_t>(sizeof(uint4));
    CopyClassesKernel<<<WarpBlocks(params.rows), kThreads, 0, stream>>>(params, vectors);
  } else {
    ConvertClassesKernel<<<WarpBlocks(params.rows), kThreads, 0, stream>>>(params, aligned);
  }
  return cudaGetLastError();
}

cudaError_t LaunchCheckRowGradients(const CheckRowGradientsParams& params, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  return WithElement(params.gradients.dtype, [&](auto element) {
    using T = typename decltype(element)::Type;
    CheckRowGradientsKernel<T><<<WarpBlocks(params.rows), kThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

cudaError_t LaunchGuardRowGradients(const GuardRowGradientsParams& params, cudaStream_t stream) {
  if (params.slices == 0) return cudaSuccess;
  GuardRowGradientsKernel<<<static_cast<unsigned>(params.slices), kGuardThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t LaunchAddClassRuns(const AddClassRunsParams& params, cudaStream_t stream) {
  if (params.runs == 0) return cudaSuccess;
  const int64_t tiles = (params.gradients.cols + kTileColumns - 1) / kTileColumns;
  const int64_t short_items = (params.runs - params.long_runs) * tiles;
  const unsigned blocks = static_cast<unsigned>(params.long_runs * tiles) + WarpBlocks(short_items);
  return WithElement(params.gradients.dtype, [&](auto element) {
    using T = typename decltype(element)::Type;
    AddClassRunsKernel<T><<<blocks, kThreads, 0, stream>>>(params, tiles);
    return cudaGetLastError();
  });
}

}  // namespace lossd::kernels::cuda

LOSSD_KERNEL_FILE(Embedding)
