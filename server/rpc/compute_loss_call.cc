// SPDX-License-Identifier: Apache-2.0
// The ComputeLoss call (compute_loss_call.h): its inbox, regions, places of slices, the table of peers, and
// the call itself with reading, writing and ending.
#include "server/rpc/compute_loss_call.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "proto/wire/status_details.h"
#include "server/log/log.h"
#include "server/messages/convert.h"

namespace lossd::rpc {

// ---- CallInbox ----

void CallInbox::OnMemory(absl::AnyInvocable<void()> receive) { Post(std::move(receive)); }

void CallInbox::OnSlice(engine::SliceOutput output) {
  Post(Slice{.output = std::move(output), .ready = clocks::SteadyNow()});
}

void CallInbox::OnFinished(absl::Status status, const engine::StreamSummary& summary) {
  Post(End{.status = std::move(status), .summary = summary});
}

void CallInbox::Post(Event event) {
  const bool quick = IsQuick(event);
  {
    absl::MutexLock lock(&mutex_);
    events_.push_back(std::move(event));
    if (std::exchange(turn_scheduled_, true)) return;
  }
  if (quick) {
    TakeQuickTurn();
  } else {
    ScheduleTurn();
  }
}

bool CallInbox::IsQuick(const Event& event) {
  if (auto* const slice = std::get_if<Slice>(&event)) return handler_->IsQuick(*slice);
  return std::holds_alternative<End>(event);
}

void CallInbox::ScheduleTurn() {
  auto turn = [self = shared_from_this()] { self->TakeTurn(); };
  if (!workers_->Schedule(turn)) turn();
}

void CallInbox::TakeQuickTurn() {
  while (true) {
    std::optional<Event> event;
    {
      absl::MutexLock lock(&mutex_);
      turn_scheduled_ = !events_.empty();
      if (events_.empty()) return;
      if (IsQuick(events_.front())) {
        event = std::move(events_.front());
        events_.pop_front();
      }
    }
    if (!event.has_value()) return ScheduleTurn();
    Deliver(*std::move(event));
  }
}

void CallInbox::TakeTurn() {
  while (true) {
    std::deque<Event> events;
    {
      absl::MutexLock lock(&mutex_);
      events.swap(events_);
      turn_scheduled_ = !events.empty();
    }
    if (events.empty()) return;
    for (Event& event : events) Deliver(std::move(event));
  }
}

void CallInbox::Deliver(Event event) {
  if (auto* const receive = std::get_if<absl::AnyInvocable<void()>>(&event)) {
    (*receive)();
  } else if (auto* const slice = std::get_if<Slice>(&event)) {
    handler_->Handle(std::move(*slice));
  } else {
    handler_->Handle(std::get<End>(std::move(event)));
  }
}

// ---- Regions that a call names ----

absl::StatusOr<std::shared_ptr<regions::Region>> ClaimRegion(regions::Regions* regions,
                                                             absl::string_view field, const std::string& id,
                                                             const std::string& identity) {
  std::shared_ptr<regions::Region> region = regions == nullptr ? nullptr : regions->Claim(id, identity);
  if (region != nullptr) return region;
  return errors::FieldError(field, "be a region of this client that is open", "another one",
                            absl::StatusCode::kUnavailable);
}

absl::StatusOr<absl::Span<uint8_t>> BytesOf(const regions::Region& region, absl::string_view field,
                                            const v1::RegionRange& range) {
  const absl::Span<uint8_t> memory = region.bytes();
  if (range.offset() % kRegionAlignment != 0) {
    return errors::FieldError(absl::StrCat(field, ".offset"),
                              absl::StrCat("be a multiple of ", kRegionAlignment), range.offset());
  }
  if (range.offset() >= memory.size()) {
    return errors::FieldError(absl::StrCat(field, ".offset"),
                              absl::StrCat("be below ", memory.size(), ", the size of the region"),
                              range.offset());
  }
  const uint64_t most = memory.size() - range.offset();
  if (range.bytes() == 0 || range.bytes() > most) {
    return errors::FieldError(absl::StrCat(field, ".bytes"),
                              absl::StrCat("be in [1, ", most, "] at offset ", range.offset()),
                              range.bytes());
  }
  return memory.subspan(range.offset(), range.bytes());
}

// ---- SlicePlaces ----

absl::Status SlicePlaces::UseForGradients(std::shared_ptr<regions::Region> region,
                                          const v1::RegionRange& range, int64_t first_row) {
  LOSSD_TRY(const absl::Span<uint8_t> bytes, BytesOf(*region, "backward.in_region", range));
  region_ = std::move(region);
  gradients_ = bytes;
  first_row_ = first_row;
  return absl::OkStatus();
}

absl::StatusOr<engine::IncomingSlice> SlicePlaces::Take(const v1::SliceHeader& header,
                                                        const engine::RowRange& rows,
                                                        wire::PayloadView payload) {
  engine::IncomingSlice slice{.rows = rows};
  if (!header.has_in_region()) {
    slice.bytes = static_cast<int64_t>(payload.size());
    slice.copy = [payload = std::move(payload)](uint8_t* to) { payload.CopyTo(to); };
    return slice;
  }
  if (!payload.empty()) {
    return errors::FieldError("payload", "be empty for a slice in a region",
                              errors::ExactBytes(payload.size()));
  }
  if (region_ == nullptr)
    return errors::FieldError("slice.in_region", "come with open.region", "a slice without a region");
  LOSSD_TRY(const absl::Span<uint8_t> bytes, BytesOf(*region_, "slice.in_region", header.in_region()));
  slice.bytes = static_cast<int64_t>(bytes.size());
  slice.in_place = engine::StagingBuffer(bytes.data(), slice.bytes, [region = region_] {});
  slice.copy = [region = region_, from = bytes](uint8_t* to) {
    // If the copy fails, the device has failed for good, and the chunk fails too; so the error needs no
    // handling here.
    if (to != from.data()) region->memory().CopyToHost(from, to).IgnoreError();
  };
  absl::MutexLock lock(&mutex_);
  // Keeps the first entry: a slice that repeats rows is refused later, maybe while the gradients of the first
  // slice are still being sent.
  in_region_.try_emplace(rows.begin, bytes);
  return slice;
}

uint8_t* SlicePlaces::Place(const engine::SliceOutput& output) {
  if (!gradients_.empty()) {
    const int64_t row_bytes = output.grad_bytes / output.rows.size();
    const int64_t fitting = static_cast<int64_t>(gradients_.size()) / row_bytes;  // rows that fit
    if (output.rows.end - first_row_ > fitting) return nullptr;
    return gradients_.data() + (output.rows.begin - first_row_) * row_bytes;
  }
  absl::MutexLock lock(&mutex_);
  const auto place = in_region_.find(output.rows.begin);
  if (place == in_region_.end() || static_cast<int64_t>(place->second.size()) < output.grad_bytes)
    return nullptr;
  return place->second.data();
}

SlicePlaces::Delivery SlicePlaces::DeliveryOf(const engine::SliceOutput& output) {
  if (!output.grad_hidden) return Delivery::kNone;
  const uint8_t* const in_region = Place(output);
  if (in_region == nullptr) return Delivery::kInMessage;
  return in_region == output.grad_hidden.data() ? Delivery::kNone : Delivery::kCopied;
}

grpc::ByteBuffer SlicePlaces::Answer(engine::SliceOutput output) {
  v1::ComputeLossResponse response;
  *response.mutable_slice() = messages::ToProto(output);
  if (!output.grad_hidden) return wire::Encode(response);
  uint8_t* const in_region = Place(output);
  const uint8_t* const data = output.grad_hidden.data();
  const auto bytes = static_cast<size_t>(output.grad_bytes);
  if (in_region != nullptr &&
      (data == in_region || region_->memory().CopyFromHost(data, {in_region, bytes}).ok())) {
    response.mutable_slice()->set_in_region(true);
    return wire::Encode(response);
  }
  return wire::Encode(response, {data, bytes},
                      [buffer = std::move(output.grad_hidden)]() mutable { buffer.Release(); });
}

// ---- PeerTable ----

void PeerTable::Peer::Open(absl::Time now) {
  absl::MutexLock lock(&mutex_);
  ++totals_.open_streams;
  ++totals_.streams;
  totals_.last_active = now;
}

void PeerTable::Peer::Queued(int64_t bytes, absl::Time now) {
  absl::MutexLock lock(&mutex_);
  totals_.received_bytes += bytes;
  totals_.last_active = now;
}

void PeerTable::Peer::Computed(double device_wait_seconds) {
  absl::MutexLock lock(&mutex_);
  totals_.device_wait_seconds += device_wait_seconds;
}

void PeerTable::Peer::Sent(int64_t rows, int64_t bytes, absl::Time now) {
  absl::MutexLock lock(&mutex_);
  totals_.rows += rows;
  totals_.sent_bytes += bytes;
  totals_.last_active = now;
}

void PeerTable::Peer::Close() {
  absl::MutexLock lock(&mutex_);
  --totals_.open_streams;
}

PeerTotals PeerTable::Peer::totals() const {
  absl::MutexLock lock(&mutex_);
  return totals_;
}

std::shared_ptr<PeerTable::Peer> PeerTable::Open(const std::string& peer, absl::Time now) {
  absl::MutexLock lock(&mutex_);
  auto found = peers_.find(peer);
  if (found == peers_.end()) {
    while (peers_.size() >= most_ && ForgetOne()) {
    }
    found = peers_.emplace(peer, std::make_shared<Peer>()).first;
  }
  found->second->Open(now);
  return found->second;
}

bool PeerTable::ForgetOne() {
  auto idlest = peers_.end();
  absl::Time since = absl::InfiniteFuture();
  for (auto it = peers_.begin(); it != peers_.end(); ++it) {
    const PeerTotals totals = it->second->totals();
    if (totals.open_streams > 0 || totals.last_active >= since) continue;
    since = totals.last_active;
    idlest = it;
  }
  if (idlest == peers_.end()) return false;
  peers_.erase(idlest);
  return true;
}

std::vector<PeerTable::Entry> PeerTable::List() const {
  std::vector<Entry> entries;
  absl::MutexLock lock(&mutex_);
  for (const auto& [name, peer] : peers_) entries.push_back({.peer = name, .totals = peer->totals()});
  return entries;
}

// ---- ComputeLossCall ----

namespace {

// The most bytes of an answer that is written at once: for a larger answer, writing takes longer than waking
// another thread.
constexpr int64_t kQuickBytes = int64_t{64} << 10;

// The bytes of the row results in an answer.
int64_t ResultBytes(const engine::SliceOutput& output) {
  const size_t values = output.loss.size() + output.lse.size() + output.entropy.size() +
                        output.logprob.size() + output.argmax.size() + output.class_logprobs.size() +
                        output.top_logprobs.size() + output.top_classes.size();
  return static_cast<int64_t>(values * sizeof(float));
}

// If the message names a region, makes the gradients of these retained rows go there.
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
  LOSSD_TRY(auto region, ClaimRegion(regions, "backward.region", backward.region(), identity));
  return places->UseForGradients(std::move(region), backward.in_region(), rows.begin);
}

// The context of a call that came over a connection.
class GrpcContext final : public wire::CallContext {
 public:
  explicit GrpcContext(grpc::CallbackServerContext* context) : context_(context) {}
  std::string peer() const override { return context_->peer(); }
  bool IsCancelled() const override { return context_->IsCancelled(); }
  bool DeadlineHasPassed() const override { return wire::HasPassed(context_->raw_deadline()); }
  void TryCancel() override { context_->TryCancel(); }
  void RunHere(absl::FunctionRef<void()> operations) override { operations(); }

 private:
  grpc::CallbackServerContext* const context_;
};

// Why a call was cancelled: DEADLINE_EXCEEDED or CANCELLED.
absl::Status CancellationStatus(const wire::CallContext& context) {
  if (context.DeadlineHasPassed()) return absl::DeadlineExceededError("the call's deadline has passed");
  return absl::CancelledError("the client cancelled the call or went away");
}

}  // namespace

LossCaller CallerOver(grpc::CallbackServerContext* context, const AccessControl& access) {
  LossCaller caller{.context = std::make_shared<GrpcContext>(context),
                    .admitted = access.Admit(*context, kComputeLoss)};
  if (caller.admitted.ok()) caller.peer = PeerKey(*context, caller.admitted->identity);
  return caller;
}

LossCaller DirectCaller(wire::CallContext* context, uint64_t client) {
  return {.context = {std::shared_ptr<void>(), context},  // the call owns it
          .admitted = AdmittedCall(),
          .peer = PeerOf(context->peer(), client)};
}

ComputeLossCall::ComputeLossCall(ComputeLossEnvironment* environment, LossCaller caller)
    : environment_(environment),
      context_(std::move(caller.context)),
      peer_(std::move(caller.peer)),
      identity_(caller.admitted.ok() ? caller.admitted->identity : ""),
      came_(clocks::SteadyNow()) {}

ComputeLossCall* ComputeLossCall::Start(ComputeLossEnvironment* environment, LossCaller caller) {
  environment->metrics->CountRequest(kComputeLoss);
  const absl::StatusOr<AdmittedCall> admitted = caller.admitted;
  // Not make_shared: the constructor is private.
  std::shared_ptr<ComputeLossCall> call(new ComputeLossCall(environment, std::move(caller)));
  call->self_ = call;
  absl::Status refusal = admitted.status();
  if (admitted.ok()) {
    call->set_until(admitted->until);
    refusal = environment->registry->Add(call.get(), call->peer_);
    if (refusal.ok()) call->totals_ = environment->peers->Open(call->peer_, call->came_);
  }
  absl::MutexLock lock(&call->mutex_);
  if (admitted.ok() && environment->draining) {
    call->FailLocked(absl::UnavailableError("the server is draining"));
  } else if (!refusal.ok()) {
    call->FailLocked(std::move(refusal));
  } else {
    call->ReadNext();
  }
  return call.get();
}

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
  if (open.has_incarnation())
    LOSSD_RETURN_IF_ERROR(messages::CheckIncarnation("open.incarnation", open.incarnation(),
                                                     environment_->engine->incarnation()));
  LOSSD_TRY(engine::StreamSpec spec, messages::ToStreamSpec(open));
  spec.peer = peer_;
  spec.identity = identity_;
  const Traffic traffic{.head = spec.head,
                        .microbatch_id = spec.microbatch_id,
                        .shared_memory = !open.region().empty(),
                        .rows = spec.rows.size()};
  if (!open.region().empty()) {
    LOSSD_TRY(auto region, ClaimRegion(environment_->regions, "open.region", open.region(), identity_));
    places_.Use(std::move(region));
  }
  LOSSD_TRY(std::unique_ptr<engine::Stream> opened,
            environment_->engine->Open(
                std::move(spec), std::make_shared<CallInbox>(shared_from_this(), environment_->senders)));
  absl::MutexLock lock(&mutex_);
  traffic_ = traffic;
  if (Accept(std::move(opened), now)) ReadNext();
  return absl::OkStatus();
}

absl::Status ComputeLossCall::HandleBackward(const v1::OpenBackward& backward, size_t payload_bytes) {
  const absl::Time now = clocks::SteadyNow();
  if (stream() != nullptr)
    return errors::FieldError("backward", "be the first message", "one after open or backward");
  if (payload_bytes > 0) {
    return errors::FieldError("payload", "be empty with backward", errors::ExactBytes(payload_bytes));
  }
  if (backward.has_incarnation())
    LOSSD_RETURN_IF_ERROR(messages::CheckIncarnation("backward.incarnation", backward.incarnation(),
                                                     environment_->engine->incarnation()));
  LOSSD_TRY(engine::BackwardSpec spec, messages::ToBackwardSpec(backward));
  spec.peer = peer_;
  LOSSD_RETURN_IF_ERROR(UseRegion(backward, spec.rows, environment_->regions, identity_, &places_));
  const Traffic traffic{.head = spec.head,
                        .microbatch_id = spec.microbatch_id,
                        .shared_memory = !backward.region().empty(),
                        .rows = spec.rows.size()};
  LOSSD_TRY(std::unique_ptr<engine::Stream> opened,
            environment_->engine->OpenBackward(
                std::move(spec), std::make_shared<CallInbox>(shared_from_this(), environment_->senders)));
  std::optional<engine::RowRange> next;
  {
    absl::MutexLock lock(&mutex_);
    backward_ = true;
    traffic_ = traffic;
    const std::vector<engine::RowRange> slices = opened->RetainedSlices();
    retained_slices_.assign(slices.begin(), slices.end());
    if (Accept(std::move(opened), now)) next = NextSlice();
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
  stream_->Start();  // `accepted` is first, because results come through the inbox
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
  if (!stream->brings_rows() && !payload.empty()) {
    return errors::FieldError("payload", "be empty for rows of an embedding",
                              errors::ExactBytes(payload.size()));
  }
  LOSSD_TRY(engine::IncomingSlice slice, places_.Take(header, *rows, std::move(payload)));
  std::string head;  // for a trace; empty: none is recorded
  if (environment_->metrics->trace().recording()) head = std::string(stream->head());
  const int64_t brought = stream->brings_rows() ? slice.bytes : 0;
  slice.copy = [copy = std::move(slice.copy), bytes = brought, arrived, rows = *rows, head = std::move(head),
                id = stream->microbatch_id(), metrics = environment_->metrics](uint8_t* to) mutable {
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
  slice.on_queued = [self = shared_from_this(), rows = rows->size(), bytes = brought](int64_t used) {
    self->OnQueued(rows, bytes, used);
  };
  stream->Receive(std::move(slice));
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
  while (rows.has_value() && stream != nullptr) {  // null: the call has ended
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
  reading_ = true;  // before Progress, so that the clock runs for a message
  StartRead(&received_);
  Progress();
}

// ---- Events of the engine ----

bool ComputeLossCall::IsQuick(const CallInbox::Slice& slice) {
  const engine::SliceOutput& output = slice.output;
  const SlicePlaces::Delivery delivery = places_.DeliveryOf(output);
  if (delivery == SlicePlaces::Delivery::kCopied) return false;
  const int64_t in_message = delivery == SlicePlaces::Delivery::kInMessage ? output.grad_bytes : 0;
  return in_message + ResultBytes(output) <= kQuickBytes;
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
  context_->RunHere([&] {
    absl::MutexLock lock(&mutex_);
    writes_.push_back(std::move(outgoing));
    Pump();
  });
}

void ComputeLossCall::Handle(CallInbox::End end) {
  context_->RunHere([&] {
    absl::MutexLock lock(&mutex_);
    if (end.status.ok()) {
      v1::ComputeLossResponse response;
      *response.mutable_summary() = messages::ToProto(end.summary);
      environment_->metrics->ObserveMicrobatch(absl::ToDoubleSeconds(clocks::SteadyNow() - opened_));
      writes_.push_back({.message = wire::Encode(response), .ready = clocks::SteadyNow()});
    }
    ending_ = std::move(end.status);
    Pump();
  });
}

namespace {

// Records in the trace that a slice of `stream` was written; `ready`: when it was ready to be written.
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
    finished_ = true;  // sends the summary and the end together
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
    stream_->Cancel(std::move(why));  // the engine then calls OnFinished, which ends the call
    return;
  }
  ending_ = std::move(why);
  Pump();
}

void ComputeLossCall::FinishLocked() {
  finished_ = true;
  const grpc::Status status =
      CountedEnd(kComputeLoss, *ending_, environment_->engine->incarnation(), environment_->metrics);
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
  clock_.Set(CallClock::Waits::kNothing);  // so that it is reported only once
  log::Log(log::LogLevel::kWarning, "ending a call that waited too long",
           {{"method", kComputeLoss}, {"reason", late.message()}, {"peer", context_->peer()}});
  if (sending) {
    context_->TryCancel();  // a client that does not read would not get a status
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
  std::shared_ptr<engine::Stream> stream;  // breaks the cycle: it owns the inbox, which owns this call
  {
    absl::MutexLock lock(&mutex_);
    stream = std::move(stream_);
  }
  stream.reset();
  const std::shared_ptr<ComputeLossCall> self = std::move(self_);
}

}  // namespace lossd::rpc
