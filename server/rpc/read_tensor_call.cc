// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"
#include "server/messages/convert.h"
#include "server/messages/enums.h"
#include "server/rpc/region_ranges.h"
#include "server/rpc/tensor_calls.h"

namespace lossd::rpc {
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
  auto region = ClaimRegion(environment_->regions, "region", request_.region(), identity_);
  if (!region.ok()) return region.status();
  const auto place = BytesOf(**region, "in_region", request_.in_region());
  if (!place.ok()) return place.status();
  region_ = *std::move(region);
  in_region_ = *place;
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
  Finish(EndedTensorCall(environment_, kReadTensor, std::move(status)));
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
