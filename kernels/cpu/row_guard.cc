// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/row_guard.h"

#include <algorithm>

#include "kernels/cpu/row_loops.h"

namespace lossd::kernels {

void RowGuard::ClearFailedSlices(const Chunk& chunk, const RowOrder& order) const {
  for (Slice& slice : chunk.slices) slice.first_nonfinite_row = -1;
  bool failed = false;
  for (int64_t i = 0; i < order.rows; ++i) {
    if (buffers_.results[i].finite) continue;
    failed = true;
    const RowSource& source = buffers_.sources[i];
    int64_t& first = chunk.slices[static_cast<size_t>(source.slice)].first_nonfinite_row;
    first = first < 0 ? source.row : std::min(first, source.row);
  }
  if (!failed) return;
  const int64_t d = hidden_size_;
  for (int64_t i = 0; i < order.with_gradient(); ++i) {
    if (chunk.slices[static_cast<size_t>(buffers_.sources[i].slice)].first_nonfinite_row < 0) continue;
    std::fill_n(buffers_.hidden + i * d, d, 0.0f);
    std::fill_n(buffers_.logits + i * classes_, classes_, 0.0f);
    std::fill_n(buffers_.grad_hidden + i * d, d, 0.0f);
    if (buffers_.unit == nullptr) continue;
    std::fill_n(buffers_.unit + i * d, d, 0.0f);
    buffers_.inverse_deviation[i] = 0.0f;
  }
}

absl::Status RowGuard::CheckGradients(const Chunk& chunk, const RowOrder& order, RowRange rows, RowRange here,
                                      int part, ClassExchange& exchange) const {
  constexpr int64_t kGrain = 1 << 15;  // elements
  const RowLoops& loops = SelectRowLoops();
  pool_->ParallelFor(here.end - here.begin, std::max<int64_t>(1, kGrain / hidden_size_),
                     [&](int64_t from, int64_t to) {
                       for (int64_t i = here.begin + from; i < here.begin + to; ++i) {
                         const float* const row = buffers_.grad_hidden + i * hidden_size_;
                         if (!loops.all_finite(row, hidden_size_)) buffers_.results[i].finite = false;
                       }
                     });
  if (buffers_.bad_rows != nullptr) {
    // Each part tells the others of its rows.
    const int64_t n = rows.end - rows.begin;
    float* const own = buffers_.bad_rows;
    float* const all = buffers_.bad_rows + n;
    std::fill_n(own, 2 * n, 0.0f);
    for (int64_t i = here.begin; i < here.end; ++i) {
      own[i - rows.begin] = buffers_.results[i].finite ? 0.0f : 1.0f;
    }
    if (absl::Status status = exchange.AddSums(part, own, all, n); !status.ok()) return status;
    for (int64_t i = 0; i < n; ++i) {
      if (all[i] != 0.0f) buffers_.results[rows.begin + i].finite = false;
    }
  }
  ClearFailedSlices(chunk, order);
  return absl::OkStatus();
}

}  // namespace lossd::kernels
