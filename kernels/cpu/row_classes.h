// SPDX-License-Identifier: Apache-2.0
// Single classes of a row of logits: the k with the largest logits (SelectTop), of several parts of the
// classes together (MergeRanked), and their log-probabilities on the way to a slice's results (StoreRanked,
// StoreClasses).
//
// All functions are stateless and thread-safe.
#ifndef LOSSD_KERNELS_CPU_ROW_CLASSES_H_
#define LOSSD_KERNELS_CPU_ROW_CLASSES_H_

#include <cstdint>
#include <limits>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/cpu/row_loops.h"

namespace lossd::kernels {

// A class and its logit. By default: none, which comes after every class.
struct RankedClass {
  float logit = -std::numeric_limits<float>::infinity();
  int32_t place = std::numeric_limits<int32_t>::max();  // counted from the first of the vocabulary

  // Whether it comes first: by the larger logit, then by the smaller class.
  bool IsBefore(const RankedClass& other) const {
    return logit > other.logit || (logit == other.logit && place < other.place);
  }
};

// The classes of a row that come first, in their order.
using TakeRanked = absl::FunctionRef<void(int64_t row, absl::Span<const RankedClass> ranked)>;

// The top.size() first of the classes whose logits these are, [first_class, first_class + n), in their order;
// what is left of `top` is none. A logit that is NaN counts as -infinity.
void SelectTop(const RowLoops& loops, const float* logits, int64_t n, int64_t first_class,
               absl::Span<RankedClass> top);

// Calls take(row, ranked) with the `k` first of all parts' classes, for each of the rows; of_part[i]:
// [rows, k], the classes of part i as SelectTop left them.
void MergeRanked(absl::Span<const RankedClass* const> of_part, int64_t rows, int64_t k, TakeRanked take);

// Writes the log-probabilities of row `row`: of its first slice.top_k most probable classes, and of its
// slice.class_count given ones. lse is NaN for an absent row whose logits are not finite.
void StoreRanked(const Slice& slice, int64_t row, double lse, absl::Span<const RankedClass> ranked);
void StoreClasses(const Slice& slice, int64_t row, double lse, const float* logits);
// What a row without a target has.
void StoreNoClasses(const Slice& slice, int64_t row);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_ROW_CLASSES_H_
