// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/loss_stream.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/call_errors.h"
#include "client/cpp/connections.h"
#include "client/cpp/cuda_driver.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"
#include "proto/wire/payload_codec.h"

namespace lossd::client::internal {

// ---- PayloadHolds ----

absl::AnyInvocable<void()> PayloadHolds::Take() {
  absl::MutexLock lock(&mu_);
  ++held_;
  return [self = shared_from_this()] { self->GiveBack(); };
}

void PayloadHolds::GiveBack() {
  absl::AnyInvocable<void()> task;
  {
    absl::MutexLock lock(&mu_);
    if (--held_ == 0) task = std::exchange(task_, nullptr);
  }
  if (task) task();
}

void PayloadHolds::WhenFree(absl::AnyInvocable<void()> task) {
  {
    absl::MutexLock lock(&mu_);
    if (held_ > 0) {
      task_ = std::move(task);
      return;
    }
  }
  task();
}

bool PayloadHolds::free() {
  absl::MutexLock lock(&mu_);
  return held_ == 0;
}

void PayloadHolds::WaitUntilFree() {
  auto free = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return held_ == 0; };
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&free));
}

// ---- Messages ----

namespace {

std::string Text(const v1::RowRange& rows) {
  return absl::StrCat("rows [", rows.begin(), ", ", rows.end(), ")");
}

absl::Status CheckCount(absl::string_view name, int count, bool wanted, const v1::RowRange& rows) {
  const uint64_t expected = wanted ? rows.end() - rows.begin() : 0;
  if (static_cast<uint64_t>(count) == expected) return absl::OkStatus();
  return ServerSent(count, " values of ", name, " for ", Text(rows), "; ", expected, " were expected");
}

template <typename Field, typename T>
void CopyRows(const Field& field, uint64_t begin, absl::Span<T> out) {
  if (!out.empty()) std::copy(field.begin(), field.end(), out.begin() + begin);
}

}  // namespace

absl::StatusOr<grpc::ByteBuffer> EncodeSlice(const StreamWork& work, Rows rows,
                                             absl::AnyInvocable<void()> release) {
  v1::ComputeLossRequest request;
  request.mutable_slice()->mutable_rows()->set_begin(rows.begin);
  request.mutable_slice()->mutable_rows()->set_end(rows.end);
  const absl::Span<const uint8_t> hidden = HiddenOf(work, rows);
  if (!work.gpu.has_value()) return wire::Encode(request, hidden, std::move(release));
  auto copy = std::make_unique<std::vector<uint8_t>>(hidden.size());
  const absl::Status copied =
      CopyBytes(copy->data(), hidden.data(), hidden.size(), work.gpu, work.after.get());
  release();  // the caller's memory is not needed any more
  if (!copied.ok()) return copied;
  const absl::Span<const uint8_t> bytes = *copy;
  return wire::Encode(request, bytes, [copy = std::move(copy)] {});
}

grpc::ByteBuffer EncodeSliceInRegion(const StreamWork& work, Rows rows, uint64_t offset) {
  v1::ComputeLossRequest request;
  request.mutable_slice()->mutable_rows()->set_begin(rows.begin);
  request.mutable_slice()->mutable_rows()->set_end(rows.end);
  request.mutable_slice()->mutable_in_region()->set_offset(offset);
  request.mutable_slice()->mutable_in_region()->set_bytes(rows.size() * work.row_bytes);
  return wire::Encode(request);
}

absl::Span<const uint8_t> HiddenOf(const StreamWork& work, Rows rows) {
  const auto* data = reinterpret_cast<const uint8_t*>(work.hidden) + rows.begin * work.row_bytes;
  return absl::MakeConstSpan(data, rows.size() * work.row_bytes);
}

StreamAnswers::StreamAnswers(const StreamWork& work, AcceptFn accept, SlicePlaces* places)
    : work_(work),
      accept_(std::move(accept)),
      places_(places),
      answers_(work.server_cuts ? AnswerTracker::Within(work.rows) : AnswerTracker::Exactly(work.slices)) {}

absl::Status StreamAnswers::Handle(const grpc::ByteBuffer& message) {
  v1::ComputeLossResponse response;
  absl::StatusOr<wire::PayloadView> payload = wire::Decode(message, &response);
  if (!payload.ok()) return ServerSent("an unreadable message: ", payload.status().message());
  if (summary_.has_value()) return ServerSent("a message after the summary");
  switch (response.kind_case()) {
    case v1::ComputeLossResponse::kAccepted:
      return HandleAccepted(response.accepted());
    case v1::ComputeLossResponse::kSlice:
      return HandleSlice(response.slice(), *payload);
    case v1::ComputeLossResponse::kSummary:
      return HandleSummary(response.summary());
    case v1::ComputeLossResponse::KIND_NOT_SET:
      break;
  }
  return ServerSent("a message of unknown kind");
}

absl::Status StreamAnswers::HandleAccepted(const v1::MicrobatchAccepted& accepted) {
  if (accepted_.has_value()) return ServerSent("`accepted` twice");
  accepted_ = accepted;
  return accept_(accepted.state());
}

absl::Status StreamAnswers::HandleSlice(const v1::SliceResult& result, const wire::PayloadView& payload) {
  if (!accepted_.has_value()) return ServerSent("a slice before `accepted`");
  absl::Status status = answers_.Take(result.rows());
  if (!status.ok()) return status;
  const Rows rows{result.rows().begin(), result.rows().end()};
  const uint8_t* in_region = nullptr;
  if (result.in_region()) {
    in_region = places_ == nullptr ? nullptr : places_->Find(rows.begin, rows.size() * work_.row_bytes);
    if (in_region == nullptr || !payload.empty())
      return ServerSent("gradients in a region for ", Text(result.rows()), ", which are not in one");
  }
  const size_t gradient_bytes = in_region != nullptr ? rows.size() * work_.row_bytes : payload.size();
  status = CheckSizes(result, gradient_bytes, rows.size());
  if (!status.ok()) return status;
  status = TakeGradients(payload, in_region, rows);
  if (!status.ok()) return status;
  Scatter(result, rows);
  if (places_ != nullptr) places_->Free(rows.begin);
  received_bytes_ += gradient_bytes;
  received_in_messages_ += payload.size();
  return absl::OkStatus();
}

absl::Status StreamAnswers::CheckSizes(const v1::SliceResult& result, size_t gradient_bytes,
                                       uint64_t rows) const {
  const uint64_t expected = work_.outputs.grad_hidden != nullptr ? rows * work_.row_bytes : 0;
  if (gradient_bytes != expected) {
    return ServerSent(errors::ExactBytes(gradient_bytes), " of gradients for ", Text(result.rows()), "; ",
                      expected, " were expected");
  }
  const LossOutputs& outputs = work_.outputs;
  absl::Status status =
      CheckCount("row_loss", result.row_loss_size(), !outputs.row_loss.empty(), result.rows());
  status.Update(CheckCount("row_lse", result.row_lse_size(), !outputs.row_lse.empty(), result.rows()));
  status.Update(
      CheckCount("row_entropy", result.row_entropy_size(), !outputs.row_entropy.empty(), result.rows()));
  status.Update(
      CheckCount("row_logprob", result.row_logprob_size(), !outputs.row_logprob.empty(), result.rows()));
  status.Update(
      CheckCount("row_argmax", result.row_argmax_size(), !outputs.row_argmax.empty(), result.rows()));
  return status;
}

absl::Status StreamAnswers::TakeGradients(const wire::PayloadView& payload, const uint8_t* in_region,
                                          Rows rows) const {
  if (work_.outputs.grad_hidden == nullptr) return absl::OkStatus();
  uint8_t* const to = static_cast<uint8_t*>(work_.outputs.grad_hidden) + rows.begin * work_.row_bytes;
  if (in_region != nullptr) return places_->Fetch(in_region, rows.size() * work_.row_bytes, to);
  if (work_.gpu.has_value()) {
    std::vector<uint8_t> bytes(payload.size());
    payload.CopyTo(bytes.data());
    return CopyBytes(to, bytes.data(), bytes.size(), work_.gpu, work_.after.get());
  }
  payload.CopyTo(to);
  return absl::OkStatus();
}

void StreamAnswers::Scatter(const v1::SliceResult& result, Rows rows) const {
  const LossOutputs& outputs = work_.outputs;
  CopyRows(result.row_loss(), rows.begin, outputs.row_loss);
  CopyRows(result.row_lse(), rows.begin, outputs.row_lse);
  CopyRows(result.row_entropy(), rows.begin, outputs.row_entropy);
  CopyRows(result.row_logprob(), rows.begin, outputs.row_logprob);
  CopyRows(result.row_argmax(), rows.begin, outputs.row_argmax);
}

absl::Status StreamAnswers::HandleSummary(const v1::MicrobatchSummary& summary) {
  if (!accepted_.has_value()) return ServerSent("the summary before `accepted`");
  if (!answers_.Complete() || answers_.answered_rows() < summary.valid_rows()) {
    return ServerSent("the summary of ", summary.valid_rows(), " valid rows after results of ",
                      answers_.answered_rows(), " rows");
  }
  if (summary.state().incarnation() != accepted_->state().incarnation()) {
    return ServerSent("another incarnation in the summary than in `accepted`");
  }
  summary_ = summary;
  return absl::OkStatus();
}

absl::Status StreamAnswers::CheckEnd() const {
  if (!summary_.has_value()) return ServerSent("no summary before it ended the call");
  return absl::OkStatus();
}

// ---- LossStream ----

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
