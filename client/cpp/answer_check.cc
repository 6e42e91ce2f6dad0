// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/answer_check.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "client/cpp/server_sent.h"
#include "client/cpp/step_errors.h"

namespace lossd::client::internal {

AnswerCheck::AnswerCheck(HeadCache* head_cache, std::string head, std::optional<uint64_t> step,
                         bool accumulates, bool in_step)
    : head_cache_(head_cache),
      head_(std::move(head)),
      accumulates_(accumulates),
      in_step_(in_step),
      at_(in_step && step.has_value() ? std::make_optional(head_cache->StepOf(head_, *step)) : std::nullopt) {
}

absl::Status AnswerCheck::CheckStep(const v1::HeadState& state) {
  if (!accumulates_) return head_cache_->Check(*at_, GradientsId::Of(state));
  if (state.step() != at_->step) {
    return ServerSent("step ", state.step(), " in answer to step ", at_->step);
  }
  return head_cache_->NoteAccumulation(*at_, GradientsId::Of(state));
}

absl::Status AnswerCheck::Accept(const v1::HeadState& state) {
  if (state.incarnation() == 0) return ServerSent("incarnation 0");
  if (at_.has_value()) {
    if (absl::Status status = CheckStep(state); !status.ok()) return status;
  }
  absl::MutexLock lock(&mu_);
  if (!state_.has_value()) state_ = state;
  if (state_->incarnation() != state.incarnation()) {
    return Restarted(state_->incarnation(), state.incarnation());
  }
  if (state_->step() != state.step()) {
    return absl::AbortedError(absl::StrCat("head \"", head_, "\" moved from step ", state_->step(),
                                           " to step ", state.step(), " during the call"));
  }
  if (in_step_ && state_->generation() != state.generation()) {
    return DiscardedError(head_, state.step(), state_->generation(), state.generation());
  }
  if (state_->weights_version() != state.weights_version()) {
    return absl::AbortedError(absl::StrCat("the weights of head \"", head_, "\" changed during the call"));
  }
  return absl::OkStatus();
}

absl::Status AnswerCheck::Restarted(uint64_t before, uint64_t now) const {
  return RestartedError(head_, before, now, accumulates_ ? std::make_optional(at_->step) : std::nullopt);
}

absl::Status AnswerCheck::Interpret(const absl::Status& status) const {
  if (at_.has_value()) {
    absl::Status meant = head_cache_->Interpret(*at_, status);
    if (meant != status) return meant;
  }
  const std::optional<v1::ErrorDetail> detail = ErrorDetailOf(status);
  if (!detail.has_value() || detail->incarnation() == 0) return status;
  absl::MutexLock lock(&mu_);
  if (!state_.has_value() || state_->incarnation() == detail->incarnation()) return status;
  return Restarted(state_->incarnation(), detail->incarnation());
}

absl::StatusOr<std::optional<GradientsId>> AnswerCheck::Meant() const {
  if (at_.has_value()) {
    if (absl::Status status = head_cache_->CheckCurrent(*at_); !status.ok()) return status;
    const std::optional<GradientsId> known = head_cache_->GradientsOf(*at_);
    if (known.has_value()) return known;
  }
  absl::MutexLock lock(&mu_);
  if (!state_.has_value()) return std::optional<GradientsId>();
  return GradientsId{state_->incarnation(), in_step_ ? state_->generation() : 0};
}

void AnswerCheck::BeginAgain() {
  absl::MutexLock lock(&mu_);
  state_.reset();
}

}  // namespace lossd::client::internal
