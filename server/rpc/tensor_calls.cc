// SPDX-License-Identifier: Apache-2.0
// The streaming calls of HeadService (tensor_calls.h): the common part of WriteTensor and AddGradient, then
// each of the four calls.
#include "server/rpc/tensor_calls.h"

#include <algorithm>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "server/messages/convert.h"
#include "server/rpc/compute_loss_call.h"

namespace lossd::rpc {

absl::Status AdmitTensorCall(TensorCallEnvironment* environment, const grpc::CallbackServerContext& context,
                             WatchedCall* call, absl::string_view method, AdmittedCall* admitted,
                             std::string* peer) {
  LOSSD_TRY(*admitted, environment->access->Admit(context, method));
  *peer = PeerKey(context, admitted->identity);
  call->set_until(admitted->until);
  return environment->registry->Add(call, *peer);
}

grpc::Status EndedTensorCall(TensorCallEnvironment* environment, absl::string_view method,
                             absl::Status status) {
  return CountedEnd(method, std::move(status), environment->engine->incarnation(), environment->metrics);
}

// ---- Calls that receive rows ----

void ReceiveRowsCall::Begin() {
  environment_->metrics->CountRequest(method_);
  absl::Status status = AdmitTensorCall(environment_, *context_, this, method_, &admitted_, &peer_);
  if (environment_->draining) status.Update(absl::UnavailableError("the server is draining"));
  if (!status.ok()) return End(std::move(status));
  // The members were set on this thread without the lock. Taking it once makes them visible to the first
  // reaction, which takes it on another thread.
  { const absl::MutexLock lock(&mutex_); }
  Read(CallClock::Waits::kOpen);
}

void ReceiveRowsCall::WaitFor(CallClock::Waits what) {
  absl::MutexLock lock(&clock_mutex_);
  clock_.Set(what);
}

void ReceiveRowsCall::Read(CallClock::Waits what) {
  absl::MutexLock lock(&clock_mutex_);
  clock_.Set(what);
  StartRead(&received_);
}

void ReceiveRowsCall::OnReadDone(bool ok) {
  {
    absl::MutexLock lock(&clock_mutex_);
    if (given_up_) return;
    clock_.Set(CallClock::Waits::kNothing);
  }
  if (!ok && context_->IsCancelled())
    return End(absl::CancelledError("the client cancelled the call or went away"));
  if (!ok) return End(Complete());
  absl::Status scheduled = RunOnWorker([this] { HandleMessage(); });
  if (!scheduled.ok()) End(std::move(scheduled));
}

absl::Status ReceiveRowsCall::RunOnWorker(std::function<void()> step) {
  return environment_->workers->Schedule({.peer = peer_, .head = head_, .kind = AdminKind::kRows},
                                         std::move(step));
}

absl::string_view ReceiveRowsCall::EndIfLate(absl::Time now, const CallTimeouts& timeouts) {
  absl::string_view limit;
  absl::Status late;
  {
    absl::MutexLock lock(&clock_mutex_);
    late = clock_.Check(now, timeouts, &limit);
  }
  if (!late.ok()) EndWith(std::move(late));
  return limit;
}

// Does nothing while the call works and waits for nothing. The registry then tries again later.
void ReceiveRowsCall::EndWith(absl::Status why) {
  bool waits_for_turn = false;
  {
    absl::MutexLock lock(&clock_mutex_);
    if (clock_.what() == CallClock::Waits::kNothing) return;
    waits_for_turn = clock_.what() == CallClock::Waits::kTurn;
    clock_.Set(CallClock::Waits::kNothing);
    given_up_ = !waits_for_turn;
  }
  if (!waits_for_turn || GiveUpWaiting()) End(std::move(why));
}

void ReceiveRowsCall::HandleMessage() {
  bool has_open = false;
  absl::Status status;
  {
    absl::MutexLock lock(&mutex_);
    status = DecodeMessage(&has_open);
  }
  if (status.ok() && !has_open) return TakePayload();
  if (status.ok()) status = Await([this] { TakePayload(); });
  if (!status.ok()) End(std::move(status));
}

absl::Status ReceiveRowsCall::DecodeMessage(bool* has_open) {
  absl::StatusOr<wire::PayloadView> payload = Decode(received_, has_open);
  received_.Clear();
  if (!payload.ok()) return payload.status();
  payload_ = *std::move(payload);
  if (*has_open == opened_) {
    return errors::FieldError("open", "be in the first message and in no other",
                              opened_ ? "a second one" : "nothing");
  }
  if (opened_) return absl::OkStatus();
  LOSSD_TRY(extent_, Open());
  next_row_ = extent_.rows.begin;
  opened_ = true;
  return absl::OkStatus();
}

void ReceiveRowsCall::TakePayload() {
  absl::Status status;
  {
    absl::MutexLock lock(&mutex_);
    status = TakeRows();
  }
  if (!status.ok()) return End(std::move(status));
  Read(CallClock::Waits::kMessage);
}

absl::Status ReceiveRowsCall::TakeRows() {
  const wire::PayloadView payload = std::exchange(payload_, wire::PayloadView());
  const auto bytes = static_cast<int64_t>(payload.size());
  if (bytes % extent_.row_bytes != 0) {
    return errors::FieldError(
        "payload", absl::StrCat("have a multiple of ", errors::ExactBytes(extent_.row_bytes), ", whole rows"),
        bytes);
  }
  const engine::RowRange rows{next_row_, next_row_ + bytes / extent_.row_bytes};
  if (rows.end > extent_.rows.end) {
    return errors::FieldError("payload", absl::StrCat("end with row ", extent_.rows.end),
                              absl::StrCat("row ", rows.end));
  }
  if (rows.size() == 0) return absl::OkStatus();
  std::vector<uint8_t> values(payload.size());
  payload.CopyTo(values.data());
  next_row_ = rows.end;
  return Take(rows, values);
}

absl::Status ReceiveRowsCall::Complete() {
  absl::MutexLock lock(&mutex_);
  if (!opened_) return errors::FieldError("open", "come before the half-close", "nothing");
  if (next_row_ != extent_.rows.end) {
    return errors::FieldError("payload", absl::StrCat("end with row ", extent_.rows.end),
                              absl::StrCat("row ", next_row_));
  }
  LOSSD_TRY(*response_, Answer());
  return absl::OkStatus();
}

void ReceiveRowsCall::End(absl::Status status) {
  Release();
  const grpc::Status result = EndedTensorCall(environment_, method_, std::move(status));
  environment_->access->Ended(admitted_, head_, CodeName(result));
  environment_->registry->GiveBack(this);
  Finish(result);
}

void ReceiveRowsCall::OnDone() {
  environment_->registry->Remove(this);
  delete this;
}

// ---- WriteTensor ----

WriteTensorCall* WriteTensorCall::Start(TensorCallEnvironment* environment,
                                        grpc::CallbackServerContext* context, grpc::ByteBuffer* response) {
  auto* call = new WriteTensorCall(environment, context, response, "WriteTensor");
  call->Begin();
  return call;
}

absl::StatusOr<wire::PayloadView> WriteTensorCall::Decode(const grpc::ByteBuffer& received, bool* has_open) {
  absl::StatusOr<wire::PayloadView> payload = wire::Decode(received, &request_);
  *has_open = request_.has_open();
  return payload;
}

absl::StatusOr<ReceiveRowsCall::Extent> WriteTensorCall::Open() {
  head_ = request_.open().head();
  LOSSD_TRY(write_, environment_->operations->OpenWrite(request_.open()));
  return Extent{write_.tensor.rows, write_.tensor.row_bytes()};
}

absl::Status WriteTensorCall::Take(engine::RowRange rows, absl::Span<const uint8_t> values) {
  LOSSD_TRY(state_, environment_->operations->WriteRows(write_, rows, values));
  return absl::OkStatus();
}

absl::StatusOr<grpc::ByteBuffer> WriteTensorCall::Answer() {
  v1::WriteTensorResponse response;
  if (write_.tensor.rows.size() > 0) {
    *response.mutable_state() = std::move(state_);
  } else {
    LOSSD_TRY(v1::HeadState state, environment_->operations->State(write_.tensor.head));
    *response.mutable_state() = std::move(state);
  }
  *response.mutable_rows() = messages::ToProto(write_.tensor.rows);
  return wire::Encode(response);
}

// ---- AddGradient ----

AddGradientCall* AddGradientCall::Start(TensorCallEnvironment* environment,
                                        grpc::CallbackServerContext* context, grpc::ByteBuffer* response) {
  auto* call = new AddGradientCall(environment, context, response, "AddGradient");
  call->Begin();
  return call;
}

absl::StatusOr<wire::PayloadView> AddGradientCall::Decode(const grpc::ByteBuffer& received, bool* has_open) {
  absl::StatusOr<wire::PayloadView> payload = wire::Decode(received, &request_);
  *has_open = request_.has_open();
  return payload;
}

absl::StatusOr<ReceiveRowsCall::Extent> AddGradientCall::Open() {
  if (request_.open().has_incarnation())
    LOSSD_RETURN_IF_ERROR(messages::CheckIncarnation("open.incarnation", request_.open().incarnation(),
                                                     environment_->engine->incarnation()));
  LOSSD_TRY(const engine::ContributionSpec spec, messages::ToContributionSpec(request_.open()));
  LOSSD_TRY(contribution_, environment_->engine->OpenContribution(spec));
  head_ = spec.head;
  added_.state = contribution_.state;
  return Extent{contribution_.rows, contribution_.row_bytes()};
}

// A contribution that waits for its turn holds no worker and reads no further message.
absl::Status AddGradientCall::Await(std::function<void()> next) {
  const auto ready = [this, next] {
    { const absl::MutexLock lock(&turn_mutex_); }  // waits until Await has set ticket_
    WaitFor(CallClock::Waits::kNothing);
    absl::Status scheduled = RunOnWorker(next);
    if (!scheduled.ok()) End(std::move(scheduled));
  };
  {
    absl::MutexLock lock(&turn_mutex_);
    if (cancelled_) return absl::CancelledError("the client cancelled the call or went away");
    WaitFor(CallClock::Waits::kTurn);
    ticket_ = environment_->engine->AwaitTurn(contribution_, ready);
    if (ticket_ != 0) return absl::OkStatus();
    WaitFor(CallClock::Waits::kNothing);
  }
  return RunOnWorker(next);
}

bool AddGradientCall::GiveUpWaiting() {
  absl::MutexLock lock(&turn_mutex_);
  return ticket_ != 0 && engine::ForgetTurn(contribution_, std::exchange(ticket_, 0));
}

void AddGradientCall::OnCancel() {
  bool waited = false;
  {
    absl::MutexLock lock(&turn_mutex_);
    cancelled_ = true;
    waited = ticket_ != 0 && engine::ForgetTurn(contribution_, ticket_);
  }
  if (waited) End(absl::CancelledError("the call ended before the contribution had its turn"));
}

absl::Status AddGradientCall::Take(engine::RowRange rows, absl::Span<const uint8_t> values) {
  LOSSD_TRY(const engine::AddedRows added, environment_->engine->AddRows(contribution_, rows, values));
  added_.rows += added.rows;
  added_.state = added.state;
  return absl::OkStatus();
}

// The answer has the state from when the last rows were added. By now the step may have been closed, because
// it expected just these rows.
absl::StatusOr<grpc::ByteBuffer> AddGradientCall::Answer() {
  v1::AddGradientResponse response;
  *response.mutable_state() = messages::ToProto(added_.state);
  *response.mutable_rows() = messages::ToProto(contribution_.rows);
  response.set_added_rows(static_cast<uint64_t>(added_.rows));
  response.set_repeated_rows(static_cast<uint64_t>(contribution_.rows.size() - added_.rows));
  return wire::Encode(response);
}

// ---- SaveCheckpoint ----

SaveCall* SaveCall::Start(SaveCallEnvironment* environment, grpc::CallbackServerContext* context) {
  const std::shared_ptr<SaveCall> call(new SaveCall(environment, context));
  call->self_ = call;
  call->Receive();
  return call.get();
}

void SaveCall::OnRequest(const grpc::ByteBuffer& request) {
  const std::shared_ptr<SaveCall> keep = self_;
  {
    absl::MutexLock lock(&mutex_);
    received_ = true;
  }
  if (absl::Status scheduled = Schedule(request); !scheduled.ok()) End(std::move(scheduled));
}

absl::Status SaveCall::Schedule(const grpc::ByteBuffer& request) {
  const absl::StatusOr<wire::PayloadView> decoded = wire::Decode(request, &request_);
  if (!decoded.ok()) request_.Clear();
  LOSSD_TRY(admitted_, environment_->access->Admit(*context(), "SaveCheckpoint", request_.head()));
  peer_ = PeerKey(*context(), admitted_.identity);
  LOSSD_RETURN_IF_ERROR(decoded.status());
  if (admitted_.role < access::Role::kAdmin) {
    absl::Status keeps = environment_->checkpoints->CheckKeep(request_);
    if (!keeps.ok())
      return environment_->access->Refuse(*context(), admitted_, request_.head(), std::move(keeps));
  }
  LOSSD_RETURN_IF_ERROR(environment_->registry->Add(this, peer_));
  environment_->count(1);
  if (environment_->workers->Schedule([call = self_] { call->Run(); })) return absl::OkStatus();
  environment_->count(-1);
  return absl::ResourceExhaustedError("too many saves are waiting (--max_saves)");
}

void SaveCall::Run() {
  v1::SaveCheckpointUpdate update;
  update.mutable_progress()->set_phase(v1::SAVE_PHASE_WAITING);
  Post(std::move(update));
  absl::StatusOr<v1::SaveCheckpointResponse> saved = environment_->checkpoints->Save(
      request_, {.on_progress =
                     [this](const v1::SaveProgress& progress) {
                       v1::SaveCheckpointUpdate news;
                       *news.mutable_progress() = progress;
                       Post(std::move(news));
                     },
                 .cancelled = [this] { return request_.cancel_with_call() && gone_; }});
  const absl::Status status = saved.status();
  if (saved.ok()) {
    pruned_.assign(saved->pruned().begin(), saved->pruned().end());
    v1::SaveCheckpointUpdate last;
    *last.mutable_saved() = *std::move(saved);
    Post(std::move(last));
  }
  End(status);
  environment_->count(-1);
}

void SaveCall::Post(v1::SaveCheckpointUpdate update) {
  absl::MutexLock lock(&mutex_);
  next_ = std::move(update);
  Continue();
}

void SaveCall::End(absl::Status status) {
  grpc::Status end = environment_->ended(peer_, std::move(status));
  // A refusal has its audit line already.
  if (!IsRefusal(end)) environment_->access->Ended(admitted_, request_.head(), CodeName(end), pruned_);
  absl::MutexLock lock(&mutex_);
  end_ = std::move(end);
  Continue();
}

void SaveCall::Continue() {
  if (writing_ || finished_) return;
  if (gone_) {
    finished_ = true;
    Finish(grpc::Status(grpc::StatusCode::CANCELLED, "the client cancelled the call or went away"));
  } else if (next_.has_value()) {
    message_ = wire::Encode(*next_);
    next_.reset();
    writing_ = true;
    clock_.Set(CallClock::Waits::kSend);
    StartWrite(&message_);
  } else if (end_.has_value()) {
    finished_ = true;
    Finish(*end_);
  }
}

void SaveCall::OnWriteDone(bool ok) {
  absl::MutexLock lock(&mutex_);
  writing_ = false;
  clock_.Set(CallClock::Waits::kNothing);
  if (!ok) gone_ = true;
  Continue();
}

void SaveCall::OnCancel() {
  absl::MutexLock lock(&mutex_);
  gone_ = true;
  if (received_) Continue();
}

absl::string_view SaveCall::EndIfLate(absl::Time now, const CallTimeouts& timeouts) {
  absl::MutexLock lock(&mutex_);
  const absl::string_view limit = clock_.StopIfLate(now, timeouts);
  if (!limit.empty()) context()->TryCancel();
  return limit;
}

void SaveCall::OnDone() {
  environment_->registry->Remove(this);
  const std::shared_ptr<SaveCall> last = std::move(self_);
}

// ---- ReadTensor ----

namespace {

constexpr absl::string_view kReadTensor = "ReadTensor";
constexpr int64_t kMessageBytes = int64_t{4} << 20;

}  // namespace

ReadTensorCall* ReadTensorCall::Start(TensorCallEnvironment* environment,
                                      grpc::CallbackServerContext* context) {
  auto* const call = new ReadTensorCall(environment, context);
  call->Receive();
  return call;
}

void ReadTensorCall::OnRequest(const grpc::ByteBuffer& request) {
  AdmittedCall admitted;
  absl::Status status = AdmitTensorCall(environment_, *context(), this, kReadTensor, &admitted, &peer_);
  if (status.ok()) status = wire::Decode(request, &request_).status();
  if (!status.ok()) return End(std::move(status));
  identity_ = admitted.identity;
  Schedule(&ReadTensorCall::Begin);
}

void ReadTensorCall::Schedule(void (ReadTensorCall::*step)()) {
  const AdminTask task{.peer = peer_, .head = read_.tensor.head, .kind = AdminKind::kRows};
  absl::Status scheduled = environment_->workers->Schedule(task, [this, step] { (this->*step)(); });
  if (!scheduled.ok()) End(std::move(scheduled));
}

void ReadTensorCall::Begin() {
  absl::StatusOr<admin::TensorRead> read = environment_->operations->OpenRead(request_);
  if (!read.ok()) return End(read.status());
  read_ = *std::move(read);
  next_row_ = read_.tensor.rows.begin;
  if (absl::Status status = UseRegion(); !status.ok()) return End(std::move(status));
  ReadSlice();
}

absl::Status ReadTensorCall::UseRegion() {
  if (request_.region().empty() && !request_.has_in_region()) return absl::OkStatus();
  if (request_.region().empty() || !request_.has_in_region()) {
    return errors::FieldError("in_region", "come with region, and only with it",
                              request_.has_in_region() ? "a range without a region" : "nothing");
  }
  const auto bytes = static_cast<uint64_t>(read_.tensor.rows.size() * read_.tensor.row_bytes());
  if (request_.in_region().bytes() != bytes) {
    return errors::FieldError("in_region.bytes", absl::StrCat("be ", bytes, ", the bytes of the rows"),
                              request_.in_region().bytes());
  }
  LOSSD_TRY(auto region, ClaimRegion(environment_->regions, "region", request_.region(), identity_));
  LOSSD_TRY(const auto place, BytesOf(*region, "in_region", request_.in_region()));
  region_ = std::move(region);
  in_region_ = place;
  return absl::OkStatus();
}

void ReadTensorCall::ReadSlice() {
  if (cancelled_) return End(absl::CancelledError("the client cancelled the call or went away"));
  const admin::TensorRows& tensor = read_.tensor;
  if (next_row_ >= tensor.rows.end) return End(absl::OkStatus());
  const int64_t most_rows = std::max<int64_t>(1, kMessageBytes / tensor.row_bytes());
  const engine::RowRange rows{next_row_, std::min(next_row_ + most_rows, tensor.rows.end)};
  const auto size = static_cast<size_t>(rows.size() * tensor.row_bytes());
  const bool shared = !in_region_.empty();
  auto bytes = std::make_shared<std::vector<uint8_t>>(shared ? 0 : size);
  const auto offset = static_cast<size_t>((rows.begin - tensor.rows.begin) * tensor.row_bytes());
  absl::StatusOr<v1::HeadState> state = environment_->operations->ReadRows(
      read_, rows, shared ? in_region_.subspan(offset, size) : absl::MakeSpan(*bytes));
  if (!state.ok()) return End(state.status());
  v1::TensorSlice slice;
  *slice.mutable_state() = *std::move(state);
  *slice.mutable_rows() = messages::ToProto(rows);
  slice.set_tensor_rows(static_cast<uint64_t>(tensor.shape.rows));
  slice.set_tensor_cols(static_cast<uint64_t>(tensor.shape.cols));
  slice.set_dtype(messages::ToProto(tensor.dtype));
  slice.set_in_region(shared);
  next_row_ = rows.end;
  message_ = shared ? wire::Encode(slice) : wire::Encode(slice, *bytes, [bytes] {});
  {
    absl::MutexLock lock(&mutex_);
    clock_.Set(CallClock::Waits::kSend);
  }
  StartWrite(&message_);
}

void ReadTensorCall::OnWriteDone(bool ok) {
  {
    absl::MutexLock lock(&mutex_);
    clock_.Set(CallClock::Waits::kNothing);
  }
  message_.Clear();
  if (!ok) return End(absl::CancelledError("the client cancelled the call or went away"));
  Schedule(&ReadTensorCall::ReadSlice);
}

void ReadTensorCall::End(absl::Status status) {
  const grpc::Status result = EndedTensorCall(environment_, kReadTensor, std::move(status));
  environment_->registry->GiveBack(this);
  Finish(result);
}

absl::string_view ReadTensorCall::EndIfLate(absl::Time now, const CallTimeouts& timeouts) {
  absl::MutexLock lock(&mutex_);
  const absl::string_view limit = clock_.StopIfLate(now, timeouts);
  if (!limit.empty()) context()->TryCancel();
  return limit;
}

void ReadTensorCall::OnDone() {
  environment_->registry->Remove(this);
  delete this;
}

}  // namespace lossd::rpc
