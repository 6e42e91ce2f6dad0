#include "server/rpc/tensor_calls.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/rpc/convert.h"
#include "server/rpc/errors.h"

namespace lossd::rpc {
namespace {

constexpr absl::string_view kRead = "ReadTensor";
constexpr absl::string_view kWrite = "WriteTensor";
constexpr int64_t kMessageBytes = int64_t{4} << 20;

// What a call that was not admitted ends with, else OK.
absl::Status Admit(TensorCallEnvironment* environment, WatchedCall* call, absl::string_view method) {
  environment->metrics->CountRequest(method);
  if (!environment->registry->Add(call)) {
    return absl::ResourceExhaustedError("too many open ReadTensor, WriteTensor and SaveCheckpoint calls");
  }
  return absl::OkStatus();
}

grpc::Status Ended(TensorCallEnvironment* environment, absl::string_view method, absl::Status status) {
  const grpc::Status result = ToGrpc(std::move(status), environment->engine->incarnation());
  if (!result.ok()) environment->metrics->CountError(method, CodeName(result));
  return result;
}

}  // namespace

// ---- ReadTensor ----

ReadTensorCall* ReadTensorCall::Start(TensorCallEnvironment* environment,
                                      grpc::CallbackServerContext* context, const grpc::ByteBuffer* request) {
  auto* call = new ReadTensorCall(environment, context);
  call->request_ = request;
  if (absl::Status status = Admit(environment, call, kRead); !status.ok()) {
    call->End(std::move(status));
  } else {
    call->Schedule(&ReadTensorCall::Begin);
  }
  return call;
}

void ReadTensorCall::Schedule(void (ReadTensorCall::*step)()) {
  if (!environment_->workers->Schedule([this, step] { (this->*step)(); })) {
    End(absl::ResourceExhaustedError("too many operations are waiting"));
  }
}

void ReadTensorCall::Begin() {
  v1::ReadTensorRequest request;
  const absl::StatusOr<wire::PayloadView> decoded = wire::Decode(*request_, &request);
  if (!decoded.ok()) return End(decoded.status());
  absl::StatusOr<TensorRows> tensor = environment_->operations->CheckRead(request);
  if (!tensor.ok()) return End(tensor.status());
  tensor_ = *std::move(tensor);
  next_row_ = tensor_.rows.begin;
  ReadSlice();
}

void ReadTensorCall::ReadSlice() {
  if (cancelled_) return End(absl::CancelledError("the client cancelled the call or went away"));
  if (next_row_ >= tensor_.rows.end) return End(absl::OkStatus());
  const int64_t most_rows = std::max<int64_t>(1, kMessageBytes / tensor_.row_bytes());
  const engine::RowRange rows{next_row_, std::min(next_row_ + most_rows, tensor_.rows.end)};
  auto bytes = std::make_shared<std::vector<uint8_t>>(static_cast<size_t>(rows.size() * tensor_.row_bytes()));
  absl::Status status = environment_->operations->ReadRows(tensor_, rows, absl::MakeSpan(*bytes));
  absl::StatusOr<v1::HeadState> state = environment_->operations->State(tensor_.head);
  status.Update(state.status());
  if (!status.ok()) return End(std::move(status));
  v1::TensorSlice slice;
  *slice.mutable_state() = *std::move(state);
  *slice.mutable_rows() = ToProto(rows);
  slice.set_tensor_rows(static_cast<uint64_t>(tensor_.shape.rows));
  slice.set_tensor_cols(static_cast<uint64_t>(tensor_.shape.cols));
  slice.set_dtype(ToProto(tensor_.dtype));
  next_row_ = rows.end;
  message_ = wire::Encode(slice, *bytes, [bytes] {});
  {
    absl::MutexLock lock(&mutex_);
    write_started_ = absl::Now();
  }
  StartWrite(&message_);
}

void ReadTensorCall::OnWriteDone(bool ok) {
  {
    absl::MutexLock lock(&mutex_);
    write_started_ = absl::InfiniteFuture();
  }
  message_.Clear();
  if (!ok) return End(absl::CancelledError("the client cancelled the call or went away"));
  Schedule(&ReadTensorCall::ReadSlice);
}

void ReadTensorCall::End(absl::Status status) { Finish(Ended(environment_, kRead, std::move(status))); }

void ReadTensorCall::CancelIfStuck(absl::Time limit) {
  absl::MutexLock lock(&mutex_);
  if (write_started_ < limit) context_->TryCancel();
}

void ReadTensorCall::OnDone() {
  environment_->registry->Remove(this);
  delete this;
}

// ---- WriteTensor ----

WriteTensorCall* WriteTensorCall::Start(TensorCallEnvironment* environment,
                                        grpc::CallbackServerContext* context, grpc::ByteBuffer* response) {
  auto* call = new WriteTensorCall(environment, context, response);
  absl::Status status = Admit(environment, call, kWrite);
  if (environment->draining) status.Update(absl::UnavailableError("the server is draining"));
  if (!status.ok()) {
    call->End(std::move(status));
  } else {
    // Its state was made on this thread; the first reaction, on another, takes the lock too.
    { const absl::MutexLock lock(&call->mutex_); }
    call->StartRead(&call->received_);
  }
  return call;
}

void WriteTensorCall::OnReadDone(bool ok) {
  if (!ok && context_->IsCancelled())
    return End(absl::CancelledError("the client cancelled the call or went away"));
  if (!ok) return End(Complete());
  const bool scheduled = environment_->workers->Schedule([this] {
    absl::Status status = HandleMessage();
    if (!status.ok()) return End(std::move(status));
    StartRead(&received_);
  });
  if (!scheduled) End(absl::ResourceExhaustedError("too many operations are waiting"));
}

absl::Status WriteTensorCall::HandleMessage() {
  v1::WriteTensorRequest request;
  const absl::StatusOr<wire::PayloadView> payload = wire::Decode(received_, &request);
  received_.Clear();
  if (!payload.ok()) return payload.status();
  absl::MutexLock lock(&mutex_);
  if (request.has_open() == opened_) {
    return FieldError("open", "be in the first message and in no other",
                      opened_ ? "a second one" : "nothing");
  }
  if (request.has_open()) {
    if (absl::Status status = Open(request.open()); !status.ok()) return status;
  }
  return WritePayload(*payload);
}

absl::Status WriteTensorCall::Open(const v1::OpenTensor& open) {
  absl::StatusOr<TensorRows> tensor = environment_->operations->CheckWrite(open);
  if (!tensor.ok()) return tensor.status();
  tensor_ = *std::move(tensor);
  next_row_ = tensor_.rows.begin;
  opened_ = true;
  return absl::OkStatus();
}

absl::Status WriteTensorCall::WritePayload(const wire::PayloadView& payload) {
  const auto bytes = static_cast<int64_t>(payload.size());
  if (bytes % tensor_.row_bytes() != 0) {
    return FieldError("payload",
                      absl::StrCat("have a multiple of ", tensor_.row_bytes(), " bytes, whole rows"), bytes);
  }
  const engine::RowRange rows{next_row_, next_row_ + bytes / tensor_.row_bytes()};
  if (rows.end > tensor_.rows.end) {
    return FieldError("payload", absl::StrCat("end with row ", tensor_.rows.end),
                      absl::StrCat("row ", rows.end));
  }
  if (rows.size() == 0) return absl::OkStatus();
  std::vector<uint8_t> values(payload.size());
  payload.CopyTo(values.data());
  next_row_ = rows.end;
  return environment_->operations->WriteRows(tensor_, rows, values);
}

absl::Status WriteTensorCall::Complete() {
  absl::MutexLock lock(&mutex_);
  if (!opened_) return FieldError("open", "come before the half-close", "nothing");
  if (next_row_ != tensor_.rows.end) {
    return FieldError("payload", absl::StrCat("end with row ", tensor_.rows.end),
                      absl::StrCat("row ", next_row_));
  }
  absl::StatusOr<v1::HeadState> state = environment_->operations->State(tensor_.head);
  if (!state.ok()) return state.status();
  v1::WriteTensorResponse response;
  *response.mutable_state() = *std::move(state);
  *response.mutable_rows() = ToProto(tensor_.rows);
  *response_ = wire::Encode(response);
  return absl::OkStatus();
}

void WriteTensorCall::End(absl::Status status) { Finish(Ended(environment_, kWrite, std::move(status))); }

void WriteTensorCall::OnDone() {
  environment_->registry->Remove(this);
  delete this;
}

}  // namespace lossd::rpc
