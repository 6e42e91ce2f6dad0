// SPDX-License-Identifier: Apache-2.0
// What the norm kernels share: groups of threads that work on a row together, their sums, rows that come
// through shared memory.
//
// A group's thread t has the vectors (of eight columns) t, t + size, ... of a row, at most kVectors.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_NORM_NORM_ROWS_CUH_
#define LOSSD_KERNELS_CUDA_KERNELS_NORM_NORM_ROWS_CUH_

#include <algorithm>

#include "kernels/cuda/kernels/async_copy.cuh"
#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/norm/norm.h"

namespace lossd::kernels::cuda {

inline constexpr int kNormThreads = 512;    // most of a block
inline constexpr int kMostNormVectors = 4;  // of a thread
inline constexpr int64_t kMostNormColumns = int64_t{kNormThreads} * kMostNormVectors * 8;

// The threads that share a row: `size` of them, a multiple of 32. A block has one group (kAlone) or several;
// a kernel that names more barriers than the block's own leaves room for few blocks on a multiprocessor.
template <bool kAlone>
struct RowGroup {
  int size;
  int index;   // of the group in the block
  int thread;  // in the group
  int lane;

  __device__ __forceinline__ explicit RowGroup(int group_size)
      : size(group_size),
        index(kAlone ? 0 : static_cast<int>(threadIdx.x) / group_size),
        thread(kAlone ? static_cast<int>(threadIdx.x) : static_cast<int>(threadIdx.x) % group_size),
        lane(static_cast<int>(threadIdx.x) % 32) {}
  // For groups of more than a warp; there are at most 8 of them in a block.
  __device__ __forceinline__ void Sync() const {
    if constexpr (kAlone) {
      __syncthreads();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(index + 1), "r"(size) : "memory");
    }
  }
};

// Numbers that are summed over a group together.
template <int kCount>
struct GroupValues {
  float at[kCount];
};

// Sums over a group, the same bits in all its threads. Two scratch arrays are used in turn, so that one
// barrier a sum is enough.
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

// The vectors of a row that belong to one warp, as they lie in shared memory. The warp copies them itself, so
// that it needs no barrier but its own.
template <typename T, int kVectors>
struct WarpPart {
  static constexpr int kPieces = sizeof(T) / 2;            // of 16 bytes in a vector
  static constexpr int kLength = kVectors * 32 * kPieces;  // in pieces

  // fp32 pieces are swapped in places, so that eight threads that read every second one hit all banks.
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

// The rows a group takes in turn, as raw rows; the next one's place is read ahead.
class SourceRows {
 public:
  __device__ __forceinline__ SourceRows(const NormParams& p, int64_t first, int64_t step)
      : source_(p.source), rows_(p.rows), row_(first), step_(step), raw_(Read()) {}

  // The compact row that Take() is about to return.
  __device__ __forceinline__ int64_t row() const { return row_; }
  // -1 past the last row.
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

// Vector v of a row.
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

// How many threads a row takes, with `vectors` vectors each.
inline int NormGroupSize(int64_t cols, int vectors) {
  const int64_t warp_columns = int64_t{vectors} * 8 * 32;
  return static_cast<int>((cols + warp_columns - 1) / warp_columns) * 32;
}

// True if vectors of eight elements of all rows lie on 16-byte boundaries.
__host__ __device__ __forceinline__ bool NormAligned(const DeviceMatrix& m) {
  return m.ld % 8 == 0 && reinterpret_cast<uintptr_t>(m.data) % 16 == 0;
}

// ---- rows of any kind, which a block reads again for each pass ----

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

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_NORM_NORM_ROWS_CUH_
