// SPDX-License-Identifier: Apache-2.0
// What keeps rows that are not finite out of the accumulators of a head on the CPU.
#ifndef LOSSD_KERNELS_CPU_ROW_GUARD_H_
#define LOSSD_KERNELS_CPU_ROW_GUARD_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/backend.h"
#include "kernels/cpu/class_exchange.h"
#include "kernels/cpu/head_buffers.h"
#include "kernels/cpu/parallel_for.h"
#include "kernels/cpu/row_order.h"

namespace lossd::kernels {

// Of one head; borrows everything. Thread-compatible.
class RowGuard {
 public:
  RowGuard(const HeadBuffers& buffers, int64_t hidden_size, int64_t classes, ThreadPool* pool)
      : buffers_(buffers), hidden_size_(hidden_size), classes_(classes), pool_(pool) {}

  // Finds the slices with a row whose result is not finite and clears all their rows, so that they add
  // exactly nothing to any sum over rows (a factor 0 alone would not do: 0 * NaN is NaN).
  void ClearFailedSlices(const Chunk& chunk, const RowOrder& order) const;
  // The same for rows whose gradient in grad_hidden, before it goes through a norm, is not finite. `rows`
  // have one; here it is complete for those of them in `here`, on other parts of a head for the others.
  absl::Status CheckGradients(const Chunk& chunk, const RowOrder& order, RowRange rows, RowRange here,
                              int part, ClassExchange& exchange) const;

 private:
  const HeadBuffers& buffers_;
  const int64_t hidden_size_;
  const int64_t classes_;
  ThreadPool* const pool_;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_ROW_GUARD_H_
