#include "server/rpc/save_call.h"

#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "server/rpc/status.h"

namespace lossd::rpc {

SaveCall* SaveCall::Start(SaveCallEnvironment* environment, grpc::CallbackServerContext* context,
                          const v1::SaveCheckpointRequest* request) {
  const std::shared_ptr<SaveCall> call(new SaveCall(environment, context, *request));
  call->self_ = call;
  absl::StatusOr<AdmittedCall> admitted =
      environment->access->Admit(*context, "SaveCheckpoint", request->head());
  if (!admitted.ok()) {
    call->End(admitted.status());
    return call.get();
  }
  call->admitted_ = *std::move(admitted);
  absl::Status added = environment->registry->Add(call.get(), PeerKey(*context, call->admitted_.identity));
  if (!added.ok()) {
    call->End(std::move(added));
    return call.get();
  }
  environment->count(1);
  const bool scheduled = environment->workers->Schedule([call] { call->Run(); });
  if (!scheduled) {
    environment->count(-1);
    call->End(absl::ResourceExhaustedError("too many saves are waiting (--max_saves)"));
  }
  return call.get();
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
  grpc::Status end = environment_->ended(std::move(status));
  environment_->access->Ended(admitted_, request_.head(), CodeName(end));
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
    message_ = *std::move(next_);
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
  Continue();
}

absl::string_view SaveCall::EndIfLate(absl::Time now, const CallTimeouts& timeouts) {
  absl::MutexLock lock(&mutex_);
  absl::string_view limit;
  if (clock_.Check(now, timeouts, &limit).ok()) return "";
  clock_.Set(CallClock::Waits::kNothing);
  context_->TryCancel();
  return limit;
}

void SaveCall::OnDone() {
  environment_->registry->Remove(this);
  const std::shared_ptr<SaveCall> last = std::move(self_);
}

}  // namespace lossd::rpc
