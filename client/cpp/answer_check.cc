#include "client/cpp/answer_check.h"

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"

namespace lossd::client::internal {

absl::Status AnswerCheck::Accept(const v1::HeadState& state) {
  if (state.incarnation() == 0) return absl::InternalError("server sent incarnation 0");
  if (accumulates_) {
    if (state.step() != *step_) {
      return absl::InternalError(
          absl::StrCat("server sent step ", state.step(), " in answer to step ", *step_));
    }
    absl::Status status = head_cache_->NoteAccumulation(head_, state.step(), state.incarnation());
    if (!status.ok()) return status;
  }
  absl::MutexLock lock(&mu_);
  if (!state_.has_value()) state_ = state;
  if (state_->incarnation() != state.incarnation()) {
    return RestartedError(head_, state_->incarnation(), state.incarnation(),
                          accumulates_ ? step_ : std::nullopt);
  }
  if (state_->step() != state.step()) {
    return absl::AbortedError(absl::StrCat("head \"", head_, "\" moved from step ", state_->step(),
                                           " to step ", state.step(), " during the call"));
  }
  return absl::OkStatus();
}

absl::Status AnswerCheck::Interpret(const absl::Status& status) const {
  const std::optional<v1::ErrorDetail> detail = ErrorDetailOf(status);
  if (!detail.has_value() || detail->incarnation() == 0) return status;
  if (accumulates_) {
    absl::Status restarted = head_cache_->CheckIncarnation(head_, *step_, detail->incarnation());
    if (!restarted.ok()) return restarted;
  }
  absl::MutexLock lock(&mu_);
  if (!state_.has_value() || state_->incarnation() == detail->incarnation()) return status;
  return RestartedError(head_, state_->incarnation(), detail->incarnation(),
                        accumulates_ ? step_ : std::nullopt);
}

std::optional<uint64_t> AnswerCheck::KnownIncarnation() const {
  if (accumulates_) {
    const auto accumulated = head_cache_->IncarnationOf(head_, *step_);
    if (accumulated.has_value()) return accumulated;
  }
  absl::MutexLock lock(&mu_);
  if (!state_.has_value()) return std::nullopt;
  return state_->incarnation();
}

}  // namespace lossd::client::internal
