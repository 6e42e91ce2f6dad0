// SPDX-License-Identifier: Apache-2.0
// Sorting, merging and checking of soft targets (soft_targets.h).
#include "kernels/soft_targets.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"

namespace lossd::kernels {

absl::string_view Name(Rest rest) {
  switch (rest) {
    case Rest::kNoTargets:
      return "no_targets";
    case Rest::kNone:
      return "none";
    case Rest::kRenormalized:
      return "renormalized";
    case Rest::kOneClass:
      return "one_class";
  }
  return "";
}

void MakeSoftRow(Rest rest, absl::Span<const int32_t> classes, absl::Span<const float> weights,
                 SoftRow& row) {
  std::vector<SoftRow::Entry>& entries = row.entries;
  entries.clear();
  for (size_t i = 0; i < classes.size(); ++i) {
    if (classes[i] != kNoClass) entries.push_back({classes[i], weights[i]});
  }
  const auto before = [](const SoftRow::Entry& a, const SoftRow::Entry& b) { return a.place < b.place; };
  if (!std::is_sorted(entries.begin(), entries.end(), before)) {
    std::stable_sort(entries.begin(), entries.end(), before);
  }
  // Merges entries of the same class, which are neighbors after the sort, into one entry.
  row.sum = 0.0;
  size_t last = 0;
  double weight = 0.0;
  for (size_t i = 0; i < entries.size(); ++i) {
    row.sum += double{entries[i].weight};
    if (i > 0 && entries[i].place == entries[last].place) {
      weight += double{entries[i].weight};
    } else {
      last = i == 0 ? 0 : last + 1;
      weight = double{entries[i].weight};
    }
    entries[last] = {entries[i].place, static_cast<float>(weight)};
  }
  if (!entries.empty()) entries.resize(last + 1);

  row.rest = rest == Rest::kOneClass ? 1.0 - row.sum : 0.0;
  if (row.rest < kLeastRest) row.rest = 0.0;
  row.total = row.sum + row.rest;
  if (rest != Rest::kRenormalized) return;
  for (SoftRow::Entry& entry : entries) entry.weight = static_cast<float>(double{entry.weight} / row.sum);
  row.total = 1.0;
}

namespace {

errors::WeightSum SumOf(Rest rest) {
  return rest == Rest::kOneClass       ? errors::WeightSum::kAtMostOne
         : rest == Rest::kRenormalized ? errors::WeightSum::kAboveZero
                                       : errors::WeightSum::kAny;
}

}  // namespace

absl::Status CheckSoftTargets(absl::string_view prefix, Rest rest, int64_t vocab_size, int64_t count,
                              absl::Span<const int32_t> classes, absl::Span<const float> weights,
                              absl::Span<const int32_t> targets, int32_t ignored) {
  const int64_t most = std::min<int64_t>(vocab_size, kMostSoftTargets);
  if (count < 1 || count > most) {
    return errors::FieldError(absl::StrCat(prefix, "target_count"), absl::StrCat("be in [1, ", most, "]"),
                              count);
  }
  static_assert(kNoClass == errors::kNoClass);
  return errors::CheckSoftTargets(prefix, SumOf(rest), vocab_size, static_cast<size_t>(count), classes,
                                  weights, targets, ignored);
}

}  // namespace lossd::kernels
