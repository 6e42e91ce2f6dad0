// LayerNorm and RMSNorm.
//
// Rows of 16-bit elements with up to 16384 columns (a multiple of 8) stay in registers as they are stored: a
// group of threads works on one row, thread t of it on the columns 8 (t + i * group) ... + 7, i < kVectors.
// Other rows are read again for each pass (the "any" kernels).
// Bytes: forward reads x and writes y; backward reads x and dy and writes dx. Gain and shift gradients
// are summed in registers over the rows a group sees (one block a multiprocessor, so that few partial sums
// are written), over the groups of a block in shared memory, and over blocks by a second kernel; each in a
// fixed order.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/row_norm.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kForwardThreadsPerSm = 1024;

__device__ __forceinline__ void* NormRow(const DeviceMatrix& m, int64_t row) {
  return static_cast<uint8_t*>(m.data) + row * m.ld * (m.dtype == DType::kFloat32 ? 4 : 2);
}

__device__ __forceinline__ bool NormAligned(const DeviceMatrix& m) {
  return m.ld % 8 == 0 && reinterpret_cast<uintptr_t>(m.data) % 16 == 0;
}

// Applies body(first column) to this thread's groups of eight columns.
template <typename Body>
__device__ __forceinline__ void ForEachGroup(int64_t cols, Body body) {
  for (int64_t c = static_cast<int64_t>(threadIdx.x) * 8; c < cols; c += static_cast<int64_t>(blockDim.x) * 8)
    body(c);
}

// Any dtype and number of columns; one block a row.
__global__ __launch_bounds__(kMaxThreads) void NormForwardAnyKernel(const __grid_constant__ NormParams p) {
  __shared__ float scratch[33];
  const int64_t row = blockIdx.x;
  const int64_t cols = p.x.cols;
  const float inverse_cols = 1.0f / static_cast<float>(cols);
  const void* x_row = NormRow(p.x, p.source != nullptr ? p.source[row] : row);
  void* y_row = NormRow(p.y, row);
  const bool aligned = NormAligned(p.x);
  float mean = 0.0f;
  if (p.centred) {
    float sum = 0.0f;
    ForEachGroup(cols, [&](int64_t c) {
      float x[8];
      Load8(x_row, p.x.dtype, c, cols, aligned, x);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += x[j];
    });
    mean = BlockSum(sum, scratch) * inverse_cols;
  }
  float squares = 0.0f;
  ForEachGroup(cols, [&](int64_t c) {
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
  ForEachGroup(cols, [&](int64_t c) {
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

__device__ __forceinline__ void AddTo(float* sums, int64_t c, int64_t cols, const float (&x)[8]) {
  for (int j = 0; j < 8 && c + j < cols; ++j) sums[c + j] += x[j];
}

// partials: [gridDim.x, D] of the gain's sums, then as many of the shift's; likewise below.
__global__ __launch_bounds__(kMaxThreads) void NormBackwardAnyKernel(
    const __grid_constant__ NormParams p, const __grid_constant__ NormBackwardParams b) {
  __shared__ float scratch[2][33];
  const int64_t cols = p.x.cols;
  const float inverse_cols = 1.0f / static_cast<float>(cols);
  const bool x_aligned = NormAligned(p.x);
  const bool y_aligned = NormAligned(p.y);
  float* gain_sums = b.partials + blockIdx.x * cols;
  float* shift_sums = gain_sums + gridDim.x * cols;
  if (b.partials != nullptr) {
    ForEachGroup(cols, [&](int64_t c) {
      for (int j = 0; j < 8 && c + j < cols; ++j) {
        gain_sums[c + j] = 0.0f;
        shift_sums[c + j] = 0.0f;
      }
    });
  }
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const int64_t raw_row = p.source != nullptr ? p.source[row] : row;
    const void* x_row = NormRow(p.x, raw_row);
    const void* y_row = NormRow(p.y, row);
    const float mean = p.centred ? p.mean[row] : 0.0f;
    const float r = p.inverse_deviation[row];
    const bool kept = b.partials != nullptr && (b.keep == nullptr || b.keep[row] != 0);
    float sum_g = 0.0f;       // of gain dy
    float sum_g_unit = 0.0f;  // of gain dy unit
    ForEachGroup(cols, [&](int64_t c) {
      float unit[8], dy[8], gain[8], product[8];
      Load8(x_row, p.x.dtype, c, cols, x_aligned, unit);
      Load8(y_row, p.y.dtype, c, cols, y_aligned, dy);
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
        AddTo(gain_sums, c, cols, product);
        if (p.centred) AddTo(shift_sums, c, cols, dy);
      }
    });
    const float mean_g = p.centred ? BlockSum(sum_g, scratch[0]) * inverse_cols : 0.0f;
    const float mean_g_unit = BlockSum(sum_g_unit, scratch[1]) * inverse_cols;
    if (b.dx.data == nullptr) continue;
    void* dx_row = NormRow(b.dx, raw_row);
    ForEachGroup(cols, [&](int64_t c) {
      float x[8], dy[8], gain[8];
      Load8(x_row, p.x.dtype, c, cols, x_aligned, x);
      Load8(y_row, p.y.dtype, c, cols, y_aligned, dy);
      Load8(p.gain, DType::kFloat32, c, cols, true, gain);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        x[j] = r * (gain[j] * dy[j] * b.scale - mean_g - (x[j] - mean) * r * mean_g_unit);
      }
      Store8(dx_row, b.dx.dtype, c, cols, NormAligned(b.dx), x);
    });
  }
}

// ---- rows in registers ----

// The threads that share a row: `size` of them, a multiple of 32; a block has one group (kAlone) or several.
template <bool kAlone>
struct RowGroup {
  int size;
  int index;   // of the group in the block
  int thread;  // in the group

  __device__ __forceinline__ explicit RowGroup(int group_size)
      : size(group_size),
        index(static_cast<int>(threadIdx.x) / group_size),
        thread(static_cast<int>(threadIdx.x) % group_size) {}
  __device__ __forceinline__ void Sync() const {
    if constexpr (kAlone) {
      __syncthreads();
    } else if (size == 32) {
      __syncwarp();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(index + 1), "r"(size) : "memory");
    }
  }
};

// Sums of two values over a group, the same bits in all its threads. scratch: 2 * 32 floats a group, used
// alternately (`phase`), so that one barrier is enough.
template <bool kAlone>
__device__ __forceinline__ float2 GroupSum(const RowGroup<kAlone>& group, float2 value,
                                           float2 (*scratch)[kMaxThreads / 32], int phase) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    value.x += __shfl_xor_sync(0xffffffffu, value.x, offset);
    value.y += __shfl_xor_sync(0xffffffffu, value.y, offset);
  }
  if (group.size == 32) return value;
  float2* own = scratch[phase] + group.index * (group.size / 32);
  if ((group.thread & 31) == 0) own[group.thread / 32] = value;
  group.Sync();
  float2 total = make_float2(0.0f, 0.0f);
  for (int i = 0; i < group.size / 32; ++i) {
    total.x += own[i].x;
    total.y += own[i].y;
  }
  return total;
}

// One thread's vectors of a row.
template <typename T, int kVectors>
struct HeldRow {
  uint4 raw[kVectors];

  template <bool kAlone>
  __device__ __forceinline__ void Load(const DeviceMatrix& m, int64_t row, const RowGroup<kAlone>& group) {
    const auto* from = reinterpret_cast<const uint4*>(static_cast<const T*>(m.data) + row * m.ld);
    const int vectors = static_cast<int>(m.cols) / 8;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = group.thread + i * group.size;
      raw[i] = v < vectors ? from[v] : make_uint4(0, 0, 0, 0);
    }
  }
};

__device__ __forceinline__ void LoadFloats8(const float* from, int v, float (&x)[8]) {
  const auto* p = reinterpret_cast<const float4*>(from) + 2 * v;
  const float4 low = __ldg(p);
  const float4 high = __ldg(p + 1);
  x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
  x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

// A block works on every gridDim.x-th row; the next row is on its way while one is computed.
template <typename T, int kVectors>
__global__ __launch_bounds__(kMaxThreads, 2) void NormForwardKernel(const __grid_constant__ NormParams p) {
  __shared__ float2 scratch[2][kMaxThreads / 32];
  const RowGroup<true> group(blockDim.x);
  const int vectors = static_cast<int>(p.x.cols) / 8;
  const float inverse_cols = 1.0f / static_cast<float>(p.x.cols);
  const auto raw_row = [&](int64_t row) { return p.source != nullptr ? p.source[row] : row; };
  HeldRow<T, kVectors> held;
  held.Load(p.x, raw_row(blockIdx.x), group);
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    HeldRow<T, kVectors> next = {};
    if (row + gridDim.x < p.rows) next.Load(p.x, raw_row(row + gridDim.x), group);
    float mean = 0.0f;
    if (p.centred) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        float x[8];
        Vec<T>::Unpack(held.raw[i], x);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += x[j];
      }
      mean = GroupSum(group, make_float2(sum, 0.0f), scratch, 0).x * inverse_cols;
    }
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (group.thread + i * group.size >= vectors) continue;
      float x[8];
      Vec<T>::Unpack(held.raw[i], x);
#pragma unroll
      for (int j = 0; j < 8; ++j) squares += (x[j] - mean) * (x[j] - mean);
    }
    squares = GroupSum(group, make_float2(squares, 0.0f), scratch, 1).x;
    const float r = 1.0f / sqrtf(squares * inverse_cols + p.epsilon);
    if (threadIdx.x == 0) {
      p.mean[row] = mean;
      p.inverse_deviation[row] = r;
    }
    auto* to = reinterpret_cast<uint4*>(static_cast<T*>(p.y.data) + row * p.y.ld);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = group.thread + i * group.size;
      if (v >= vectors) continue;
      float x[8], gain[8], shift[8] = {};
      Vec<T>::Unpack(held.raw[i], x);
      LoadFloats8(p.gain, v, gain);
      if (p.centred) LoadFloats8(p.shift, v, shift);
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = (x[j] - mean) * r * gain[j] + shift[j];
      to[v] = Vec<T>::Pack(x);
    }
    held = next;
    // RMSNorm has one reduction a row, whose scratch the next row uses again.
    if (!p.centred) __syncthreads();
  }
}

// A group's sums over its rows of one parameter gradient, of the columns a thread owns: in registers, or
// for long rows in shared memory ([vectors] low halves, then as many high halves).
template <int kVectors, bool kShared>
struct ColumnSums {
  float held[kShared ? 1 : kVectors][8];
  float4* shared;
  int vectors;

  __device__ __forceinline__ ColumnSums(float4* place, int count) : held{}, shared(place), vectors(count) {}
  __device__ __forceinline__ void Clear(const RowGroup<false>& group) {
    if constexpr (kShared) {
      for (int v = group.thread; v < 2 * vectors; v += group.size)
        shared[v] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
  __device__ __forceinline__ void Add(int i, int v, const float (&x)[8]) {
    if constexpr (kShared) {
      float4 low = shared[v];
      float4 high = shared[vectors + v];
      low.x += x[0], low.y += x[1], low.z += x[2], low.w += x[3];
      high.x += x[4], high.y += x[5], high.z += x[6], high.w += x[7];
      shared[v] = low;
      shared[vectors + v] = high;
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) held[i][j] += x[j];
    }
  }
  __device__ __forceinline__ void Get(int i, int v, float (&x)[8]) const {
    if constexpr (kShared) {
      const float4 low = shared[v];
      const float4 high = shared[vectors + v];
      x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
      x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = held[i][j];
    }
  }
};

// Adds up the groups' column sums of a block in group order and writes them to out[0, 8 * vectors).
// `between`: shared memory for as many floats if there are several groups.
template <int kVectors, bool kShared>
__device__ __forceinline__ void WriteBlockSums(const ColumnSums<kVectors, kShared>& sums,
                                               const RowGroup<false>& group, float* between, float* out) {
  const int groups = static_cast<int>(blockDim.x) / group.size;
  for (int turn = 0; turn < groups; ++turn) {
    if (group.index == turn) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int v = group.thread + i * group.size;
        if (v >= sums.vectors) continue;
        float x[8];
        sums.Get(i, v, x);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          float* place = (turn == groups - 1 ? out : between) + 8 * v + j;
          *place = x[j] + (turn == 0 ? 0.0f : between[8 * v + j]);
        }
      }
    }
    __syncthreads();
  }
}

// kShared blocks have one group.
template <typename T, int kVectors, bool kShared>
__global__ __launch_bounds__(kMaxThreads,
                             1) void NormBackwardKernel(const __grid_constant__ NormParams p,
                                                        const __grid_constant__ NormBackwardParams b,
                                                        int group_size) {
  extern __shared__ float4 dynamic_shared[];
  __shared__ float2 scratch[2][kMaxThreads / 32];
  const RowGroup<false> group(group_size);
  const int groups = static_cast<int>(blockDim.x) / group_size;
  const int vectors = static_cast<int>(p.x.cols) / 8;
  const float inverse_cols = 1.0f / static_cast<float>(p.x.cols);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * groups;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * groups + group.index;
  const auto raw_row = [&](int64_t row) { return p.source != nullptr ? p.source[row] : row; };
  ColumnSums<kVectors, kShared> gain_sums(dynamic_shared, vectors);
  ColumnSums<kVectors, kShared> shift_sums(dynamic_shared + 2 * vectors, vectors);
  if (b.partials != nullptr) {
    gain_sums.Clear(group);
    shift_sums.Clear(group);
    __syncthreads();
  }
  HeldRow<T, kVectors> x_held = {}, y_held = {};
  if (first < p.rows) {
    x_held.Load(p.x, raw_row(first), group);
    y_held.Load(p.y, first, group);
  }
  int phase = 0;
  for (int64_t row = first; row < p.rows; row += stride) {
    HeldRow<T, kVectors> x_next = {}, y_next = {};
    if (row + stride < p.rows) {
      x_next.Load(p.x, raw_row(row + stride), group);
      y_next.Load(p.y, row + stride, group);
    }
    const float mean = p.centred ? p.mean[row] : 0.0f;
    const float r = p.inverse_deviation[row];
    const bool kept = b.partials != nullptr && (b.keep == nullptr || b.keep[row] != 0);
    float2 sums = make_float2(0.0f, 0.0f);  // of gain dy, and of gain dy unit
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = group.thread + i * group.size;
      if (v >= vectors) continue;
      float product[8], dy[8], gain[8];
      Vec<T>::Unpack(x_held.raw[i], product);
      Vec<T>::Unpack(y_held.raw[i], dy);
      LoadFloats8(p.gain, v, gain);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        dy[j] *= b.scale;
        product[j] = dy[j] * ((product[j] - mean) * r);
        sums.x += gain[j] * dy[j];
        sums.y += gain[j] * product[j];
      }
      if (kept) {
        gain_sums.Add(i, v, product);
        if (p.centred) shift_sums.Add(i, v, dy);
      }
    }
    sums = GroupSum(group, sums, scratch, phase);
    phase ^= 1;
    if (b.dx.data != nullptr) {
      const float mean_g = p.centred ? sums.x * inverse_cols : 0.0f;
      const float mean_g_unit = sums.y * inverse_cols;
      auto* to = reinterpret_cast<uint4*>(static_cast<T*>(b.dx.data) + raw_row(row) * b.dx.ld);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int v = group.thread + i * group.size;
        if (v >= vectors) continue;
        float x[8], dy[8], gain[8];
        Vec<T>::Unpack(x_held.raw[i], x);
        Vec<T>::Unpack(y_held.raw[i], dy);
        LoadFloats8(p.gain, v, gain);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          x[j] = r * (gain[j] * dy[j] * b.scale - mean_g - (x[j] - mean) * r * mean_g_unit);
        }
        to[v] = Vec<T>::Pack(x);
      }
    }
    x_held = x_next;
    y_held = y_next;
  }
  if (b.partials == nullptr) return;
  auto* between = reinterpret_cast<float*>(dynamic_shared);
  float* out = b.partials + blockIdx.x * p.x.cols;
  WriteBlockSums(gain_sums, group, between, out);
  if (p.centred) WriteBlockSums(shift_sums, group, between, out + gridDim.x * p.x.cols);
}

// ---- launches ----

// How a row is spread over threads; vectors 0: use the kernels for any row.
struct NormPlan {
  int vectors = 0;
  int group = kMaxThreads;
};

NormPlan PlanNorm(const NormParams& p, int most_vectors) {
  const auto fits = [](const DeviceMatrix& m) {
    return m.dtype != DType::kFloat32 && m.ld % 8 == 0 && reinterpret_cast<uintptr_t>(m.data) % 16 == 0;
  };
  const int64_t groups_of_8 = p.x.cols / 8;
  NormPlan plan;
  if (p.x.cols % 8 != 0 || p.x.dtype != p.y.dtype || !fits(p.x) || !fits(p.y) ||
      groups_of_8 > 4 * kMaxThreads) {
    return plan;
  }
  plan.vectors = groups_of_8 > int64_t{most_vectors} * kMaxThreads ? 4 : most_vectors;
  plan.group = static_cast<int>((groups_of_8 + plan.vectors * 32 - 1) / (plan.vectors * 32) * 32);
  return plan;
}

template <typename T>
void ForwardHeld(const NormParams& p, const NormPlan& plan, int multiprocessors, cudaStream_t stream) {
  const int64_t resident = int64_t{multiprocessors} * std::min(kForwardThreadsPerSm / plan.group, 32);
  NormForwardKernel<T, 4><<<static_cast<unsigned>(std::min(p.rows, resident)), plan.group, 0, stream>>>(p);
}

template <typename T, int kVectors, bool kShared>
cudaError_t BackwardHeld(const NormParams& p, const NormBackwardParams& b, int group, unsigned blocks,
                         cudaStream_t stream) {
  const int groups = kShared ? 1 : kMaxThreads / group;
  const auto row_bytes = static_cast<size_t>(p.x.cols) * sizeof(float);
  const size_t shared = kShared ? 2 * row_bytes : (groups > 1 ? row_bytes : 0);
  if (kShared) {
    const cudaError_t error =
        cudaFuncSetAttribute(NormBackwardKernel<T, kVectors, kShared>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (error != cudaSuccess) return error;
  }
  NormBackwardKernel<T, kVectors, kShared><<<blocks, groups * group, shared, stream>>>(p, b, group);
  return cudaGetLastError();
}

template <typename T>
cudaError_t BackwardHeld(const NormParams& p, const NormBackwardParams& b, const NormPlan& plan,
                         unsigned blocks, cudaStream_t stream) {
  return plan.vectors == 2 ? BackwardHeld<T, 2, false>(p, b, plan.group, blocks, stream)
                           : BackwardHeld<T, 4, true>(p, b, plan.group, blocks, stream);
}

int ThreadsForAny(int64_t cols) {
  return static_cast<int>(std::clamp<int64_t>((cols + 255) / 256 * 32, 32, kMaxThreads));
}

}  // namespace

cudaError_t LaunchNormForward(const NormParams& params, int multiprocessors, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  const NormPlan plan = PlanNorm(params, 4);
  if (plan.vectors == 0) {
    NormForwardAnyKernel<<<static_cast<unsigned>(params.rows), ThreadsForAny(params.x.cols), 0, stream>>>(
        params);
  } else if (params.x.dtype == DType::kBFloat16) {
    ForwardHeld<__nv_bfloat16>(params, plan, multiprocessors, stream);
  } else {
    ForwardHeld<__half>(params, plan, multiprocessors, stream);
  }
  return cudaGetLastError();
}

int64_t NormPartialFloats(int64_t hidden_size, int multiprocessors) {
  return 2 * int64_t{multiprocessors} * hidden_size;
}

cudaError_t LaunchNormBackward(const NormParams& params, const NormBackwardParams& backward,
                               int multiprocessors, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  NormBackwardParams b = backward;
  if (b.gain_gradient == nullptr) b.partials = nullptr;
  const int64_t cols = params.x.cols;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(params.rows, multiprocessors));
  const NormPlan plan =
      b.dx.data == nullptr || b.dx.dtype == params.x.dtype ? PlanNorm(params, 2) : NormPlan();
  cudaError_t error = cudaSuccess;
  if (plan.vectors == 0) {
    NormBackwardAnyKernel<<<blocks, ThreadsForAny(cols), 0, stream>>>(params, b);
    error = cudaGetLastError();
  } else if (params.x.dtype == DType::kBFloat16) {
    error = BackwardHeld<__nv_bfloat16>(params, b, plan, blocks, stream);
  } else {
    error = BackwardHeld<__half>(params, b, plan, blocks, stream);
  }
  if (error != cudaSuccess || b.partials == nullptr) return error;
  return LaunchAddPartials(b.partials, blocks, cols, 1.0f, b.gain_gradient,
                           params.centred ? b.shift_gradient : nullptr, stream);
}

}  // namespace lossd::kernels::cuda
