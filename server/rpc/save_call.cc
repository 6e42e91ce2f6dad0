// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/save_call.h"

#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "proto/wire/payload_codec.h"
#include "server/rpc/status.h"

namespace lossd::rpc {

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
  if (!decoded.ok()) return decoded.status();
  peer_ = PeerKey(*context(), "");
  absl::StatusOr<AdmittedCall> admitted =
      environment_->access->Admit(*context(), "SaveCheckpoint", request_.head());
  if (!admitted.ok()) return admitted.status();
  admitted_ = *std::move(admitted);
  if (admitted_.role < access::Role::kAdmin) {
    absl::Status keeps = environment_->checkpoints->CheckKeep(request_);
    if (!keeps.ok())
      return environment_->access->Refuse(*context(), admitted_, request_.head(), std::move(keeps));
  }
  peer_ = PeerKey(*context(), admitted_.identity);
  absl::Status added = environment_->registry->Add(this, peer_);
  if (!added.ok()) return added;
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
  environment_->access->Ended(admitted_, request_.head(), CodeName(end), pruned_);
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

}  // namespace lossd::rpc
