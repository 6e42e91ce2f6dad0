// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/row_order.h"

#include <array>

#include "kernels/absent_row.h"

namespace lossd::kernels {
namespace {

constexpr size_t kGroups = 4;

size_t GroupOf(const Slice& slice, int64_t row, bool accumulate) {
  if (IsAbsent(slice, row)) return 3;
  const bool accumulated = accumulate && (slice.accumulate == nullptr || slice.accumulate[row] != 0);
  const bool with_hidden = slice.grad_hidden != nullptr;
  if (accumulated) return with_hidden ? 1 : 0;
  return with_hidden ? 2 : 3;
}

// Calls visit(source, group) for each row that has a target.
template <typename Visit>
void ForEachValidRow(absl::Span<const Slice> slices, bool accumulate, Visit visit) {
  for (size_t i = 0; i < slices.size(); ++i) {
    for (int64_t row = 0; row < slices[i].rows; ++row) {
      if (slices[i].targets[row] == kIgnoredTarget) continue;
      visit(RowSource{static_cast<int64_t>(i), row}, GroupOf(slices[i], row, accumulate));
    }
  }
}

}  // namespace

RowOrder OrderRows(absl::Span<const Slice> slices, bool accumulate, RowSource* sources) {
  std::array<int64_t, kGroups> counts{};
  ForEachValidRow(slices, accumulate, [&](const RowSource&, size_t group) { ++counts[group]; });
  RowOrder order;
  order.hidden_begin = counts[0];
  order.accumulated = counts[0] + counts[1];
  order.hidden_end = order.accumulated + counts[2];
  order.rows = order.hidden_end + counts[3];
  std::array<int64_t, kGroups> next = {0, order.hidden_begin, order.accumulated, order.hidden_end};
  ForEachValidRow(slices, accumulate,
                  [&](const RowSource& source, size_t group) { sources[next[group]++] = source; });
  return order;
}

}  // namespace lossd::kernels
