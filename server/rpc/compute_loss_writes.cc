// SPDX-License-Identifier: Apache-2.0
// ComputeLossCall: writing, time, and the end. Reading is in compute_loss_call.cc.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "kernels/clocks/clock.h"
#include "proto/wire/deadlines.h"
#include "server/log/log.h"
#include "server/rpc/compute_loss_call.h"
#include "server/rpc/status.h"

namespace lossd::rpc {
namespace {

// That a slice of `stream` was written, which was ready to be at `ready`.
void TraceSend(const engine::Stream& stream, const engine::RowRange& rows, absl::Time ready,
               metrics::TraceRecorder* trace) {
  trace->Add(stream.head(), {.kind = metrics::SpanKind::kSend,
                             .id = stream.microbatch_id(),
                             .first_row = rows.begin,
                             .rows = rows.size(),
                             .begin = ready,
                             .end = clocks::SteadyNow()});
}

v1::StreamWait ToProto(CallClock::Waits waits) {
  switch (waits) {
    case CallClock::Waits::kNothing:
      return v1::STREAM_WAIT_END;
    case CallClock::Waits::kOpen:
      return v1::STREAM_WAIT_OPEN;
    case CallClock::Waits::kMessage:
      return v1::STREAM_WAIT_CLIENT;
    case CallClock::Waits::kTurn:
      return v1::STREAM_WAIT_SERVER;
    case CallClock::Waits::kSend:
      return v1::STREAM_WAIT_SEND;
  }
  return v1::STREAM_WAIT_UNSPECIFIED;
}

}  // namespace

absl::Status CancellationStatus(const grpc::CallbackServerContext& context) {
  if (wire::HasPassed(context.raw_deadline())) {
    return absl::DeadlineExceededError("the call's deadline has passed");
  }
  return absl::CancelledError("the client cancelled the call or went away");
}

// ---- Writing and ending ----

void ComputeLossCall::Pump() {
  if (broken_) writes_.clear();
  if (write_active_ || finished_) return;
  if (writes_.empty()) {
    if (ending_.has_value()) FinishLocked();
    return;
  }
  writing_ = std::move(writes_.front());
  writes_.pop_front();
  write_active_ = true;
  Progress();
  if (writes_.empty() && !writing_.is_slice && ending_.has_value() && ending_->ok()) {
    finished_ = true;  // the summary leaves with the end, in one piece
    StartWriteAndFinish(&writing_.message, {}, grpc::Status::OK);
  } else {
    StartWrite(&writing_.message);
  }
}

void ComputeLossCall::OnWriteDone(bool ok) {
  std::optional<engine::RowRange> next;
  {
    absl::MutexLock lock(&mutex_);
    next = FinishWrite(ok);
  }
  ReceiveRetained(next);
}

std::optional<engine::RowRange> ComputeLossCall::FinishWrite(bool ok) {
  std::optional<engine::RowRange> next;
  write_active_ = false;
  if (writing_.is_slice) {
    staging_bytes_ -= writing_.staging_bytes;
    environment_->metrics->AddPayloadOut(ok ? writing_.payload_bytes : 0);
    if (ok) {
      traffic_.sent_rows += writing_.rows;
      traffic_.sent_bytes += writing_.payload_bytes;
      totals_->Sent(writing_.rows, writing_.payload_bytes, clocks::SteadyNow());
    }
    environment_->metrics->ObservePhase(metrics::Phase::kSend,
                                        absl::ToDoubleSeconds(clocks::SteadyNow() - writing_.ready));
    if (stream_ != nullptr && environment_->metrics->trace().recording()) {
      TraceSend(*stream_, writing_.range, writing_.ready, &environment_->metrics->trace());
    }
  }
  writing_ = Outgoing();
  Progress();
  if (!ok) {
    broken_ = true;
    FailLocked(CancellationStatus(*context_));
  } else if (read_withheld_) {
    next = NextSlice();
  }
  Pump();
  return next;
}

void ComputeLossCall::OnCancel() {
  absl::MutexLock lock(&mutex_);
  broken_ = true;
  FailLocked(CancellationStatus(*context_));
  Pump();
}

void ComputeLossCall::Fail(absl::Status why) {
  absl::MutexLock lock(&mutex_);
  FailLocked(std::move(why));
}

void ComputeLossCall::FailLocked(absl::Status why) {
  if (ending_.has_value()) return;
  if (stream_ != nullptr) {
    stream_->Cancel(std::move(why));  // ends with the engine's OnFinished
    return;
  }
  ending_ = std::move(why);
  Pump();
}

void ComputeLossCall::FinishLocked() {
  finished_ = true;
  const grpc::Status status = ToGrpc(*ending_, environment_->engine->incarnation());
  if (!status.ok()) {
    environment_->metrics->CountError(kComputeLoss, CodeName(status));
  }
  if (!status.ok() && !IsRefusal(status)) {
    environment_->access->Failed(peer_, kComputeLoss, CodeName(status), status.error_message());
  }
  Finish(status);
}

std::shared_ptr<engine::Stream> ComputeLossCall::stream() {
  absl::MutexLock lock(&mutex_);
  return stream_;
}

void ComputeLossCall::Progress() {
  using Waits = CallClock::Waits;
  if (finished_ || ending_.has_value()) {
    clock_.Set(write_active_ ? Waits::kSend : Waits::kNothing);
  } else if (write_active_) {
    clock_.Set(Waits::kSend);
  } else if (reading_ && staging_bytes_ == 0) {
    clock_.Set(stream_ == nullptr ? Waits::kOpen : Waits::kMessage);
  } else {
    clock_.Set(Waits::kTurn);
  }
}

absl::string_view ComputeLossCall::EndIfLate(absl::Time now, const CallTimeouts& timeouts) {
  absl::MutexLock lock(&mutex_);
  absl::string_view limit;
  absl::Status late = clock_.Check(now, timeouts, &limit);
  if (late.ok() || broken_) return "";
  const bool sending = clock_.what() == CallClock::Waits::kSend;
  clock_.Set(CallClock::Waits::kNothing);  // it is told once
  log::Log(log::LogLevel::kWarning, "ending a call that waited too long",
           {{"method", kComputeLoss}, {"reason", late.message()}, {"peer", context_->peer()}});
  if (sending) {
    context_->TryCancel();  // nothing can be said to a client that reads nothing
  } else {
    FailLocked(std::move(late));
  }
  return limit;
}

void ComputeLossCall::EndWith(absl::Status why) {
  absl::MutexLock lock(&mutex_);
  if (!broken_) FailLocked(std::move(why));
}

void ComputeLossCall::Describe(absl::Time now, v1::StreamDescription* description) {
  absl::MutexLock lock(&mutex_);
  // A slice may be computed and sent before OnQueued has booked it.
  const int64_t queued_rows = std::max(traffic_.queued_rows, traffic_.sent_rows);
  description->set_head(traffic_.head);
  description->set_microbatch_id(traffic_.microbatch_id);
  description->set_backward(backward_);
  description->set_shared_memory(traffic_.shared_memory);
  description->set_rows(static_cast<uint64_t>(traffic_.rows));
  description->set_queued_rows(static_cast<uint64_t>(queued_rows));
  description->set_sent_rows(static_cast<uint64_t>(traffic_.sent_rows));
  description->set_received_bytes(static_cast<uint64_t>(traffic_.received_bytes));
  description->set_sent_bytes(static_cast<uint64_t>(traffic_.sent_bytes));
  description->set_staging_bytes(static_cast<uint64_t>(std::max<int64_t>(0, staging_bytes_)));
  description->set_waits_for(ToProto(clock_.what()));
  description->set_wait_seconds(std::max(0.0, absl::ToDoubleSeconds(now - clock_.since())));
  description->set_age_seconds(std::max(0.0, absl::ToDoubleSeconds(now - came_)));
}

void ComputeLossCall::OnDone() {
  if (totals_ != nullptr) totals_->Close();
  environment_->registry->Remove(this);
  std::shared_ptr<engine::Stream> stream;  // holds the inbox, which holds this: the circle ends here
  {
    absl::MutexLock lock(&mutex_);
    stream = std::move(stream_);
  }
  stream.reset();
  const std::shared_ptr<ComputeLossCall> self = std::move(self_);
}

}  // namespace lossd::rpc
