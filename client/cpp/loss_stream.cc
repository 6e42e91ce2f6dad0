// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/loss_stream.h"

#include <utility>
#include <vector>

#include "client/cpp/connections.h"
#include "kernels/clocks/clock.h"
#include "proto/wire/payload_codec.h"

namespace lossd::client::internal {
namespace {

constexpr char kMethod[] = "/lossd.v1.LossService/ComputeLoss";

}  // namespace

LossStream::LossStream(StreamJob job, StreamAnswers::AcceptFn accept, DoneFn done)
    : job_(std::move(job)),
      work_(job_.work),
      done_(std::move(done)),
      places_(*job_.places),
      left_(work_.slices.begin(), work_.slices.end()),
      answers_(work_, std::move(accept), &places_) {}

void LossStream::Start(const std::shared_ptr<grpc::Channel>& channel) {
  SetDeadline(job_.deadline, &context_);
  context_.set_initial_metadata_corked(true);  // it leaves with the first message, in one piece
  stub_ = std::make_unique<grpc::GenericStub>(channel);
  stub_->PrepareBidiStreamingCall(&context_, kMethod, {}, this);
  const bool may_wait =
      !work_.slices.empty() && places_.WaitForOthers([executor = job_.executor, weak = weak_from_this()] {
        executor->Post([weak] {
          if (const auto stream = weak.lock()) stream->Resume(absl::InfinitePast());
        });
      });
  {
    absl::MutexLock lock(&write_mu_);
    held_ = may_wait;
    if (held_) AddHold();
    request_ = wire::Encode(work_.first);
    Send();
  }
  {
    absl::MutexLock lock(&read_mu_);
    StartRead(&response_);
  }
  StartCall();
}

void LossStream::OnWriteDone(bool ok) {
  absl::MutexLock lock(&write_mu_);
  request_.Clear();
  if (ok) SendNext();
}

absl::StatusOr<SlicePlaces::Place> LossStream::PlaceNext() {
  while (true) {
    const Rows rows = left_.front();
    const absl::StatusOr<SlicePlaces::Place> place = places_.Put(rows.begin, HiddenOf(work_, rows));
    if (!place.ok() || place->kind != SlicePlaces::Place::Kind::kMessage || rows.size() <= job_.rule.max_rows)
      return place;
    const std::vector<Rows> parts = CutForMessages(rows, job_.rule);
    left_.pop_front();
    left_.insert(left_.begin(), parts.begin(), parts.end());
    absl::MutexLock lock(&read_mu_);
    answers_.Replace(rows, parts);
  }
}

void LossStream::Send() {
  if (left_.empty()) {
    StartWriteLast(&request_, {});  // one piece, again
    ReleaseHold();
  } else {
    StartWrite(&request_);
  }
}

void LossStream::SendNext() {
  if (left_.empty()) return;
  unsent_ = SendSlice();
  if (!unsent_.ok()) context_.TryCancel();
}

absl::Status LossStream::SendSlice() {
  using Kind = SlicePlaces::Place::Kind;
  const absl::StatusOr<SlicePlaces::Place> place = PlaceNext();
  const bool for_others = place.ok() && place->kind == Kind::kWaitForOthers;
  waiting_ = for_others || (place.ok() && place->kind == Kind::kWait);
  if (for_others) {
    WaitForOthers();
  } else {
    wait_end_ = absl::InfiniteFuture();
  }
  if (!place.ok() || waiting_) return place.status();
  const Rows rows = left_.front();
  left_.pop_front();
  const uint64_t bytes = rows.size() * work_.row_bytes;
  if (place->kind == Kind::kRegion) {
    request_ = EncodeSliceInRegion(work_, rows, place->offset);
  } else {
    absl::StatusOr<grpc::ByteBuffer> message = EncodeSlice(work_, rows, job_.holds->Take());
    if (!message.ok()) return message.status();
    request_ = *std::move(message);
    *job_.moved += bytes;
  }
  sent_bytes_ += bytes;
  Send();
  return absl::OkStatus();
}

void LossStream::WaitForOthers() {
  if (wait_end_ != absl::InfiniteFuture()) return;
  wait_end_ = clocks::SteadyNow() + job_.patience;
  job_.executor->PostAt(wait_end_, [weak = weak_from_this(), end = wait_end_] {
    if (const auto stream = weak.lock()) stream->Resume(end);
  });
}

void LossStream::Resume(absl::Time end) {
  absl::MutexLock lock(&write_mu_);
  if (!held_ || !waiting_) return;
  if (end == wait_end_) places_.StopWaitingForOthers();
  SendNext();
}

void LossStream::ReleaseHold() {
  if (std::exchange(held_, false)) RemoveHold();
}

bool LossStream::TakeAnswer() {
  absl::MutexLock lock(&read_mu_);
  const uint64_t before = answers_.received_in_messages();
  error_ = answers_.Handle(response_);
  *job_.moved += answers_.received_in_messages() - before;
  response_.Clear();
  if (!error_.ok()) context_.TryCancel();
  return error_.ok();
}

void LossStream::OnReadDone(bool ok) {
  const bool goes_on = ok && TakeAnswer();
  {
    absl::MutexLock lock(&write_mu_);
    if (!goes_on) return ReleaseHold();
    if (waiting_) SendNext();
  }
  absl::MutexLock lock(&read_mu_);
  StartRead(&response_);
}

absl::Status LossStream::EndStatus(const grpc::Status& status) {
  if (!error_.ok()) return error_;
  if (!status.ok()) return CallStatus(status, job_.peer);
  return answers_.CheckEnd();
}

void LossStream::OnDone(const grpc::Status& status) {
  StreamEnd end;
  {
    absl::MutexLock lock(&read_mu_);
    end.status = EndStatus(status);
    if (answers_.summary().has_value()) end.summary = *answers_.summary();
    end.received_bytes = answers_.received_bytes();
  }
  {
    absl::MutexLock lock(&write_mu_);
    request_.Clear();
    end.sent_bytes = sent_bytes_;
    if (!unsent_.ok()) end.status = unsent_;
  }
  places_.End(end.status);
  DoneFn done = std::move(done_);
  done(std::move(end));  // may destroy this
}

}  // namespace lossd::client::internal
