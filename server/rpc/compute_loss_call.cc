// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/compute_loss_call.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/bytes.h"
#include "kernels/errors/field_error.h"
#include "server/messages/convert.h"
#include "server/messages/errors.h"
#include "server/rpc/region_ranges.h"

namespace lossd::rpc {

namespace {

// What is written of a slice whose answer another thread's wake-up would hold up more than the writing does.
constexpr int64_t kQuickRows = 1024;
constexpr int64_t kQuickBytes = int64_t{64} << 10;

// Has gradients of these rows, which are retained, lie in a region if the message says so.
absl::Status UseRegion(const v1::OpenBackward& backward, engine::RowRange rows, regions::Regions* regions,
                       const std::string& identity, SlicePlaces* places) {
  if (backward.region().empty() && !backward.has_in_region()) return absl::OkStatus();
  if (backward.region().empty() || !backward.has_in_region()) {
    return errors::FieldError("backward.in_region", "come with backward.region, and only with it",
                              backward.has_in_region() ? "a range without a region" : "nothing");
  }
  if (!backward.want_grad_hidden()) {
    return errors::FieldError("backward.in_region", "come with want_grad_hidden only",
                              "a range for gradients that are not wanted");
  }
  auto region = ClaimRegion(regions, "backward.region", backward.region(), identity);
  if (!region.ok()) return region.status();
  return places->UseForGradients(*std::move(region), backward.in_region(), rows.begin);
}

}  // namespace

ComputeLossCall* ComputeLossCall::Start(ComputeLossEnvironment* environment,
                                        grpc::CallbackServerContext* context) {
  // Not make_shared: the constructor is private.
  std::shared_ptr<ComputeLossCall> call(new ComputeLossCall(environment, context));
  call->self_ = call;
  environment->metrics->CountRequest(kComputeLoss);
  const absl::StatusOr<AdmittedCall> allowed = environment->access->Admit(*context, kComputeLoss);
  absl::Status admitted = allowed.status();
  if (admitted.ok()) {
    call->peer_ = PeerKey(*context, allowed->identity);
    call->identity_ = allowed->identity;
    call->set_until(allowed->until);
    admitted = environment->registry->Add(call.get(), call->peer_);
    if (admitted.ok()) call->totals_ = environment->peers->Open(call->peer_, call->came_);
  }
  absl::MutexLock lock(&call->mutex_);
  if (allowed.ok() && environment->draining) {
    call->FailLocked(absl::UnavailableError("the server is draining"));
  } else if (!admitted.ok()) {
    call->FailLocked(std::move(admitted));
  } else {
    call->ReadNext();
  }
  return call.get();
}

ComputeLossCall::ComputeLossCall(ComputeLossEnvironment* environment, grpc::CallbackServerContext* context)
    : environment_(environment), context_(context), came_(clocks::SteadyNow()) {}

// ---- Reading ----

void ComputeLossCall::OnReadDone(bool ok) {
  {
    absl::MutexLock lock(&mutex_);
    reading_ = false;
    Progress();
  }
  if (!ok) return HandleEndOfReads();
  if (absl::Status status = HandleMessage(); !status.ok()) Fail(std::move(status));
}

absl::Status ComputeLossCall::HandleMessage() {
  const absl::Time arrived = clocks::SteadyNow();
  v1::ComputeLossRequest request;
  absl::StatusOr<wire::PayloadView> payload = wire::Decode(received_, &request);
  received_.Clear();
  if (!payload.ok()) return payload.status();
  switch (request.kind_case()) {
    case v1::ComputeLossRequest::kOpen:
      return HandleOpen(request.open(), payload->size());
    case v1::ComputeLossRequest::kSlice:
      return HandleSlice(request.slice(), *std::move(payload), arrived);
    case v1::ComputeLossRequest::kBackward:
      return HandleBackward(request.backward(), payload->size());
    case v1::ComputeLossRequest::KIND_NOT_SET:
      break;
  }
  return errors::FieldError("kind", "be open, slice or backward", "neither");
}

absl::Status ComputeLossCall::HandleOpen(const v1::OpenMicrobatch& open, size_t payload_bytes) {
  const absl::Time now = clocks::SteadyNow();
  if (stream() != nullptr) return errors::FieldError("open", "be sent once, first", "a second one");
  if (payload_bytes > 0)
    return errors::FieldError("payload", "be empty with open", errors::ExactBytes(payload_bytes));
  if (open.has_incarnation()) {
    const absl::Status meant = messages::CheckIncarnation("open.incarnation", open.incarnation(),
                                                          environment_->engine->incarnation());
    if (!meant.ok()) return meant;
  }
  absl::StatusOr<engine::StreamSpec> spec = messages::ToStreamSpec(open);
  if (!spec.ok()) return spec.status();
  spec->peer = peer_;
  spec->identity = identity_;
  const Traffic traffic{.head = spec->head,
                        .microbatch_id = spec->microbatch_id,
                        .shared_memory = !open.region().empty(),
                        .rows = spec->rows.size()};
  if (!open.region().empty()) {
    auto region = ClaimRegion(environment_->regions, "open.region", open.region(), identity_);
    if (!region.ok()) return region.status();
    places_.Use(*std::move(region));
  }
  absl::StatusOr<std::unique_ptr<engine::Stream>> opened = environment_->engine->Open(
      *std::move(spec), std::make_shared<CallInbox>(shared_from_this(), environment_->senders));
  if (!opened.ok()) return opened.status();
  absl::MutexLock lock(&mutex_);
  traffic_ = traffic;
  if (Accept(*std::move(opened), now)) ReadNext();
  return absl::OkStatus();
}

absl::Status ComputeLossCall::HandleBackward(const v1::OpenBackward& backward, size_t payload_bytes) {
  const absl::Time now = clocks::SteadyNow();
  if (stream() != nullptr)
    return errors::FieldError("backward", "be the first message", "one after open or backward");
  if (payload_bytes > 0) {
    return errors::FieldError("payload", "be empty with backward", errors::ExactBytes(payload_bytes));
  }
  if (backward.has_incarnation()) {
    const absl::Status meant = messages::CheckIncarnation("backward.incarnation", backward.incarnation(),
                                                          environment_->engine->incarnation());
    if (!meant.ok()) return meant;
  }
  absl::StatusOr<engine::BackwardSpec> spec = messages::ToBackwardSpec(backward);
  if (!spec.ok()) return spec.status();
  spec->peer = peer_;
  if (absl::Status status = UseRegion(backward, spec->rows, environment_->regions, identity_, &places_);
      !status.ok())
    return status;
  const Traffic traffic{.head = spec->head,
                        .microbatch_id = spec->microbatch_id,
                        .shared_memory = !backward.region().empty(),
                        .rows = spec->rows.size()};
  absl::StatusOr<std::unique_ptr<engine::Stream>> opened = environment_->engine->OpenBackward(
      *std::move(spec), std::make_shared<CallInbox>(shared_from_this(), environment_->senders));
  if (!opened.ok()) return opened.status();
  std::optional<engine::RowRange> next;
  {
    absl::MutexLock lock(&mutex_);
    backward_ = true;
    traffic_ = traffic;
    const std::vector<engine::RowRange> slices = (*opened)->RetainedSlices();
    retained_slices_.assign(slices.begin(), slices.end());
    if (Accept(*std::move(opened), now)) next = NextSlice();
  }
  ReceiveRetained(next);
  return absl::OkStatus();
}

bool ComputeLossCall::Accept(std::unique_ptr<engine::Stream> stream, absl::Time now) {
  v1::ComputeLossResponse response;
  *response.mutable_accepted()->mutable_state() = messages::ToProto(stream->state());
  *response.mutable_accepted()->mutable_limits() = messages::ToProto(stream->limits());
  stream_ = std::move(stream);
  opened_ = now;
  if (broken_) {
    stream_->Cancel(CancellationStatus(*context_));
    return false;
  }
  writes_.push_back({.message = wire::Encode(response), .ready = now});
  Pump();
  stream_->Start();  // results come through the inbox, so none can overtake `accepted`
  return true;
}

absl::Status ComputeLossCall::HandleSlice(const v1::SliceHeader& header, wire::PayloadView payload,
                                          absl::Time arrived) {
  const std::shared_ptr<engine::Stream> stream = this->stream();
  if (stream == nullptr)
    return errors::FieldError("slice", "come after open", "a slice as the first message");
  const absl::StatusOr<engine::RowRange> rows =
      messages::ToRowRange(header.rows(), "slice.rows", std::numeric_limits<int64_t>::max());
  if (!rows.ok()) return rows.status();
  absl::StatusOr<engine::IncomingSlice> slice = places_.Take(header, *rows, std::move(payload));
  if (!slice.ok()) return slice.status();
  std::string head;  // for a trace; empty: none is recorded
  if (environment_->metrics->trace().recording()) head = std::string(stream->head());
  slice->copy = [copy = std::move(slice->copy), bytes = slice->bytes, arrived, rows = *rows,
                 head = std::move(head), id = stream->microbatch_id(),
                 metrics = environment_->metrics](uint8_t* to) mutable {
    copy(to);
    metrics->AddPayloadIn(bytes);
    metrics->ObservePhase(metrics::Phase::kReceive, absl::ToDoubleSeconds(clocks::SteadyNow() - arrived));
    if (head.empty()) return;
    metrics->trace().Add(head, {.kind = metrics::SpanKind::kReceive,
                                .id = id,
                                .first_row = rows.begin,
                                .rows = rows.size(),
                                .begin = arrived,
                                .end = clocks::SteadyNow()});
  };
  slice->on_queued = [self = shared_from_this(), rows = rows->size(), bytes = slice->bytes](int64_t used) {
    self->OnQueued(rows, bytes, used);
  };
  stream->Receive(*std::move(slice));
  return absl::OkStatus();
}

void ComputeLossCall::HandleEndOfReads() {
  if (context_->IsCancelled()) return OnCancel();
  const std::shared_ptr<engine::Stream> stream = this->stream();
  if (stream == nullptr) return Fail(errors::FieldError("open", "come before the half-close", "nothing"));
  stream->HalfClose();
}

void ComputeLossCall::ReceiveRetained(std::optional<engine::RowRange> rows) {
  const std::shared_ptr<engine::Stream> stream = this->stream();
  while (rows.has_value() && stream != nullptr) {  // no stream: the call has ended
    stream->Receive(
        {.rows = *rows, .on_queued = [self = shared_from_this(), size = rows->size()](int64_t used) {
           self->OnQueued(size, 0, used);
         }});
    absl::MutexLock lock(&mutex_);
    rows = std::exchange(next_retained_, std::nullopt);
    receiving_retained_ = rows.has_value();
  }
}

void ComputeLossCall::OnQueued(int64_t rows, int64_t bytes, int64_t staging_bytes) {
  totals_->Queued(bytes, clocks::SteadyNow());
  std::optional<engine::RowRange> next;
  {
    absl::MutexLock lock(&mutex_);
    staging_bytes_ += staging_bytes;
    traffic_.queued_rows += rows;
    traffic_.received_bytes += bytes;
    Progress();
    next = NextSlice();
  }
  ReceiveRetained(next);
}

bool ComputeLossCall::EnoughInFlight() const {
  const bool in_order = stream_ != nullptr && stream_->limits().has_grid();
  return !in_order && staging_bytes_ >= environment_->max_staging_bytes;
}

std::optional<engine::RowRange> ComputeLossCall::NextSlice() {
  if (!backward_) {
    ReadNext();
    return std::nullopt;
  }
  read_withheld_ = EnoughInFlight();
  if (finished_ || read_withheld_ || retained_slices_.empty()) return std::nullopt;
  const engine::RowRange next = retained_slices_.front();
  retained_slices_.pop_front();
  if (!std::exchange(receiving_retained_, true)) return next;
  next_retained_ = next;
  return std::nullopt;
}

void ComputeLossCall::ReadNext() {
  if (finished_) return;
  read_withheld_ = EnoughInFlight();
  if (read_withheld_) return;
  reading_ = true;  // which is what the call then waits for
  StartRead(&received_);
  Progress();
}

// ---- What the engine tells ----

bool ComputeLossCall::IsQuick(const CallInbox::Slice& slice) {
  const engine::SliceOutput& output = slice.output;
  if (output.rows.size() > kQuickRows || places_.AnswerCopies(output)) return false;
  return !output.grad_hidden || output.grad_bytes <= kQuickBytes;
}

void ComputeLossCall::Handle(CallInbox::Slice slice) {
  Outgoing outgoing;
  outgoing.is_slice = true;
  outgoing.rows = slice.output.rows.size();
  totals_->Computed(slice.output.queue_seconds);
  outgoing.staging_bytes = slice.output.staging_bytes;
  outgoing.ready = slice.ready;
  outgoing.payload_bytes = slice.output.grad_hidden ? slice.output.grad_bytes : 0;
  outgoing.range = slice.output.rows;
  outgoing.message = places_.Answer(std::move(slice.output));
  absl::MutexLock lock(&mutex_);
  writes_.push_back(std::move(outgoing));
  Pump();
}

void ComputeLossCall::Handle(CallInbox::End end) {
  absl::MutexLock lock(&mutex_);
  if (end.status.ok()) {
    v1::ComputeLossResponse response;
    *response.mutable_summary() = messages::ToProto(end.summary);
    environment_->metrics->ObserveMicrobatch(absl::ToDoubleSeconds(clocks::SteadyNow() - opened_));
    writes_.push_back({.message = wire::Encode(response), .ready = clocks::SteadyNow()});
  }
  ending_ = std::move(end.status);
  Pump();
}

}  // namespace lossd::rpc
