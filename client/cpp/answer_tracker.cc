// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/answer_tracker.h"

#include <iterator>

#include "absl/strings/string_view.h"
#include "client/cpp/server_sent.h"

namespace lossd::client::internal {
namespace {

absl::Status ServerSentRows(Rows rows, absl::string_view what) {
  return ServerSent("results of rows [", rows.begin, ", ", rows.end, ")", what);
}

}  // namespace

AnswerTracker AnswerTracker::Exactly(const std::vector<Rows>& slices) {
  AnswerTracker tracker;
  for (const Rows& slice : slices) tracker.open_[slice.begin] = slice.end;
  return tracker;
}

AnswerTracker AnswerTracker::Within(Rows range) {
  AnswerTracker tracker;
  tracker.exactly_ = false;
  tracker.range_ = range;
  return tracker;
}

void AnswerTracker::Replace(Rows whole, const std::vector<Rows>& parts) {
  open_.erase(whole.begin);
  for (const Rows& part : parts) open_[part.begin] = part.end;
}

absl::Status AnswerTracker::Take(const v1::RowRange& range) {
  const Rows rows{range.begin(), range.end()};
  absl::Status status = exactly_ ? TakeExactly(rows) : TakeWithin(rows);
  if (!status.ok()) return status;
  answered_[rows.begin] = rows.end;
  answered_rows_ += rows.size();
  return absl::OkStatus();
}

absl::Status AnswerTracker::TakeExactly(Rows rows) {
  const auto done = answered_.find(rows.begin);
  if (done != answered_.end() && done->second == rows.end) return ServerSentRows(rows, " twice");
  const auto it = open_.find(rows.begin);
  if (it == open_.end() || it->second != rows.end)
    return ServerSentRows(rows, ", which are no slice of this call");
  open_.erase(it);
  return absl::OkStatus();
}

absl::Status AnswerTracker::TakeWithin(Rows rows) {
  if (rows.begin >= rows.end || rows.begin < range_.begin || rows.end > range_.end) {
    return ServerSentRows(rows, ", which are not in this call");
  }
  const auto next = answered_.lower_bound(rows.begin);
  const bool overlaps_next = next != answered_.end() && next->first < rows.end;
  const bool overlaps_previous = next != answered_.begin() && std::prev(next)->second > rows.begin;
  if (overlaps_next || overlaps_previous) return ServerSentRows(rows, " twice");
  return absl::OkStatus();
}

}  // namespace lossd::client::internal
