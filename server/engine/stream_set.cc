// SPDX-License-Identifier: Apache-2.0
#include "server/engine/stream_set.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/errors/payload.h"

namespace lossd::engine {

void StreamSet::Fail(StreamState& stream, absl::Status why) {
  if (stream.failed() || stream.finished()) return;
  const bool gave_up = absl::IsDeadlineExceeded(why) || absl::IsCancelled(why);
  if (gave_up && schedule_->IsWaiting(stream)) {
    why = errors::WithMessage(why, absl::StrCat(why.message(), " while it waited for ",
                                                schedule_->backlog().waits_for, " (deterministic mode)"));
  }
  stream.Fail(std::move(why));
  DropFailed();
}

void StreamSet::FailEach(absl::FunctionRef<absl::Status(const StreamState&)> why) {
  const auto streams = streams_;
  for (const auto& stream : streams) {
    absl::Status status = why(*stream);
    if (status.ok()) continue;
    Fail(*stream, std::move(status));
    FinishIfReady(stream);
  }
}

void StreamSet::FailIf(Predicate wanted, const absl::Status& why) {
  FailEach([&](const StreamState& stream) { return wanted(stream) ? why : absl::OkStatus(); });
}

int64_t StreamSet::accumulating() const {
  return std::count_if(streams_.begin(), streams_.end(), [](const auto& stream) {
    return stream->spec().accumulate_gradients && !stream->failed();
  });
}

absl::Status StreamSet::CheckRetaining(uint64_t id, const MicrobatchTerms& terms, RowRange rows) const {
  for (const auto& stream : streams_) {
    if (!stream->spec().retain || stream->failed() || stream->spec().microbatch_id != id) continue;
    absl::Status agrees =
        CheckRetained(id, {stream->terms(), stream->spec().rows}, {terms, rows}, "being retained");
    if (!agrees.ok()) return agrees;
  }
  return absl::OkStatus();
}

void StreamSet::EndAll(const absl::Status& why) {
  for (const auto& stream : streams_) stream->Start();
  FailIf([](const StreamState&) { return true; }, why);
}

void StreamSet::DropFailed() {
  DroppedSlices dropped = schedule_->TakeFailed();
  if (dropped.queued.empty() && dropped.waiting.empty()) return;
  for (const auto& slice : dropped.queued) slice->stream->AddOutstanding(-1);
  notifier_->Post([dropped = std::move(dropped)]() mutable { dropped = {}; });
}

void StreamSet::FinishIfReady(const std::shared_ptr<StreamState>& stream) {
  if (!stream->ReadyToFinish()) return;
  stream->MarkFinished();
  if (stream->status().ok() && stream->spec().retain) {
    deferred_->Add(stream->spec().microbatch_id, stream->terms(), stream->binding(), stream->TakePart(),
                   runtime_->Now());
  }
  std::erase(streams_, stream);
  on_end_(*stream);
  notifier_->Post([stream, values = stream->TakeValues()]() mutable {
    values = {};
    stream->observer().OnFinished(stream->status(), stream->summary());
  });
}

std::vector<RowRange> StreamSet::OwnRows(const StreamState& stream, bool* shared) const {
  const StreamSpec& spec = stream.spec();
  std::vector<RowRange> others;
  for (const auto& other : streams_) {
    const StreamSpec& theirs = other->spec();
    if (other.get() == &stream || !theirs.accumulate_gradients) continue;
    if (theirs.microbatch_id == spec.microbatch_id) others.push_back(theirs.rows);
  }
  *shared = !others.empty();
  std::sort(others.begin(), others.end(), [](RowRange a, RowRange b) { return a.begin < b.begin; });
  std::vector<RowRange> own;
  int64_t next = spec.rows.begin;
  for (const RowRange rows : others) {
    if (rows.begin >= spec.rows.end) break;
    if (rows.begin > next) own.push_back({next, rows.begin});
    next = std::max(next, rows.end);
  }
  if (next < spec.rows.end) own.push_back({next, spec.rows.end});
  return own;
}

}  // namespace lossd::engine
