// SPDX-License-Identifier: Apache-2.0
// The rows of a chunk's slices in host memory, as a head on the CPU reads and writes them. Stateless;
// thread-safe on different rows.
#ifndef LOSSD_KERNELS_CPU_SLICE_MEMORY_H_
#define LOSSD_KERNELS_CPU_SLICE_MEMORY_H_

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/backend.h"
#include "kernels/cpu/cpu_retained.h"
#include "kernels/cpu/row_loss.h"

namespace lossd::kernels {

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

#endif  // LOSSD_KERNELS_CPU_SLICE_MEMORY_H_
