// LayerNorm and RMSNorm, one block per row, the row in registers.
//
// A thread owns the columns 8 (t + i blockDim) ... + 7 of every row it sees, i < kVectors; rows longer than
// 8 * kMaxThreads * 4 columns are re-read instead (kVectors = 0). Bytes: forward reads x and writes y;
// backward reads x and dy and writes dx; gain and shift gradients are summed per block in registers over
// the block's rows, written once per block, and added up in block order by a second kernel.
#include <algorithm>

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/row_norm.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kBlocksPerMultiprocessor = 2;  // of the backward kernel: more would write more partial sums

__device__ __forceinline__ void* NormRow(const DeviceMatrix& m, int64_t row) {
  return static_cast<uint8_t*>(m.data) + row * m.ld * (m.dtype == DType::kFloat32 ? 4 : 2);
}

__device__ __forceinline__ bool NormAligned(const DeviceMatrix& m) {
  return m.ld % 8 == 0 && reinterpret_cast<uintptr_t>(m.data) % 16 == 0;
}

// Applies body(i, first column) to this thread's groups of eight columns below `cols`; i is 0 when the
// groups are not held in registers.
template <int kVectors, typename Body>
__device__ __forceinline__ void ForEachGroup(int64_t cols, Body body) {
  const int64_t first = static_cast<int64_t>(threadIdx.x) * 8;
  const int64_t step = static_cast<int64_t>(blockDim.x) * 8;
  if constexpr (kVectors > 0) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (first + i * step < cols) body(i, first + i * step);
    }
  } else {
    for (int64_t c = first; c < cols; c += step) body(0, c);
  }
}

// Eight columns of one row, kept from one pass over the row to the next or read again.
template <int kVectors>
struct RowCache {
  static constexpr bool kHeld = kVectors > 0;
  float held[kHeld ? kVectors : 1][8];

  __device__ __forceinline__ void Fill(const void* row, const DeviceMatrix& m, bool aligned) {
    if constexpr (kHeld) {
      ForEachGroup<kVectors>(m.cols,
                             [&](int i, int64_t c) { Load8(row, m.dtype, c, m.cols, aligned, held[i]); });
    }
  }
  __device__ __forceinline__ void Get(int i, int64_t c, const void* row, const DeviceMatrix& m, bool aligned,
                                      float (&x)[8]) const {
    if constexpr (kHeld) {
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = held[i][j];
    } else {
      Load8(row, m.dtype, c, m.cols, aligned, x);
    }
  }
};

template <int kVectors>
__global__ __launch_bounds__(kMaxThreads) void NormForwardKernel(const __grid_constant__ NormParams p) {
  __shared__ float scratch[33];
  const int64_t row = blockIdx.x;
  const int64_t cols = p.x.cols;
  const float inverse_cols = 1.0f / static_cast<float>(cols);
  const void* x_row = NormRow(p.x, p.source != nullptr ? p.source[row] : row);
  void* y_row = NormRow(p.y, row);
  const bool aligned = NormAligned(p.x);
  RowCache<kVectors> cache;
  cache.Fill(x_row, p.x, aligned);

  float mean = 0.0f;
  if (p.centred) {
    float sum = 0.0f;
    ForEachGroup<kVectors>(cols, [&](int i, int64_t c) {
      float x[8];
      cache.Get(i, c, x_row, p.x, aligned, x);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += x[j];
    });
    mean = BlockSum(sum, scratch) * inverse_cols;
  }
  float squares = 0.0f;
  ForEachGroup<kVectors>(cols, [&](int i, int64_t c) {
    float x[8];
    cache.Get(i, c, x_row, p.x, aligned, x);
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
  ForEachGroup<kVectors>(cols, [&](int i, int64_t c) {
    float x[8], gain[8], shift[8];
    cache.Get(i, c, x_row, p.x, aligned, x);
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

// Sums over this block's rows of one parameter gradient.
template <int kVectors>
struct ColumnSums {
  static constexpr bool kHeld = kVectors > 0;
  float held[kHeld ? kVectors : 1][8];
  float* out;  // this block's [D] partial sums

  __device__ __forceinline__ explicit ColumnSums(float* to) : held{}, out(to) {}
  __device__ __forceinline__ void Clear(int64_t cols) {
    if constexpr (!kHeld) {
      ForEachGroup<kVectors>(cols, [&](int, int64_t c) {
        for (int j = 0; j < 8 && c + j < cols; ++j) out[c + j] = 0.0f;
      });
    }
  }
  __device__ __forceinline__ void Add(int i, int64_t c, int64_t cols, const float (&x)[8]) {
    if constexpr (kHeld) {
#pragma unroll
      for (int j = 0; j < 8; ++j) held[i][j] += x[j];
    } else {
      for (int j = 0; j < 8 && c + j < cols; ++j) out[c + j] += x[j];
    }
  }
  __device__ __forceinline__ void Write(int64_t cols) {
    if constexpr (kHeld) {
      ForEachGroup<kVectors>(cols, [&](int i, int64_t c) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if (c + j < cols) out[c + j] = held[i][j];
        }
      });
    }
  }
};

// partials: [gridDim.x, D] of the gain's sums, then as many of the shift's.
template <int kVectors>
__global__ __launch_bounds__(kMaxThreads) void NormBackwardKernel(
    const __grid_constant__ NormParams p, const __grid_constant__ NormBackwardParams b) {
  __shared__ float scratch[2][33];
  const int64_t cols = p.x.cols;
  const float inverse_cols = 1.0f / static_cast<float>(cols);
  const bool x_aligned = NormAligned(p.x);
  const bool y_aligned = NormAligned(p.y);
  const bool sum_params = b.partials != nullptr;
  float* partials = b.partials + blockIdx.x * cols;
  ColumnSums<kVectors> gain_sums(partials);
  ColumnSums<kVectors> shift_sums(partials + gridDim.x * cols);
  if (sum_params) gain_sums.Clear(cols);
  if (sum_params && p.centred) shift_sums.Clear(cols);

  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const int64_t raw_row = p.source != nullptr ? p.source[row] : row;
    const void* x_row = NormRow(p.x, raw_row);
    const void* y_row = NormRow(p.y, row);
    RowCache<kVectors> x_cache;
    RowCache<kVectors> y_cache;
    x_cache.Fill(x_row, p.x, x_aligned);
    y_cache.Fill(y_row, p.y, y_aligned);
    const float mean = p.centred ? p.mean[row] : 0.0f;
    const float r = p.inverse_deviation[row];
    const bool kept = sum_params && (b.keep == nullptr || b.keep[row] != 0);

    float sum_g = 0.0f;       // of gain dy
    float sum_g_unit = 0.0f;  // of gain dy unit
    ForEachGroup<kVectors>(cols, [&](int i, int64_t c) {
      float unit[8], dy[8], gain[8], product[8];
      x_cache.Get(i, c, x_row, p.x, x_aligned, unit);
      y_cache.Get(i, c, y_row, p.y, y_aligned, dy);
      Load8(p.gain, DType::kFloat32, c, cols, true, gain);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        unit[j] = (unit[j] - mean) * r;
        dy[j] *= b.scale;
        product[j] = dy[j] * unit[j];
        sum_g += gain[j] * dy[j];
        sum_g_unit += gain[j] * product[j];
      }
      if (kept) {
        gain_sums.Add(i, c, cols, product);
        if (p.centred) shift_sums.Add(i, c, cols, dy);
      }
    });
    const float mean_g = p.centred ? BlockSum(sum_g, scratch[0]) * inverse_cols : 0.0f;
    const float mean_g_unit = BlockSum(sum_g_unit, scratch[1]) * inverse_cols;
    if (b.dx.data == nullptr) continue;
    void* dx_row = NormRow(b.dx, raw_row);
    ForEachGroup<kVectors>(cols, [&](int i, int64_t c) {
      float x[8], dy[8], gain[8];
      x_cache.Get(i, c, x_row, p.x, x_aligned, x);
      y_cache.Get(i, c, y_row, p.y, y_aligned, dy);
      Load8(p.gain, DType::kFloat32, c, cols, true, gain);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        x[j] = r * (gain[j] * dy[j] * b.scale - mean_g - (x[j] - mean) * r * mean_g_unit);
      }
      Store8(dx_row, b.dx.dtype, c, cols, NormAligned(b.dx), x);
    });
  }
  if (sum_params) gain_sums.Write(cols);
  if (sum_params && p.centred) shift_sums.Write(cols);
}

int Threads(int64_t cols) {
  return static_cast<int>(std::clamp<int64_t>((cols + 255) / 256 * 32, 32, kMaxThreads));
}

// Groups of eight columns a thread owns, 0 if too many for registers.
int Vectors(int64_t cols) {
  const int64_t groups = (cols + 7) / 8;
  if (groups <= kMaxThreads) return 1;
  if (groups <= 2 * kMaxThreads) return 2;
  return groups <= 4 * kMaxThreads ? 4 : 0;
}

int64_t BackwardBlocks(int multiprocessors) { return int64_t{kBlocksPerMultiprocessor} * multiprocessors; }

}  // namespace

cudaError_t LaunchNormForward(const NormParams& params, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(params.rows);
  const int threads = Threads(params.x.cols);
  switch (Vectors(params.x.cols)) {
    case 1:
      NormForwardKernel<1><<<blocks, threads, 0, stream>>>(params);
      break;
    case 2:
      NormForwardKernel<2><<<blocks, threads, 0, stream>>>(params);
      break;
    case 4:
      NormForwardKernel<4><<<blocks, threads, 0, stream>>>(params);
      break;
    default:
      NormForwardKernel<0><<<blocks, threads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

int64_t NormPartialFloats(int64_t hidden_size, int multiprocessors) {
  return 2 * BackwardBlocks(multiprocessors) * hidden_size;
}

cudaError_t LaunchNormBackward(const NormParams& params, const NormBackwardParams& backward,
                               int multiprocessors, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  const int64_t cols = params.x.cols;
  const int64_t blocks = std::min(params.rows, BackwardBlocks(multiprocessors));
  NormBackwardParams b = backward;
  if (b.gain_gradient == nullptr) b.partials = nullptr;
  const auto grid = static_cast<unsigned>(blocks);
  const int threads = Threads(cols);
  switch (Vectors(cols)) {
    case 1:
      NormBackwardKernel<1><<<grid, threads, 0, stream>>>(params, b);
      break;
    case 2:
      NormBackwardKernel<2><<<grid, threads, 0, stream>>>(params, b);
      break;
    case 4:
      NormBackwardKernel<4><<<grid, threads, 0, stream>>>(params, b);
      break;
    default:
      NormBackwardKernel<0><<<grid, threads, 0, stream>>>(params, b);
  }
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess || b.partials == nullptr) return error;
  error = LaunchAddPartials(b.partials, blocks, cols, 1.0f, b.gain_gradient, stream);
  if (error != cudaSuccess || !params.centred) return error;
  return LaunchAddPartials(b.partials + blocks * cols, blocks, cols, 1.0f, b.shift_gradient, stream);
}

}  // namespace lossd::kernels::cuda
