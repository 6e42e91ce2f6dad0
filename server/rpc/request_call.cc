// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/request_call.h"

#include <utility>

#include "absl/status/statusor.h"
#include "kernels/errors/field_error.h"
#include "server/rpc/status.h"

namespace lossd::rpc {

grpc::Status Failed(const RequestEnvironment& environment, absl::string_view method, absl::Status status) {
  return CountedEnd(method, std::move(status), environment.incarnation, environment.metrics);
}

absl::Status RequestCall::Register() {
  const absl::StatusOr<std::string> identity = environment_->access->Identify(*context_, method_);
  if (!identity.ok()) return identity.status();
  return environment_->requests->Add(&waiting_, PeerKey(*context_, *identity));
}

void RequestCall::Receive() {
  {
    absl::MutexLock lock(&mutex_);
    clock_.Set(CallClock::Waits::kOpen);
  }
  environment_->metrics->CountRequest(method_);
  if (absl::Status admitted = Register(); !admitted.ok()) {
    return Finish(Failed(*environment_, method_, std::move(admitted)));
  }
  absl::MutexLock lock(&mutex_);
  if (ended_) return;  // its place went to another call already
  StartRead(&request_);
}

void RequestCall::OnReadDone(bool ok) {
  environment_->requests->Remove(&waiting_);
  {
    absl::MutexLock lock(&mutex_);
    if (ended_) return;
    clock_.Set(CallClock::Waits::kNothing);
  }
  if (ok) return OnRequest(request_);
  absl::Status why = context_->IsCancelled()
                         ? absl::CancelledError("the client cancelled the call or went away")
                         : errors::FieldError("request", "come before the half-close", "nothing");
  Finish(Failed(*environment_, method_, std::move(why)));
}

void RequestCall::EndWaiting(absl::Status why) {
  {
    absl::MutexLock lock(&mutex_);
    if (clock_.what() != CallClock::Waits::kOpen) return;
    clock_.Set(CallClock::Waits::kNothing);
    ended_ = true;
  }
  Finish(Failed(*environment_, method_, std::move(why)));
}

absl::string_view RequestCall::EndIfRequestIsLate(absl::Time now, const CallTimeouts& timeouts) {
  absl::string_view limit;
  absl::Status late;
  {
    absl::MutexLock lock(&mutex_);
    late = clock_.Check(now, timeouts, &limit);
  }
  if (late.ok()) return "";
  EndWaiting(std::move(late));
  return limit;
}

UnaryCall* UnaryCall::Start(const RequestEnvironment* environment, grpc::CallbackServerContext* context,
                            absl::string_view method, Handler handler) {
  auto* const call = new UnaryCall(environment, context, method, std::move(handler));
  call->Receive();
  return call;
}

void UnaryCall::Answer(const grpc::ByteBuffer& answer) {
  answer_ = answer;
  StartWriteAndFinish(&answer_, {}, grpc::Status::OK);
}

}  // namespace lossd::rpc
