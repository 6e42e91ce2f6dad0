// SPDX-License-Identifier: Apache-2.0
// Helpers that the norm kernels (norm.cu, hopper/norm_backward.cu) share: groups of threads that work on a
// row together (RowGroup), their sums (GroupSum), and rows in shared memory (WarpPart). For the backward
// pass: a row's part of the sums, its gradient, and a block's sums over its rows. norm.h has the formulas.
//
// Thread t of a group has the vectors t, t + size, ... of a row, at most kVectors of them. A vector has eight
// columns.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_NORM_ROWS_CUH_
#define LOSSD_KERNELS_CUDA_KERNELS_NORM_ROWS_CUH_

#include <algorithm>

#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/norm.h"

namespace lossd::kernels::cuda {

inline constexpr int kNormThreads = 512;    // the most threads of a block
inline constexpr int kMostNormVectors = 4;  // the most vectors of a thread
inline constexpr int64_t kMostNormColumns = int64_t{kNormThreads} * kMostNormVectors * 8;

// The threads that share a row: `size` of them, a multiple of 32. A block has one group (kAlone) or several.
// Kernels with kAlone use only the barrier of the block, because few blocks of a kernel that uses more
// barriers fit on a multiprocessor.
template <bool kAlone>
struct RowGroup {
  int size;
  int index;   // of the group, in the block
  int thread;  // of the thread, in the group
  int lane;

  __device__ __forceinline__ explicit RowGroup(int group_size)
      : size(group_size),
        index(kAlone ? 0 : static_cast<int>(threadIdx.x) / group_size),
        thread(kAlone ? static_cast<int>(threadIdx.x) : static_cast<int>(threadIdx.x) % group_size),
        lane(static_cast<int>(threadIdx.x) % 32) {}
  // For groups of more than one warp; a block has at most 8 of them.
  __device__ __forceinline__ void Sync() const {
    if constexpr (kAlone) {
      __syncthreads();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(index + 1), "r"(size) : "memory");
    }
  }
};

// kCount values that are summed over a group at the same time.
template <int kCount>
struct GroupValues {
  float at[kCount];
};

// Computes sums over a group, with the same bits in all its threads. It uses two scratch arrays in turn, so
// that each sum needs only one barrier.
template <bool kAlone, int kCount>
class GroupSum {
 public:
  using Values = GroupValues<kCount>;

  // scratch: [2 * kNormThreads / 32], shared by the block.
  __device__ __forceinline__ GroupSum(const RowGroup<kAlone>& group, Values* scratch)
      : group_(group), own_(scratch + group.index * (group.size / 32)) {}

  __device__ __forceinline__ Values operator()(Values values) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) values.at[k] += __shfl_xor_sync(0xffffffffu, values.at[k], offset);
    }
    if (group_.size == 32) return values;
    Values* warps = own_ + phase_ * (kNormThreads / 32);
    phase_ ^= 1;
    if (group_.lane == 0) warps[group_.thread / 32] = values;
    group_.Sync();
    Values total = warps[0];
    for (int i = 1; i < group_.size / 32; ++i) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) total.at[k] += warps[i].at[k];
    }
    return total;
  }

 private:
  const RowGroup<kAlone>& group_;
  Values* own_;
  int phase_ = 0;
};

// Eight elements from their 16-byte pieces.
template <typename T, int kPieces>
__device__ __forceinline__ void UnpackEight(const uint4 (&pieces)[kPieces], float (&x)[8]) {
  if constexpr (kPieces == 1) {
    Vec<T>::Unpack(pieces[0], x);
  } else {
    float low[4], high[4];
    Vec<T>::Unpack(pieces[0], low);
    Vec<T>::Unpack(pieces[1], high);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[j] = low[j];
      x[4 + j] = high[j];
    }
  }
}

// The layout in shared memory of the vectors of a row that belong to one warp. The warp copies its vectors
// itself, so it needs no barrier across warps.
template <typename T, int kVectors>
struct WarpPart {
  static constexpr int kPieces = sizeof(T) / 2;            // 16-byte pieces of a vector
  static constexpr int kLength = kVectors * 32 * kPieces;  // in pieces

  // fp32 pieces are swapped in pairs, so that eight threads that read every second piece use all banks.
  __device__ __forceinline__ static int Place(int piece) {
    return kPieces == 1 ? piece : piece ^ ((piece >> 3) & 1);
  }
  // Starts the copies of the calling warp's vectors of a row of `vectors` vectors.
  template <bool kAlone>
  __device__ __forceinline__ static void Fetch(uint4* to, const T* row, const RowGroup<kAlone>& group,
                                               int vectors) {
    const auto* from = reinterpret_cast<const uint4*>(row);
    const uint32_t address = SharedAddress(to);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int first = (i * group.size + group.thread - group.lane) * kPieces;
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        const int piece = k * 32 + group.lane;
        if (first + piece < vectors * kPieces) {
          CopyAsync16(address + 16u * static_cast<uint32_t>(i * 32 * kPieces + Place(piece)),
                      from + first + piece);
        }
      }
    }
  }
  // The calling thread's vector i.
  __device__ __forceinline__ static void Load(const uint4* part, int i, int lane, float (&x)[8]) {
    const uint4* own = part + i * 32 * kPieces;
    uint4 pieces[kPieces];
#pragma unroll
    for (int k = 0; k < kPieces; ++k) pieces[k] = own[Place(kPieces * lane + k)];
    UnpackEight<T>(pieces, x);
  }
};

// Iterates over the rows that a group works on, as numbers of raw rows. Reads the number of the next row in
// advance.
class SourceRows {
 public:
  __device__ __forceinline__ SourceRows(const NormParams& p, int64_t first, int64_t step)
      : source_(p.source), rows_(p.rows), row_(first), step_(step), raw_(Read()) {}

  // The compact row that Take() is about to return.
  __device__ __forceinline__ int64_t row() const { return row_; }
  // Returns the next raw row, and goes on to the row after it; -1 past the last row.
  __device__ __forceinline__ int64_t Take() {
    const int64_t taken = raw_;
    row_ += step_;
    raw_ = Read();
    return taken;
  }

 private:
  __device__ __forceinline__ int64_t Read() const {
    if (row_ >= rows_) return -1;
    return source_ != nullptr ? __ldg(source_ + row_) : row_;
  }

  const int32_t* source_;
  int64_t rows_;
  int64_t row_;
  int64_t step_;
  int64_t raw_;
};

template <typename T>
__device__ __forceinline__ T* NormRow(const DeviceMatrix& m, int64_t row) {
  return static_cast<T*>(m.data) + row * m.ld;
}

// Writes vector v of a row.
template <typename T>
__device__ __forceinline__ void StoreVector(T* row, int v, const float (&x)[8]) {
  constexpr int kPieces = sizeof(T) / 2;
  auto* to = reinterpret_cast<uint4*>(row) + v * kPieces;
  if constexpr (kPieces == 1) {
    *to = Vec<T>::Pack(x);
  } else {
    to[0] = Vec<T>::Pack({x[0], x[1], x[2], x[3]});
    to[1] = Vec<T>::Pack({x[4], x[5], x[6], x[7]});
  }
}

// How many threads work on a row, with `vectors` vectors each.
inline int NormGroupSize(int64_t cols, int vectors) {
  const int64_t warp_columns = int64_t{vectors} * 8 * 32;
  return static_cast<int>((cols + warp_columns - 1) / warp_columns) * 32;
}

// True if vectors of eight elements of all rows lie on 16-byte boundaries.
__host__ __device__ __forceinline__ bool NormAligned(const DeviceMatrix& m) {
  return m.ld % 8 == 0 && reinterpret_cast<uintptr_t>(m.data) % 16 == 0;
}

// ---- rows of any kind, which a block reads again for each pass over them ----

__device__ __forceinline__ void* AnyNormRow(const DeviceMatrix& m, int64_t row) {
  return static_cast<uint8_t*>(m.data) + row * m.ld * (m.dtype == DType::kFloat32 ? 4 : 2);
}

// Applies body(first column) to this thread's groups of eight columns.
template <typename Body>
__device__ __forceinline__ void ForEachEight(int64_t cols, Body body) {
  for (int64_t c = static_cast<int64_t>(threadIdx.x) * 8; c < cols; c += static_cast<int64_t>(blockDim.x) * 8)
    body(c);
}

inline int NormThreadsForAny(int64_t cols) {
  return static_cast<int>(std::clamp<int64_t>((cols + 255) / 256 * 32, 32, kNormThreads));
}

// ---- backward pass ----
//
// The template parameter Row is a type that has `facts` (RowFacts), `offset` (unit = x r + offset is the
// normalized value) and Load(i, x, dy), which loads the thread's vector i.

// Values of a row that the backward pass needs, in addition to x and dy. keep: whether the row counts in the
// parameter gradients. raw_row: the row's number in x (NormParams::source).
struct alignas(16) RowFacts {
  float inverse_deviation;
  float mean;
  int32_t keep;
  int32_t raw_row;
};
static_assert(sizeof(RowFacts) == sizeof(uint4));

// The gain of a thread's columns: in registers or, for many columns, in the block's shared memory. In shared
// memory, the low halves of all vectors come first, then the high halves.
template <int kVectors>
class Gain {
 public:
  static constexpr bool kHeld = kVectors <= 3;

  // shared: room for 2 * vectors; readable after the next barrier of the block.
  __device__ __forceinline__ Gain(const float* gain, float4* shared, int vectors,
                                  const RowGroup<false>& group)
      : shared_(shared), vectors_(vectors) {
    if constexpr (kHeld) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        Load8(gain, DType::kFloat32, 8 * (group.thread + i * group.size), 8 * vectors, true, held_[i]);
      }
    } else {
      const auto* from = reinterpret_cast<const float4*>(gain);
      for (int i = threadIdx.x; i < 2 * vectors; i += blockDim.x) {
        shared[(i & 1) * vectors + i / 2] = __ldg(from + i);
      }
    }
  }
  // The gain for the thread's vector i, which is vector v of the row.
  __device__ __forceinline__ void Load(int i, int v, float (&gain)[8]) const {
    if constexpr (kHeld) {
#pragma unroll
      for (int j = 0; j < 8; ++j) gain[j] = held_[i][j];
    } else {
      const float4 low = shared_[v], high = shared_[vectors_ + v];
      gain[0] = low.x, gain[1] = low.y, gain[2] = low.z, gain[3] = low.w;
      gain[4] = high.x, gain[5] = high.y, gain[6] = high.z, gain[7] = high.w;
    }
  }

 private:
  float held_[kHeld ? kVectors : 1][8];
  const float4* shared_;
  int vectors_;
};

// The sums of one thread over its rows, not yet multiplied by the scale of dy.
template <int kVectors>
struct ColumnSums {
  float gain[kVectors][8] = {};
  float shift[kVectors][8] = {};

  // Calls visit(plane, vector of the row, four sums). Planes 0 and 1 are the halves of the gain's vectors,
  // planes 2 and 3 the halves of the shift's vectors.
  template <typename Visit>
  __device__ __forceinline__ void ForEach(int vectors, const RowGroup<false>& group, int planes,
                                          Visit visit) const {
    const auto quad = [](const float* x) { return make_float4(x[0], x[1], x[2], x[3]); };
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = group.thread + i * group.size;
      if (v >= vectors) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        visit(half, v, quad(gain[i] + 4 * half));
        if (planes == 4) visit(2 + half, v, quad(shift[i] + 4 * half));
      }
    }
  }
};

// The row's sums of gain dy and of gain dy unit over this thread's columns. Also adds the row to the column
// sums.
template <typename Row, int kVectors>
__device__ __forceinline__ GroupValues<2> AddRow(const Row& row, const RowGroup<false>& group, int vectors,
                                                 const Gain<kVectors>& gains, ColumnSums<kVectors>& sums) {
  GroupValues<2> total = {};
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int v = group.thread + i * group.size;
    if (v >= vectors) continue;
    float x[8], dy[8], gain[8];
    row.Load(i, x, dy);
    gains.Load(i, v, gain);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float unit = fmaf(x[j], row.facts.inverse_deviation, row.offset);
      const float g = gain[j] * dy[j];
      total.at[0] += g;
      total.at[1] = fmaf(g, unit, total.at[1]);
      if (row.facts.keep != 0) {
        sums.gain[i][j] = fmaf(dy[j], unit, sums.gain[i][j]);
        sums.shift[i][j] += dy[j];
      }
    }
  }
  return total;
}

// dx = r scale (gain dy - mean(gain dy) - unit mean(gain dy unit)), written as gain (f dy) + (a x + b).
template <typename Row, typename X, int kVectors>
__device__ __forceinline__ void WriteGradient(const Row& row, const RowGroup<false>& group, int vectors,
                                              const Gain<kVectors>& gains, float scale, float mean_g,
                                              float mean_g_unit, X* dx) {
  const float f = row.facts.inverse_deviation * scale;
  const float a = -f * row.facts.inverse_deviation * mean_g_unit;
  const float b = -f * fmaf(row.offset, mean_g_unit, mean_g);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int v = group.thread + i * group.size;
    if (v >= vectors) continue;
    float x[8], dy[8], gain[8];
    row.Load(i, x, dy);
    gains.Load(i, v, gain);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = fmaf(gain[j] * f, dy[j], fmaf(a, x[j], b));
    StoreVector(dx, v, x);
  }
}

// Where the sums over a block's rows go: part of row `row` of the gain's matrix [rows, 8 * row_vectors] at
// `partials`, and of the shift's matrix, which follows it.
struct PartialRow {
  float* partials;
  int rows;
  int row;
  int row_vectors;
  int first_vector;  // first vector of the part

  // The place of the part's vector v; planes as in ColumnSums.
  __device__ __forceinline__ float4* Place(int plane, int v) const {
    const int64_t at = (int64_t{plane / 2} * rows + row) * row_vectors + first_vector + v;
    return reinterpret_cast<float4*>(partials) + at * 2 + plane % 2;
  }
};

// Writes scale * the sums of the block's groups, for `vectors` vectors. shared: if there are several groups,
// [groups][4][vectors]: for each group the low and high halves of the gain's vectors, then of the shift's. No
// thread may still read it.
template <int kVectors>
__device__ __forceinline__ void WritePartials(const ColumnSums<kVectors>& sums, float4* shared, int vectors,
                                              const RowGroup<false>& group, bool centred, float scale,
                                              const PartialRow& to) {
  const int groups = static_cast<int>(blockDim.x) / group.size;
  const int planes = centred ? 4 : 2;
  const auto scaled = [scale](const float4& x) {
    return make_float4(scale * x.x, scale * x.y, scale * x.z, scale * x.w);
  };
  if (groups == 1) {
    sums.ForEach(vectors, group, planes,
                 [&](int plane, int v, const float4& sum) { *to.Place(plane, v) = scaled(sum); });
    return;
  }
  float4* own = shared + group.index * 4 * vectors;
  __syncthreads();
  sums.ForEach(vectors, group, planes,
               [&](int plane, int v, const float4& sum) { own[plane * vectors + v] = sum; });
  __syncthreads();
  for (int plane = 0; plane < planes; ++plane) {
    for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
      float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      for (int g = 0; g < groups; ++g) {
        const float4 next = shared[(4 * g + plane) * vectors + v];
        total.x += next.x, total.y += next.y, total.z += next.z, total.w += next.w;
      }
      *to.Place(plane, v) = scaled(total);
    }
  }
}

// "" if rows can be processed as vectors of eight elements, else the reason why not.
inline absl::string_view WhyNotInVectors(const NormParams& p, const NormBackwardParams& b) {
  if (p.x.cols % 8 != 0) return "8 does not divide the columns";
  if (!NormAligned(p.x) || !NormAligned(p.y)) return "rows that are not aligned";
  if (b.dx.data != nullptr && (!NormAligned(b.dx) || b.dx.dtype != p.x.dtype)) {
    return "rows that are not aligned";
  }
  const bool mixed = p.x.dtype != p.y.dtype;
  const bool rare = mixed && (p.y.dtype == DType::kFloat16 ||
                              (p.y.dtype == DType::kBFloat16 && p.x.dtype == DType::kFloat16));
  return rare ? "a rare pair of dtypes" : "";
}

// Calls launch.IfFits<X, Dy>(error) for the dtypes of x and dy, and returns its result: whether the rows fit.
// Returns false if the dtypes are not a pair that heads use (dy in the compute dtype, for fp16 also in fp32),
// or if rows cannot be processed as vectors.
template <typename Launch>
bool LaunchIfPaired(const Launch& launch, const NormParams& p, const NormBackwardParams& b,
                    cudaError_t* error) {
  const DType x = p.x.dtype;
  if (!WhyNotInVectors(p, b).empty()) return false;
  switch (p.y.dtype) {
    case DType::kFloat32:
      if (x == DType::kFloat32) return launch.template IfFits<float, float>(error);
      return x == DType::kFloat16 ? launch.template IfFits<__half, float>(error)
                                  : launch.template IfFits<__nv_bfloat16, float>(error);
    case DType::kBFloat16:
      return x == DType::kFloat32 ? launch.template IfFits<float, __nv_bfloat16>(error)
                                  : launch.template IfFits<__nv_bfloat16, __nv_bfloat16>(error);
    case DType::kFloat16:
      return launch.template IfFits<__half, __half>(error);
  }
  return false;
}

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_NORM_ROWS_CUH_
