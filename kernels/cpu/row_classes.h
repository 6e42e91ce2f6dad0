// SPDX-License-Identifier: Apache-2.0
// Single classes of a row of logits. SelectTop finds the k classes with the largest logits, and MergeRanked
// merges them over several parts of the classes. StoreRanked and StoreClasses write log-probabilities of
// classes to a slice's results.
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

// A class and its logit. The default value stands for no class, and comes after every class.
struct RankedClass {
  float logit = -std::numeric_limits<float>::infinity();
  int32_t place = std::numeric_limits<int32_t>::max();  // index in the head's vocabulary

  // Whether it comes before `other`: the larger logit comes first, then the smaller class.
  bool IsBefore(const RankedClass& other) const {
    return logit > other.logit || (logit == other.logit && place < other.place);
  }
};

// Receives the first classes of a row, in order.
using TakeRanked = absl::FunctionRef<void(int64_t row, absl::Span<const RankedClass> ranked)>;

// Writes the first top.size() classes of a row to `top`, in order. `logits` [n] are the logits of the classes
// [first_class, first_class + n). If there are fewer classes, the remaining entries of `top` stand for no
// class. A logit that is NaN counts as -infinity.
void SelectTop(const RowLoops& loops, const float* logits, int64_t n, int64_t first_class,
               absl::Span<RankedClass> top);

// Calls take(row, ranked) for each row, with the first `k` classes of all parts together. of_part[i] [rows,
// k]: the classes of part i, as SelectTop has written them.
void MergeRanked(absl::Span<const RankedClass* const> of_part, int64_t rows, int64_t k, TakeRanked take);

// Write log-probabilities of row `row`: StoreRanked those of its slice.top_k most probable classes,
// StoreClasses those of its slice.class_count given classes. lse is NaN for an absent row whose logits are
// not finite.
void StoreRanked(const Slice& slice, int64_t row, double lse, absl::Span<const RankedClass> ranked);
void StoreClasses(const Slice& slice, int64_t row, double lse, const float* logits);
// Writes the values of a row without a target.
void StoreNoClasses(const Slice& slice, int64_t row);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_ROW_CLASSES_H_
