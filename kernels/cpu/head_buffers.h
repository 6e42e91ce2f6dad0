// SPDX-License-Identifier: Apache-2.0
// Everything a head on the CPU keeps in memory, laid out in one arena per memory kind (HeadBuffers); the
// order in which it gathers the rows of a chunk (RowOrder); and the rows of a chunk's slices in host memory,
// as the head reads and writes them.
//
// Functions are stateless, and thread-safe on different rows.
#ifndef LOSSD_KERNELS_CPU_HEAD_BUFFERS_H_
#define LOSSD_KERNELS_CPU_HEAD_BUFFERS_H_

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cpu/memory.h"
#include "kernels/cpu/row_loss.h"
#include "kernels/head_config.h"
#include "kernels/replica.h"

namespace lossd::kernels {

inline constexpr int64_t kMostChunkRows = 4096;

// Where a gathered row came from.
struct RowSource {
  int64_t slice;
  int64_t row;
};

// Pointers into the arenas; R = chunk rows. A tensor that the head does not have is null. Tensors begin with
// the first row that the replica keeps (StoredRowsOf). C are the classes that it computes.
struct HeadBuffers {
  static constexpr size_t kParams = 5;
  static constexpr size_t kRoles = 4;

  float*& tensor(TensorId id) { return tensors[static_cast<size_t>(id.param)][static_cast<size_t>(id.role)]; }
  float* tensor(TensorId id) const {
    return tensors[static_cast<size_t>(id.param)][static_cast<size_t>(id.role)];
  }
  float* value(Param param) const { return tensor({param, Role::kValue}); }
  float* gradient(Param param) const { return tensor({param, Role::kGradient}); }

  std::array<std::array<float*, kRoles>, kParams> tensors{};

  float* hidden = nullptr;             // [R, D], after the norm
  float* unit = nullptr;               // [R, D], after the norm but for gain and shift; only with a norm
  float* inverse_deviation = nullptr;  // [R]; only with a norm
  float* grad_hidden = nullptr;        // [R, D]
  float* logits = nullptr;             // [R, C], then their gradient
  RowSource* sources = nullptr;        // [R]
  RowResult* results = nullptr;        // [R]
  // Only of a head that is split by vocabulary:
  RowStatistics* statistics = nullptr;  // [R], of the replica's classes
  RowStatistics* merged = nullptr;      // [R], of all classes
  GradientSums* gradients = nullptr;    // [R], of the replica's classes
  float* bad_rows = nullptr;            // [2 R], of this part and of all: not 0 where dx is not finite
  float* norm_sums = nullptr;           // [2 D]; only with a norm
};

// Arenas of a head, indexed by MemoryKind.
using HeadArenas = std::array<Arena, kMemoryKinds>;

// Takes all arrays of a head with `chunk_rows` rows a chunk.
HeadBuffers LayOut(const HeadConfig& config, Replica replica, int64_t chunk_rows, HeadArenas& arenas);
// The bytes LayOut takes, by kind.
MemoryBytes PlanBuffers(const HeadConfig& config, Replica replica, int64_t chunk_rows);
// Zeroed arenas for such a plan.
absl::StatusOr<HeadArenas> AllocateArenas(const MemoryBytes& plan);

// The most rows a chunk may have so that the workspace stays within `workspace_bytes`, at most
// kMostChunkRows; the same for all replicas. RESOURCE_EXHAUSTED naming the bytes if one row does not fit.
absl::StatusOr<int64_t> ChunkRowsFor(const HeadConfig& config, int replicas, int64_t workspace_bytes);

// In which order the rows of a chunk are gathered, so that every later step works on a contiguous range.
// Gathered rows come in four groups: accumulated only, accumulated with grad_hidden, grad_hidden only,
// neither. Rows without target are left out. Within a group the order is that of the slices.
struct RowOrder {
  int64_t rows = 0;          // all gathered rows
  int64_t accumulated = 0;   // [0, accumulated) reach the accumulators
  int64_t hidden_begin = 0;  // [hidden_begin, hidden_end) have grad_hidden
  int64_t hidden_end = 0;
  // [0, with_gradient()) need the gradient of their logits.
  int64_t with_gradient() const { return hidden_end; }
};

// Writes sources[0 .. rows). `accumulate`: Chunk::accumulate_gradients.
RowOrder OrderRows(absl::Span<const Slice> slices, bool accumulate, RowSource* sources);

// Where the retained rows of a slice lie; the slice has a retained_offset.
inline uint8_t* RetainedRows(const Chunk& chunk, const Slice& slice) {
  return static_cast<CpuRetained*>(chunk.retained)->data() + slice.retained_offset;
}

inline const uint8_t* HiddenRow(const Chunk& chunk, const Slice& slice, int64_t row, int64_t d) {
  const void* const rows = slice.hidden != nullptr ? slice.hidden : RetainedRows(chunk, slice);
  return static_cast<const uint8_t*>(rows) + SizeOf(row * d, chunk.hidden_dtype);
}

// Keeps the hidden states of slices that ask for it.
inline void Retain(const Chunk& chunk, int64_t d) {
  for (const Slice& slice : chunk.slices) {
    if (slice.retained_offset < 0 || slice.hidden == nullptr) continue;
    std::memcpy(RetainedRows(chunk, slice), slice.hidden, SizeOf(slice.rows * d, chunk.hidden_dtype));
  }
}

inline uint8_t* GradHiddenRow(const Slice& slice, int64_t row, int64_t d, DType dtype) {
  return static_cast<uint8_t*>(slice.grad_hidden) + SizeOf(row * d, dtype);
}

template <typename T>
inline void Store(T* values, int64_t row, T value) {
  if (values != nullptr) values[row] = value;
}

inline void StoreRow(const RowOutputs& out, int64_t row, const RowResult& result) {
  Store(out.loss, row, static_cast<float>(result.loss));
  Store(out.lse, row, static_cast<float>(result.lse));
  Store(out.entropy, row, static_cast<float>(result.entropy));
  Store(out.target_logprob, row, static_cast<float>(result.target_logprob));
  Store(out.argmax, row, result.argmax);
}

inline void AddToSums(const Slice& slice, int64_t row, const RowResult& result, SliceSums& sums) {
  sums.loss += result.loss;
  sums.z_loss += result.z_loss;
  if (slice.out.entropy != nullptr && std::isfinite(result.entropy)) sums.entropy += result.entropy;
  sums.valid_rows += 1;
  sums.correct_rows += result.argmax == slice.targets[row] ? 1 : 0;
  sums.dropped_mass += result.gradient.dropped_mass;
  sums.sampling_variance += result.gradient.sampling_variance;
  sums.squared_gradient += result.gradient.squared_gradient;
}

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_HEAD_BUFFERS_H_
