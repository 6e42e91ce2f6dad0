// SPDX-License-Identifier: Apache-2.0
#include "server/engine/group_assembly.h"

#include <algorithm>
#include <utility>

#include "absl/types/span.h"

namespace lossd::engine {
namespace {

bool Overlap(RowRange a, RowRange b) { return a.begin < b.end && b.begin < a.end; }

}  // namespace

GroupAssembly::GroupAssembly(GroupKey key, RowRange rows, size_t area, const Ledger& ledger)
    : key_(key),
      rows_(rows),
      area_(area),
      needed_(static_cast<size_t>(rows.size())),
      coverage_(static_cast<size_t>(rows.size())) {
  Refresh(ledger);
}

bool GroupAssembly::IsFree(RowRange rows) const {
  const auto overlaps = [rows](const Lent& lent) { return Overlap(lent.rows, rows); };
  if (std::any_of(lent_.begin(), lent_.end(), overlaps)) return false;
  if (missing_ > 0) return true;
  const auto first = coverage_.begin() + static_cast<std::ptrdiff_t>(Index(rows.begin));
  return std::all_of(first, first + static_cast<std::ptrdiff_t>(rows.size()),
                     [](int32_t slices) { return slices == 0; });
}

void GroupAssembly::Lend(uint64_t loan, const StreamState* stream, RowRange rows) {
  lent_.push_back({loan, stream, rows});
}

bool GroupAssembly::Return(uint64_t loan) {
  return std::erase_if(lent_, [loan](const Lent& l) { return l.loan == loan; }) > 0;
}

bool GroupAssembly::Attach(std::unique_ptr<SliceWork>& slice, uint64_t arrival) {
  const auto lent = std::find_if(lent_.begin(), lent_.end(), [&slice](const Lent& l) {
    return l.stream == slice->stream.get() && l.rows == slice->rows;
  });
  if (lent == lent_.end()) return false;
  lent_.erase(lent);
  Cover(slice->rows, 1);
  if (slices_.empty()) first_arrival_ = arrival;
  slices_.push_back(std::move(slice));
  last_arrival_ = arrival;
  return true;
}

void GroupAssembly::TakeFailed(std::vector<std::unique_ptr<SliceWork>>& taken) {
  for (auto& slice : slices_) {
    if (!slice->stream->failed()) continue;
    Cover(slice->rows, -1);
    taken.push_back(std::move(slice));
  }
  std::erase(slices_, nullptr);
}

void GroupAssembly::Cover(RowRange rows, int delta) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const size_t i = Index(row);
    missing_ -= needed_[i] && coverage_[i] == 0 ? 1 : 0;
    coverage_[i] += delta;
    missing_ += needed_[i] && coverage_[i] == 0 ? 1 : 0;
  }
}

std::vector<GroupAssembly::Segment> GroupAssembly::Segments() const {
  std::vector<int64_t> cuts = {rows_.begin, rows_.end};
  for (const auto& slice : slices_) {
    cuts.push_back(slice->rows.begin);
    cuts.push_back(slice->rows.end);
  }
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  std::vector<Segment> segments;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) segments.push_back({{cuts[i], cuts[i + 1]}, {}});
  for (const auto& slice : slices_) {
    auto segment = std::lower_bound(segments.begin(), segments.end(), slice->rows.begin,
                                    [](const Segment& s, int64_t row) { return s.rows.begin < row; });
    for (; segment != segments.end() && segment->rows.begin < slice->rows.end; ++segment) {
      segment->slices.push_back(slice.get());
    }
  }
  return segments;
}

void GroupAssembly::Refresh(const Ledger& ledger) {
  ledger.MarkUnsettled(key_.microbatch_id, rows_, absl::MakeSpan(needed_));
  needed_rows_ = std::count(needed_.begin(), needed_.end(), 1);
  missing_ = 0;
  for (size_t i = 0; i < needed_.size(); ++i) missing_ += needed_[i] && coverage_[i] == 0 ? 1 : 0;
}

RowRange GroupAssembly::FirstMissing() const {
  const auto missing = [this](int64_t row) { return needed_[Index(row)] && coverage_[Index(row)] == 0; };
  int64_t begin = rows_.begin;
  while (begin < rows_.end && !missing(begin)) ++begin;
  int64_t end = begin;
  while (end < rows_.end && missing(end)) ++end;
  return {begin, end};
}

}  // namespace lossd::engine
