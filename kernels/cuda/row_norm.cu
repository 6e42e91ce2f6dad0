// LayerNorm and RMSNorm.
//
// Rows of 16-bit elements with up to kMostHeldColumns columns (a multiple of 8) stay in registers as they are
// stored: a group of threads works on one row, thread t of it on the columns 8 (t + i * group) ... + 7, i <
// kVectors. Other rows are read again for each pass (the "any" kernels). Bytes: forward reads x and writes y;
// backward reads x and dy and writes dx. Gain and shift gradients are summed in shared memory over the rows
// a group sees and over the groups of a block (one block a multiprocessor, so that few partial sums are
// written), and over blocks by a second kernel; each in a fixed order.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/row_norm.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kRowsAtOnce =
    2;  // of a group in the backward kernel: one barrier and one load of the gain for both
constexpr int kMostHeldColumns = 16384;

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

__device__ __forceinline__ void AddEight(float* sums, int64_t c, int64_t cols, const float (&x)[8]) {
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
        AddEight(gain_sums, c, cols, product);
        if (p.centred) AddEight(shift_sums, c, cols, dy);
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

__device__ __forceinline__ float AddLanes(float a, int offset) {
  return a + __shfl_xor_sync(0xffffffffu, a, offset);
}
__device__ __forceinline__ float4 AddLanes(float4 a, int offset) {
  return make_float4(AddLanes(a.x, offset), AddLanes(a.y, offset), AddLanes(a.z, offset),
                     AddLanes(a.w, offset));
}
__device__ __forceinline__ void AddTo(float& sum, float a) { sum += a; }
__device__ __forceinline__ void AddTo(float4& sum, float4 a) {
  sum.x += a.x;
  sum.y += a.y;
  sum.z += a.z;
  sum.w += a.w;
}

// Sum of a float or float4 over a group, the same bits in all its threads. `scratch` is used alternately
// (`phase`), so that one barrier is enough.
template <typename Value, bool kAlone>
__device__ __forceinline__ Value GroupSum(const RowGroup<kAlone>& group, Value value,
                                          Value (*scratch)[kMaxThreads / 32], int phase) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) value = AddLanes(value, offset);
  if (group.size == 32) return value;
  Value* own = scratch[phase] + group.index * (group.size / 32);
  if ((group.thread & 31) == 0) own[group.thread / 32] = value;
  group.Sync();
  Value total = own[0];
  for (int i = 1; i < group.size / 32; ++i) AddTo(total, own[i]);
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
      raw[i] = v < vectors ? __ldcs(from + v) : make_uint4(0, 0, 0, 0);  // read once: spare L1
    }
  }
};

__device__ __forceinline__ void SplitEight(const float4& low, const float4& high, float (&x)[8]) {
  x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
  x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

__device__ __forceinline__ void LoadFloats8(const float* from, int v, float (&x)[8]) {
  const auto* p = reinterpret_cast<const float4*>(from) + 2 * v;
  SplitEight(__ldg(p), __ldg(p + 1), x);
}

// One block a row.
template <typename T, int kVectors>
__global__ __launch_bounds__(kMaxThreads) void NormForwardKernel(const __grid_constant__ NormParams p) {
  __shared__ float scratch[2][kMaxThreads / 32];
  const RowGroup<true> group(blockDim.x);
  const int64_t row = blockIdx.x;
  const int vectors = static_cast<int>(p.x.cols) / 8;
  const float inverse_cols = 1.0f / static_cast<float>(p.x.cols);
  HeldRow<T, kVectors> held;
  held.Load(p.x, p.source != nullptr ? p.source[row] : row, group);
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
    mean = GroupSum(group, sum, scratch, 0) * inverse_cols;
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
  const float r = rsqrtf(GroupSum(group, squares, scratch, 1) * inverse_cols + p.epsilon);
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
}

// A group's sums over its rows of one parameter gradient, in shared memory: [vectors] low halves, then as
// many high halves. A thread touches its own columns only.
struct ColumnSums {
  float4* shared;
  int vectors;

  __device__ __forceinline__ void Clear(int v) {
    shared[v] = shared[vectors + v] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  __device__ __forceinline__ void Add(int v, const float (&x)[8]) {
    float4 low = shared[v];
    float4 high = shared[vectors + v];
    low.x += x[0], low.y += x[1], low.z += x[2], low.w += x[3];
    high.x += x[4], high.y += x[5], high.z += x[6], high.w += x[7];
    shared[v] = low;
    shared[vectors + v] = high;
  }
};

// out[0, 8 * vectors) = factor * the sums of all groups, added in group order. sums: those of group 0; the
// others follow at `stride`.
__device__ __forceinline__ void WriteBlockSums(const float4* sums, int vectors, int groups, int stride,
                                               float factor, float* out) {
  for (int i = threadIdx.x; i < 2 * vectors; i += blockDim.x) {
    float4 total = sums[i];
    for (int g = 1; g < groups; ++g) {
      const float4 next = sums[g * stride + i];
      total.x += next.x, total.y += next.y, total.z += next.z, total.w += next.w;
    }
    const int place = i < vectors ? 2 * i : 2 * (i - vectors) + 1;
    reinterpret_cast<float4*>(out)[place] =
        make_float4(factor * total.x, factor * total.y, factor * total.z, factor * total.w);
  }
}

// A row of the backward pass.
template <typename T, int kVectors>
struct BackwardRow {
  HeldRow<T, kVectors> x, dy;
  int64_t raw_row;
  bool exists;
  bool kept;  // goes into the parameter gradients
  float r;
  float offset;  // unit = x r + offset

  __device__ __forceinline__ void Load(const NormParams& p, const NormBackwardParams& b, int64_t row,
                                       const RowGroup<false>& group) {
    exists = row < p.rows;
    const int64_t from = exists ? row : p.rows - 1;
    raw_row = p.source != nullptr ? p.source[from] : from;
    x.Load(p.x, raw_row, group);
    dy.Load(p.y, from, group);
    r = p.inverse_deviation[from];
    offset = p.centred ? -p.mean[from] * r : 0.0f;
    kept = exists && b.partials != nullptr && (b.keep == nullptr || b.keep[from] != 0);
  }
};

// Has x and dy of a row brought into L2, if there is such a row.
template <typename T>
__device__ __forceinline__ void PrefetchRow(const NormParams& p, int64_t row) {
#if __CUDA_ARCH__ >= 900
  if (row >= p.rows) return;
  const auto bytes = static_cast<uint32_t>(p.x.cols * sizeof(T));
  const T* x = static_cast<const T*>(p.x.data) + (p.source != nullptr ? p.source[row] : row) * p.x.ld;
  const T* dy = static_cast<const T*>(p.y.data) + row * p.y.ld;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(x)), "r"(bytes));
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(dy)), "r"(bytes));
#endif
}

// Adds the row's part of vector i to the columns' sums and to gain dy, gain dy unit.
template <typename T, int kVectors>
__device__ __forceinline__ void AddRow(const BackwardRow<T, kVectors>& row, int i, const float (&gain)[8],
                                       float (&gain_sum)[8], float (&shift_sum)[8], float& sum_g,
                                       float& sum_g_unit) {
  float unit[8], dy[8];
  Vec<T>::Unpack(row.x.raw[i], unit);
  Vec<T>::Unpack(row.dy.raw[i], dy);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float product = dy[j] * fmaf(unit[j], row.r, row.offset);
    sum_g = fmaf(gain[j], dy[j], sum_g);
    sum_g_unit = fmaf(gain[j], product, sum_g_unit);
    if (row.kept) {
      gain_sum[j] += product;
      shift_sum[j] += dy[j];
    }
  }
}

// dx = r scale (gain dy - mean(gain dy) - unit mean(gain dy unit)) of vector i.
template <typename T, int kVectors>
__device__ __forceinline__ uint4 RowGradient(const BackwardRow<T, kVectors>& row, int i,
                                             const float (&gain)[8], float scale, float mean_g,
                                             float mean_g_unit) {
  float x[8], dy[8];
  Vec<T>::Unpack(row.x.raw[i], x);
  Vec<T>::Unpack(row.dy.raw[i], dy);
  const float factor = row.r * scale;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float unit = fmaf(x[j], row.r, row.offset);
    x[j] = factor * fmaf(-unit, mean_g_unit, fmaf(gain[j], dy[j], -mean_g));
  }
  return Vec<T>::Pack(x);
}

// Groups take pairs of rows in turn; while one computes, others load.
template <typename T, int kVectors>
__global__ __launch_bounds__(kMaxThreads,
                             1) void NormBackwardKernel(const __grid_constant__ NormParams p,
                                                        const __grid_constant__ NormBackwardParams b,
                                                        int group_size) {
  extern __shared__ float4 dynamic_shared[];  // the gain; then per group: gain sums, shift sums
  __shared__ float4 scratch[2][kMaxThreads / 32];
  const RowGroup<false> group(group_size);
  const int groups = static_cast<int>(blockDim.x) / group_size;
  const int vectors = static_cast<int>(p.x.cols) / 8;
  const float inverse_cols = 1.0f / static_cast<float>(p.x.cols);
  const int64_t step = static_cast<int64_t>(gridDim.x) * groups;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * groups + group.index;
  float4* gains = dynamic_shared;  // low halves of the eights, then high halves
  float4* all_sums = dynamic_shared + 2 * vectors;
  ColumnSums gain_sums = {all_sums + group.index * 4 * vectors, vectors};
  ColumnSums shift_sums = {gain_sums.shared + 2 * vectors, vectors};
  if (b.partials != nullptr) {
    for (int v = group.thread; v < vectors; v += group.size) {
      gain_sums.Clear(v);
      shift_sums.Clear(v);
    }
  }
  for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
    gains[v] = __ldg(reinterpret_cast<const float4*>(p.gain) + 2 * v);
    gains[vectors + v] = __ldg(reinterpret_cast<const float4*>(p.gain) + 2 * v + 1);
  }
  __syncthreads();
  int phase = 0;
  for (int64_t row = first; row < p.rows; row += kRowsAtOnce * step) {
    BackwardRow<T, kVectors> a, c;
    a.Load(p, b, row, group);
    c.Load(p, b, row + step, group);
    if (group.thread == 0) {
      PrefetchRow<T>(p, row + kRowsAtOnce * step);
      PrefetchRow<T>(p, row + (kRowsAtOnce + 1) * step);
    }
    float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = group.thread + i * group.size;
      if (v >= vectors) continue;
      float gain[8], gain_sum[8] = {}, shift_sum[8] = {};
      SplitEight(gains[v], gains[vectors + v], gain);
      AddRow(a, i, gain, gain_sum, shift_sum, sums.x, sums.y);
      AddRow(c, i, gain, gain_sum, shift_sum, sums.z, sums.w);
      if (a.kept || c.kept) {
        gain_sums.Add(v, gain_sum);
        if (p.centred) shift_sums.Add(v, shift_sum);
      }
    }
    sums = GroupSum(group, sums, scratch, phase);
    phase ^= 1;
    if (b.dx.data == nullptr) continue;
    const float to_mean_g = p.centred ? inverse_cols : 0.0f;
    T* dx = static_cast<T*>(b.dx.data);
    auto* a_to = reinterpret_cast<uint4*>(dx + a.raw_row * b.dx.ld);
    auto* c_to = reinterpret_cast<uint4*>(dx + c.raw_row * b.dx.ld);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = group.thread + i * group.size;
      if (v >= vectors) continue;
      float gain[8];
      SplitEight(gains[v], gains[vectors + v], gain);
      a_to[v] = RowGradient(a, i, gain, b.scale, sums.x * to_mean_g, sums.y * inverse_cols);
      if (c.exists) c_to[v] = RowGradient(c, i, gain, b.scale, sums.z * to_mean_g, sums.w * inverse_cols);
    }
  }
  if (b.partials == nullptr) return;
  __syncthreads();
  float* out = b.partials + blockIdx.x * p.x.cols;
  WriteBlockSums(all_sums, vectors, groups, 4 * vectors, b.scale, out);
  if (p.centred) {
    WriteBlockSums(all_sums + 2 * vectors, vectors, groups, 4 * vectors, b.scale, out + gridDim.x * p.x.cols);
  }
}

// ---- launches ----

bool FitsRegisters(const NormParams& p) {
  const auto fits = [](const DeviceMatrix& m) {
    return m.dtype != DType::kFloat32 && m.ld % 8 == 0 && reinterpret_cast<uintptr_t>(m.data) % 16 == 0;
  };
  return p.x.cols % 8 == 0 && p.x.dtype == p.y.dtype && fits(p.x) && fits(p.y) &&
         p.x.cols <= kMostHeldColumns;
}

// Threads for a row of which each holds `vectors` times eight columns.
int GroupSize(int64_t cols, int vectors) {
  const int64_t per_warp = int64_t{vectors} * 8 * 32;
  return static_cast<int>((cols + per_warp - 1) / per_warp * 32);
}

template <typename T>
cudaError_t ForwardHeld(const NormParams& p, cudaStream_t stream) {
  constexpr int kVectors = kMostHeldColumns / 8 / kMaxThreads;
  NormForwardKernel<T, kVectors>
      <<<static_cast<unsigned>(p.rows), GroupSize(p.x.cols, kVectors), 0, stream>>>(p);
  return cudaGetLastError();
}

// cudaErrorInvalidValue if the device has too little shared memory for rows of this length.
template <typename T>
cudaError_t BackwardHeld(const NormParams& p, const NormBackwardParams& b, unsigned blocks,
                         cudaStream_t stream) {
  constexpr int kVectors = kMostHeldColumns / 8 / kMaxThreads;
  // At most eight groups: groups of more than a warp have a hardware barrier each.
  const int group = std::max(GroupSize(p.x.cols, kVectors), kMaxThreads / 8);
  const int groups = kMaxThreads / group;
  const auto shared = static_cast<size_t>(2 * groups + 1) * static_cast<size_t>(p.x.cols) * sizeof(float);
  const auto kernel = NormBackwardKernel<T, kVectors>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (error != cudaSuccess) return cudaGetLastError();
  kernel<<<blocks, groups * group, shared, stream>>>(p, b, group);
  return cudaGetLastError();
}

int ThreadsForAny(int64_t cols) {
  return static_cast<int>(std::clamp<int64_t>((cols + 255) / 256 * 32, 32, kMaxThreads));
}

}  // namespace

cudaError_t LaunchNormForward(const NormParams& params, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  if (FitsRegisters(params)) {
    return params.x.dtype == DType::kBFloat16 ? ForwardHeld<__nv_bfloat16>(params, stream)
                                              : ForwardHeld<__half>(params, stream);
  }
  NormForwardAnyKernel<<<static_cast<unsigned>(params.rows), ThreadsForAny(params.x.cols), 0, stream>>>(
      params);
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
  cudaError_t error = cudaErrorInvalidValue;
  if (FitsRegisters(params) && (b.dx.data == nullptr || b.dx.dtype == params.x.dtype)) {
    error = params.x.dtype == DType::kBFloat16 ? BackwardHeld<__nv_bfloat16>(params, b, blocks, stream)
                                               : BackwardHeld<__half>(params, b, blocks, stream);
  }
  if (error == cudaErrorInvalidValue) {
    NormBackwardAnyKernel<<<blocks, ThreadsForAny(cols), 0, stream>>>(params, b);
    error = cudaGetLastError();
  }
  if (error != cudaSuccess || b.partials == nullptr) return error;
  return LaunchAddPartials(b.partials, blocks, cols, 1.0f, b.gain_gradient,
                           params.centred ? b.shift_gradient : nullptr, stream);
}

}  // namespace lossd::kernels::cuda
