// SPDX-License-Identifier: Apache-2.0
// In which order the rows of a chunk are gathered, so that every later step works on a contiguous range.
#ifndef LOSSD_KERNELS_CPU_ROW_ORDER_H_
#define LOSSD_KERNELS_CPU_ROW_ORDER_H_

#include <cstdint>

#include "kernels/backend.h"
#include "kernels/cpu/head_buffers.h"

namespace lossd::kernels {

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

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_ROW_ORDER_H_
