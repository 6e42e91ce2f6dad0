// SPDX-License-Identifier: Apache-2.0
#include "kernels/soft_targets.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

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
  // A class that is named again adds to the entry before.
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

// `first`: the place of the row's first weight.
absl::Status CheckSum(absl::string_view prefix, Rest rest, size_t first, double sum) {
  const auto refuse = [&](absl::string_view rule) {
    return errors::FieldProblem(absl::StrCat(prefix, "target_weights[", first, "]"),
                                absl::StrCat("begins a row whose weights must add up to ", rule), sum);
  };
  if (sum > double{std::numeric_limits<float>::max()}) return refuse("a finite fp32 number");
  if (rest == Rest::kOneClass && sum > 1.0 + kMostOverOne) return refuse("at most 1.001 with rest one_class");
  if (rest == Rest::kRenormalized && !(sum > 0.0)) return refuse("more than 0 with rest renormalized");
  return absl::OkStatus();
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
  const size_t each = static_cast<size_t>(count);
  for (size_t row = 0; row < targets.size(); ++row) {
    double sum = 0.0;
    for (size_t i = row * each; i < (row + 1) * each; ++i) {
      if (classes[i] != kNoClass && (classes[i] < 0 || classes[i] >= vocab_size)) {
        return errors::FieldError(absl::StrCat(prefix, "target_classes[", i, "]"),
                                  absl::StrCat("be in [0, ", vocab_size, ") or ", kNoClass), classes[i]);
      }
      if (!(std::isfinite(weights[i]) && weights[i] >= 0.0f)) {
        return errors::FieldError(absl::StrCat(prefix, "target_weights[", i, "]"), "be finite and >= 0",
                                  weights[i]);
      }
      if (classes[i] == kNoClass && weights[i] != 0.0f) {
        return errors::FieldError(absl::StrCat(prefix, "target_weights[", i, "]"),
                                  absl::StrCat("be 0 where target_classes is ", kNoClass), weights[i]);
      }
      sum += double{weights[i]};
    }
    if (targets[row] == ignored) continue;
    LOSSD_RETURN_IF_ERROR(CheckSum(prefix, rest, row * each, sum));
  }
  return absl::OkStatus();
}

}  // namespace lossd::kernels
