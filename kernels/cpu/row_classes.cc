// SPDX-License-Identifier: Apache-2.0
// The selection and the merging of single classes of a row (row_classes.h).
#include "kernels/cpu/row_classes.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace lossd::kernels {
namespace {

bool IsBefore(const RankedClass& a, const RankedClass& b) { return a.IsBefore(b); }

// logit - lse, but at most 0 in spite of rounding; NaN if `lse` is NaN.
float LogProbability(float logit, double lse) {
  const double value = double{logit} - lse;
  return static_cast<float>(value > 0.0 ? 0.0 : value);
}

}  // namespace

// Keeps a heap of the first k classes so far, with the last of them on top. Classes come in ascending order,
// so a further class gets in only if its logit is larger than that of the top. Blocks without such a class
// are skipped.
void SelectTop(const RowLoops& loops, const float* logits, int64_t n, int64_t first_class,
               absl::Span<RankedClass> top) {
  constexpr int64_t kBlock = 256;
  std::fill(top.begin(), top.end(), RankedClass());
  const auto k = static_cast<int64_t>(top.size());
  const auto of = [&](int64_t v) {
    const float z = std::isnan(logits[v]) ? RankedClass().logit : logits[v];
    return RankedClass{z, static_cast<int32_t>(first_class + v)};
  };
  const int64_t filled = std::min(k, n);
  for (int64_t v = 0; v < filled; ++v) top[static_cast<size_t>(v)] = of(v);
  const auto begin = top.begin(), end = top.begin() + filled;
  std::make_heap(begin, end, IsBefore);
  for (int64_t block = filled; block < n; block += kBlock) {
    const int64_t stop = std::min(block + kBlock, n);
    if (!(loops.max(logits + block, stop - block) > begin->logit)) continue;
    for (int64_t v = block; v < stop; ++v) {
      if (!(logits[v] > begin->logit)) continue;
      std::pop_heap(begin, end, IsBefore);
      *(end - 1) = of(v);
      std::push_heap(begin, end, IsBefore);
    }
  }
  std::sort_heap(begin, end, IsBefore);
}

void MergeRanked(absl::Span<const RankedClass* const> of_part, int64_t rows, int64_t k, TakeRanked take) {
  const auto each = static_cast<size_t>(k);
  std::vector<RankedClass> all;
  for (int64_t row = 0; row < rows; ++row) {
    all.clear();
    for (const RankedClass* part : of_part) all.insert(all.end(), part + row * k, part + (row + 1) * k);
    std::partial_sort(all.begin(), all.begin() + k, all.end(), IsBefore);
    take(row, absl::MakeConstSpan(all).subspan(0, each));
  }
}

void StoreRanked(const Slice& slice, int64_t row, double lse, absl::Span<const RankedClass> ranked) {
  for (int32_t i = 0; i < slice.top_k; ++i) {
    const RankedClass& one = ranked[static_cast<size_t>(i)];
    const int64_t at = row * slice.top_k + i;
    slice.out.top_logprobs[at] = LogProbability(one.logit, lse);
    slice.out.top_classes[at] = std::isnan(lse) ? -1 : one.place;
  }
}

void StoreClasses(const Slice& slice, int64_t row, double lse, const float* logits) {
  for (int32_t i = 0; i < slice.class_count; ++i) {
    slice.out.class_logprobs[row * slice.class_count + i] = LogProbability(logits[i], lse);
  }
}

void StoreNoClasses(const Slice& slice, int64_t row) {
  std::fill_n(slice.out.class_logprobs + row * slice.class_count, slice.class_count, 0.0f);
  std::fill_n(slice.out.top_logprobs + row * slice.top_k, slice.top_k, 0.0f);
  std::fill_n(slice.out.top_classes + row * slice.top_k, slice.top_k, -1);
}

}  // namespace lossd::kernels
