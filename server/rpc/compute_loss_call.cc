#include "server/rpc/compute_loss_call.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/log/log.h"
#include "server/rpc/convert.h"
#include "server/rpc/errors.h"

namespace lossd::rpc {
namespace {

constexpr absl::string_view kMethod = "ComputeLoss";

}  // namespace

ComputeLossCall* ComputeLossCall::Start(ComputeLossEnvironment* environment,
                                        grpc::CallbackServerContext* context) {
  // Not make_shared: the constructor is private.
  std::shared_ptr<ComputeLossCall> call(new ComputeLossCall(environment, context));
  call->self_ = call;
  environment->metrics->CountRequest(kMethod);
  const bool admitted = environment->registry->Add(call.get());
  absl::MutexLock lock(&call->mutex_);
  if (environment->draining) {
    call->FailLocked(absl::UnavailableError("the server is draining"));
  } else if (!admitted) {
    call->FailLocked(absl::ResourceExhaustedError("too many open ComputeLoss calls"));
  } else {
    call->ReadNext();
  }
  return call.get();
}

ComputeLossCall::ComputeLossCall(ComputeLossEnvironment* environment, grpc::CallbackServerContext* context)
    : environment_(environment), context_(context) {}

// ---- Reading ----

void ComputeLossCall::OnReadDone(bool ok) {
  if (!ok) return HandleEndOfReads();
  if (absl::Status status = HandleMessage(); !status.ok()) Fail(std::move(status));
}

absl::Status ComputeLossCall::HandleMessage() {
  const absl::Time arrived = absl::Now();
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
  return FieldError("kind", "be open, slice or backward", "neither");
}

absl::Status ComputeLossCall::HandleOpen(const v1::OpenMicrobatch& open, size_t payload_bytes) {
  const absl::Time now = absl::Now();
  if (stream() != nullptr) return FieldError("open", "be sent once, first", "a second one");
  if (payload_bytes > 0)
    return FieldError("payload", "be empty with open", absl::StrCat(payload_bytes, " bytes"));
  if (open.has_incarnation()) {
    const absl::Status meant =
        CheckIncarnation("open.incarnation", open.incarnation(), environment_->engine->incarnation());
    if (!meant.ok()) return meant;
  }
  absl::StatusOr<engine::StreamSpec> spec = ToStreamSpec(open);
  if (!spec.ok()) return spec.status();
  absl::StatusOr<std::unique_ptr<engine::Stream>> opened =
      environment_->engine->Open(*std::move(spec), shared_from_this());
  if (!opened.ok()) return Located(opened.status(), "open.");
  absl::MutexLock lock(&mutex_);
  if (Accept(*std::move(opened), now)) ReadNext();
  return absl::OkStatus();
}

absl::Status ComputeLossCall::HandleBackward(const v1::OpenBackward& backward, size_t payload_bytes) {
  const absl::Time now = absl::Now();
  if (stream() != nullptr)
    return FieldError("backward", "be the first message", "one after open or backward");
  if (payload_bytes > 0) {
    return FieldError("payload", "be empty with backward", absl::StrCat(payload_bytes, " bytes"));
  }
  if (backward.has_incarnation()) {
    const absl::Status meant =
        CheckIncarnation("backward.incarnation", backward.incarnation(), environment_->engine->incarnation());
    if (!meant.ok()) return meant;
  }
  absl::StatusOr<engine::BackwardSpec> spec = ToBackwardSpec(backward);
  if (!spec.ok()) return spec.status();
  absl::StatusOr<std::unique_ptr<engine::Stream>> opened =
      environment_->engine->OpenBackward(*std::move(spec), shared_from_this());
  if (!opened.ok()) return opened.status();
  bool request_room = false;
  {
    absl::MutexLock lock(&mutex_);
    backward_ = true;
    const std::vector<engine::RowRange> slices = (*opened)->RetainedSlices();
    retained_slices_.assign(slices.begin(), slices.end());
    request_room = Accept(*std::move(opened), now) && NextSlice();
  }
  if (request_room) RequestRoom();
  return absl::OkStatus();
}

bool ComputeLossCall::Accept(std::unique_ptr<engine::Stream> stream, absl::Time now) {
  v1::ComputeLossResponse response;
  *response.mutable_accepted()->mutable_state() = ToProto(stream->state());
  *response.mutable_accepted()->mutable_limits() = ToProto(stream->limits());
  stream_ = std::move(stream);
  opened_ = now;
  if (broken_) {
    stream_->Cancel(CancellationStatus());
    return false;
  }
  Enqueue({.message = wire::Encode(response), .ready = now});
  stream_->Start();  // results come through the inbox, so none can overtake `accepted`
  return true;
}

absl::Status ComputeLossCall::HandleSlice(const v1::SliceHeader& header, wire::PayloadView payload,
                                          absl::Time arrived) {
  const std::shared_ptr<engine::Stream> stream = this->stream();
  if (stream == nullptr) return FieldError("slice", "come after open", "a slice as the first message");
  const absl::StatusOr<engine::RowRange> rows =
      ToRowRange(header.rows(), "slice.rows", std::numeric_limits<int64_t>::max());
  if (!rows.ok()) return rows.status();
  const auto bytes = static_cast<int64_t>(payload.size());
  if (bytes > stream->limits().max_bytes) {
    return FieldError("payload", absl::StrCat("have at most ", stream->limits().max_bytes, " bytes"), bytes);
  }
  arrival_ = Arrival{.rows = *rows, .payload = std::move(payload), .arrived = arrived};
  RequestRoom();
  return absl::OkStatus();
}

void ComputeLossCall::HandleEndOfReads() {
  if (context_->IsCancelled()) return OnCancel();
  const std::shared_ptr<engine::Stream> stream = this->stream();
  if (stream == nullptr) return Fail(FieldError("open", "come before the half-close", "nothing"));
  stream->HalfClose();
}

void ComputeLossCall::RequestRoom() {
  const std::shared_ptr<engine::Stream> stream = this->stream();
  if (stream == nullptr) return;  // the call has ended
  const int64_t bytes = arrival_->payload.has_value() ? static_cast<int64_t>(arrival_->payload->size()) : 0;
  {
    absl::MutexLock lock(&inbox_mutex_);
    asking_for_room_ = true;
  }
  stream->RequestRoom(arrival_->rows, bytes, [self = shared_from_this()](engine::StagingBuffer room) {
    self->OnRoom(std::move(room));
  });
  engine::StagingBuffer room;
  {
    absl::MutexLock lock(&inbox_mutex_);
    asking_for_room_ = false;
    room = std::move(granted_);
  }
  if (room) SubmitPending(std::move(room));
}

void ComputeLossCall::OnRoom(engine::StagingBuffer room) {
  {
    absl::MutexLock lock(&inbox_mutex_);
    if (asking_for_room_) {
      granted_ = std::move(room);
      return;
    }
  }
  Post(RoomEvent{std::move(room)});
}

void ComputeLossCall::SubmitPending(engine::StagingBuffer room) {
  const Arrival arrival = *std::exchange(arrival_, std::nullopt);
  int64_t bytes = 0;
  if (arrival.payload.has_value()) {
    bytes = static_cast<int64_t>(arrival.payload->size());
    arrival.payload->CopyTo(room.data());
    environment_->metrics->AddPayloadIn(bytes);
    environment_->metrics->ObservePhase(metrics::Phase::kReceive,
                                        absl::ToDoubleSeconds(absl::Now() - arrival.arrived));
  }
  bool request_room = false;
  {
    absl::MutexLock lock(&mutex_);
    if (stream_ == nullptr || finished_) return;  // the call ended while the slice waited for its room
    room_bytes_ += room.bytes();
    if (arrival.payload.has_value()) {
      stream_->Submit(arrival.rows, std::move(room), bytes);
    } else {
      stream_->SubmitRetained(arrival.rows, std::move(room));
    }
    request_room = NextSlice();
  }
  if (request_room) RequestRoom();
}

bool ComputeLossCall::EnoughInFlight() const {
  const bool in_order = stream_ != nullptr && stream_->limits().row_grid > 0;
  return !in_order && room_bytes_ >= environment_->max_room_bytes;
}

bool ComputeLossCall::NextSlice() {
  if (!backward_) {
    ReadNext();
    return false;
  }
  read_withheld_ = EnoughInFlight();
  if (finished_ || read_withheld_ || retained_slices_.empty()) return false;
  arrival_ = Arrival{.rows = retained_slices_.front(), .arrived = absl::Now()};
  retained_slices_.pop_front();
  return true;
}

void ComputeLossCall::ReadNext() {
  if (finished_) return;
  read_withheld_ = EnoughInFlight();
  if (!read_withheld_) StartRead(&received_);
}

// ---- Turns ----

void ComputeLossCall::OnSlice(engine::SliceOutput output) {
  Post(SliceEvent{.output = std::move(output), .ready = absl::Now()});
}

void ComputeLossCall::OnFinished(absl::Status status, const engine::StreamSummary& summary) {
  Post(FinishedEvent{.status = std::move(status), .summary = summary});
}

void ComputeLossCall::Post(Event event) {
  {
    absl::MutexLock lock(&inbox_mutex_);
    inbox_.push_back(std::move(event));
    if (std::exchange(turn_scheduled_, true)) return;
  }
  auto turn = [self = shared_from_this()] { self->TakeTurn(); };
  if (!environment_->senders->Schedule(turn)) turn();
}

void ComputeLossCall::TakeTurn() {
  while (true) {
    std::deque<Event> events;
    {
      absl::MutexLock lock(&inbox_mutex_);
      events.swap(inbox_);
      turn_scheduled_ = !events.empty();
    }
    if (events.empty()) return;
    for (Event& event : events) {
      std::visit([this](auto& e) { Handle(std::move(e)); }, event);
    }
  }
}

void ComputeLossCall::Handle(SliceEvent event) {
  v1::ComputeLossResponse response;
  *response.mutable_slice() = ToProto(event.output);
  Outgoing outgoing;
  outgoing.is_slice = true;
  outgoing.room_bytes = event.output.room_bytes;
  outgoing.ready = event.ready;
  if (event.output.grad_hidden) {
    outgoing.payload_bytes = event.output.grad_bytes;
    const uint8_t* data = event.output.grad_hidden.data();
    outgoing.message =
        wire::Encode(response, {data, static_cast<size_t>(event.output.grad_bytes)},
                     [buffer = std::move(event.output.grad_hidden)]() mutable { buffer.Release(); });
  } else {
    outgoing.message = wire::Encode(response);
  }
  absl::MutexLock lock(&mutex_);
  Enqueue(std::move(outgoing));
}

void ComputeLossCall::Handle(FinishedEvent event) {
  absl::MutexLock lock(&mutex_);
  if (event.status.ok()) {
    v1::ComputeLossResponse response;
    *response.mutable_summary() = ToProto(event.summary);
    environment_->metrics->ObserveMicrobatch(absl::ToDoubleSeconds(absl::Now() - opened_));
    writes_.push_back({.message = wire::Encode(response), .ready = absl::Now()});
  }
  ending_ = std::move(event.status);
  Pump();
}

// ---- Writing and ending ----

void ComputeLossCall::Enqueue(Outgoing outgoing) {
  writes_.push_back(std::move(outgoing));
  Pump();
}

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
  write_started_ = absl::Now();
  StartWrite(&writing_.message);
}

void ComputeLossCall::OnWriteDone(bool ok) {
  bool request_room = false;
  {
    absl::MutexLock lock(&mutex_);
    request_room = FinishWrite(ok);
  }
  if (request_room) RequestRoom();
}

bool ComputeLossCall::FinishWrite(bool ok) {
  bool request_room = false;
  write_active_ = false;
  if (writing_.is_slice) {
    room_bytes_ -= writing_.room_bytes;
    environment_->metrics->AddPayloadOut(ok ? writing_.payload_bytes : 0);
    environment_->metrics->ObservePhase(metrics::Phase::kSend,
                                        absl::ToDoubleSeconds(absl::Now() - writing_.ready));
  }
  writing_ = Outgoing();
  if (!ok) {
    broken_ = true;
    FailLocked(CancellationStatus());
  } else if (read_withheld_) {
    request_room = NextSlice();
  }
  Pump();
  return request_room;
}

void ComputeLossCall::OnCancel() {
  absl::MutexLock lock(&mutex_);
  broken_ = true;
  FailLocked(CancellationStatus());
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
    environment_->metrics->CountError(kMethod, CodeName(status));
    log::Log(log::LogLevel::kInfo, "call failed",
             {{"method", kMethod},
              {"code", CodeName(status)},
              {"error", status.error_message()},
              {"peer", context_->peer()}});
  }
  Finish(status);
}

absl::Status ComputeLossCall::CancellationStatus() const {
  if (absl::FromChrono(context_->deadline()) <= absl::Now()) {
    return absl::DeadlineExceededError("the call's deadline has passed");
  }
  return absl::CancelledError("the client cancelled the call or went away");
}

std::shared_ptr<engine::Stream> ComputeLossCall::stream() {
  absl::MutexLock lock(&mutex_);
  return stream_;
}

void ComputeLossCall::CancelIfStuck(absl::Time limit) {
  absl::MutexLock lock(&mutex_);
  if (!write_active_ || broken_ || write_started_ >= limit) return;
  log::Log(log::LogLevel::kWarning, "cancelling a call whose answers are not taken",
           {{"peer", context_->peer()}});
  context_->TryCancel();
}

void ComputeLossCall::OnDone() {
  environment_->registry->Remove(this);
  std::shared_ptr<engine::Stream> stream;  // holds the observer, which is this: the circle is cut here
  {
    absl::MutexLock lock(&mutex_);
    stream = std::move(stream_);
  }
  stream.reset();
  const std::shared_ptr<ComputeLossCall> self = std::move(self_);
}

}  // namespace lossd::rpc
