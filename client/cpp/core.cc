// SPDX-License-Identifier: Apache-2.0
// The state that the calls of a client share (core.h): HeadCache, AnswerCheck, Executor and the rules for
// repeats. Core itself is in loss_call.cc.
//
// HeadCache keeps for each head: facts_, what its description said; accumulations_, the step that calls of
// this client have accumulated into, with the incarnation and generation of its gradients; starts_, how often
// this client has started a step of the head again. A call remembers the number of starts when it begins
// (TrainerStep). If the number has changed when its answer comes, the answer is for gradients that are gone.
#include "client/cpp/core.h"

#include <algorithm>
#include <cmath>

#include "absl/random/random.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"
#include "proto/wire/status_details.h"

namespace lossd::client::internal {

// ---- HeadCache ----

std::optional<HeadInfo> HeadCache::Facts(absl::string_view head) const {
  absl::ReaderMutexLock lock(&mu_);
  auto it = facts_.find(head);
  if (it == facts_.end()) return std::nullopt;
  return it->second;
}

HeadInfo HeadInfo::Of(const v1::HeadDescription& description) {
  const v1::HeadSpec& spec = description.spec();
  HeadInfo facts{.hidden_size = spec.hidden_size(),
                 .vocab_size = static_cast<int64_t>(spec.full_vocab_size() > 0 ? spec.full_vocab_size()
                                                                               : spec.vocab_size()),
                 .limits = description.slice_limits(),
                 .histories = description.has_history()};
  if (!spec.class_list().empty()) {
    facts.classes =
        std::make_shared<const std::vector<int32_t>>(spec.class_list().begin(), spec.class_list().end());
  }
  return facts;
}

void HeadCache::Learn(const v1::HeadDescription& description) {
  const v1::HeadSpec& spec = description.spec();
  if (spec.full_vocab_size() > 0 && spec.class_list().empty()) return;  // ListHeads omits class lists
  HeadInfo facts = HeadInfo::Of(description);
  absl::MutexLock lock(&mu_);
  facts_[spec.name()] = std::move(facts);
}

void HeadCache::ForgetFacts(absl::string_view head) {
  absl::MutexLock lock(&mu_);
  facts_.erase(head);
}

TrainerStep HeadCache::StepOf(absl::string_view head, uint64_t step) const {
  absl::ReaderMutexLock lock(&mu_);
  auto it = starts_.find(head);
  return {std::string(head), step, it == starts_.end() ? 0 : it->second};
}

bool HeadCache::IsCurrent(const TrainerStep& at) const {
  auto it = starts_.find(at.head);
  return at.starts == (it == starts_.end() ? 0 : it->second);
}

std::optional<GradientsId> HeadCache::Meant(const TrainerStep& at) const {
  auto it = accumulations_.find(at.head);
  if (it != accumulations_.end() && it->second.step == at.step) return it->second.gradients;
  if (expected_incarnation_ == 0 || acknowledged_.contains(at.head)) return std::nullopt;
  return GradientsId{.incarnation = expected_incarnation_};
}

absl::Status HeadCache::CheckLocked(const TrainerStep& at, const GradientsId& now) const {
  const std::optional<GradientsId> before = Meant(at);
  if (!before.has_value()) return absl::OkStatus();
  if (before->incarnation != now.incarnation) {
    return RestartedError(at.head, before->incarnation, now.incarnation, at.step);
  }
  const bool known = before->generation != 0 && now.generation != 0;
  if (!known || before->generation == now.generation) return absl::OkStatus();
  return DiscardedError(at.head, at.step, before->generation, now.generation);
}

absl::Status HeadCache::CheckCurrent(const TrainerStep& at) const {
  absl::ReaderMutexLock lock(&mu_);
  return IsCurrent(at) ? absl::OkStatus() : DiscardedByThisClientError(at.head, at.step);
}

absl::Status HeadCache::NoteAccumulation(const TrainerStep& at, const GradientsId& gradients) {
  absl::MutexLock lock(&mu_);
  if (!IsCurrent(at)) return DiscardedByThisClientError(at.head, at.step);
  absl::Status status = CheckLocked(at, gradients);
  if (status.ok()) accumulations_[at.head] = {at.step, gradients};
  return status;
}

std::optional<GradientsId> HeadCache::GradientsOf(const TrainerStep& at) const {
  absl::ReaderMutexLock lock(&mu_);
  return Meant(at);
}

absl::Status HeadCache::Check(const TrainerStep& at, const GradientsId& gradients) const {
  absl::ReaderMutexLock lock(&mu_);
  return IsCurrent(at) ? CheckLocked(at, gradients) : absl::OkStatus();
}

absl::Status HeadCache::Interpret(const TrainerStep& at, const absl::Status& status) const {
  const std::optional<v1::ErrorDetail> detail = ErrorDetailOf(status);
  if (detail.has_value() && detail->incarnation() != 0)
    LOSSD_RETURN_IF_ERROR(Check(at, {.incarnation = detail->incarnation()}));
  return RefusesGeneration(status) ? DiscardedError(at.head, at.step, status) : status;
}

void HeadCache::CloseStep(absl::string_view head, uint64_t step) {
  absl::MutexLock lock(&mu_);
  auto it = accumulations_.find(head);
  if (it != accumulations_.end() && it->second.step <= step) accumulations_.erase(it);
}

void HeadCache::ForgetAccumulation(absl::string_view head) {
  absl::MutexLock lock(&mu_);
  accumulations_.erase(head);
  ++starts_[head];
  if (expected_incarnation_ != 0) acknowledged_.insert(std::string(head));
}

// ---- AnswerCheck ----

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
  if (at_.has_value()) LOSSD_RETURN_IF_ERROR(CheckStep(state));
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
    LOSSD_RETURN_IF_ERROR(head_cache_->CheckCurrent(*at_));
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

// ---- Executor ----

Executor::Executor() : thread_([this] { Run(); }) {}

Executor::~Executor() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  thread_.join();
}

void Executor::PostAt(absl::Time when, Task task) {
  absl::MutexLock lock(&mu_);
  tasks_.emplace(Key(when, posted_++), std::move(task));
}

void Executor::RunOrPost(Task task) {
  {
    absl::MutexLock lock(&mu_);
    if (running_ || elsewhere_ || Ready()) {
      tasks_.emplace(Key(absl::InfinitePast(), posted_++), std::move(task));
      return;
    }
    elsewhere_ = true;
  }
  task();
  task = nullptr;  // destroys the task before the next one begins, as Run does
  absl::MutexLock lock(&mu_);
  elsewhere_ = false;
}

bool Executor::Ready() const {
  if (stopping_) return true;
  return !tasks_.empty() && tasks_.begin()->first.first <= clocks::SteadyNow();
}

void Executor::Run() {
  const auto alone = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !elsewhere_; };
  while (true) {
    Task task;
    {
      absl::MutexLock lock(&mu_);
      running_ = false;
      const absl::Time due = tasks_.empty() ? absl::InfiniteFuture() : tasks_.begin()->first.first;
      if (!Ready()) {
        // Waits until the first task is due, or until another task is posted, which may be due earlier.
        const uint64_t posted = posted_;
        auto changed = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || posted_ != posted; };
        clocks::AwaitUntil(mu_, absl::Condition(&changed), due);
        continue;
      }
      if (elsewhere_) {
        mu_.Await(absl::Condition(&alone));
        continue;
      }
      if (tasks_.empty() || tasks_.begin()->first.first > clocks::SteadyNow())
        return;  // stopping, and no task is due
      running_ = true;
      task = std::move(tasks_.begin()->second);
      tasks_.erase(tasks_.begin());
    }
    task();
  }
}

// ---- Repeats ----

double Jitter() {
  thread_local absl::BitGen random;
  return absl::Uniform(random, 0.8, 1.2);
}

namespace {

bool MayRepeat(const absl::Status& status, Repeat repeat) {
  if (IsTransient(status)) return true;
  return repeat == Repeat::kIfTransientOrAborted && status.code() == absl::StatusCode::kAborted &&
         !RestartOf(status).has_value() && !IsStepDiscarded(status);
}

}  // namespace

std::optional<absl::Duration> WaitBeforeRepeat(const RetryOptions& options, const absl::Status& status,
                                               int attempt, absl::Duration left, double jitter,
                                               Repeat repeat) {
  if (!MayRepeat(status, repeat) || attempt >= options.max_attempts) return std::nullopt;
  const double growth = std::pow(4.0, std::clamp(attempt - 1, 0, 16));
  const absl::Duration wait = std::min(options.initial_backoff * growth, options.max_backoff) * jitter;
  if (wait >= left) return std::nullopt;
  return wait;
}

absl::Status WithAttempts(const absl::Status& status, int attempts) {
  if (attempts < 2) return status;
  const bool repeatable = MayRepeat(status, Repeat::kIfTransientOrAborted);
  return errors::WithMessage(
      status, absl::StrCat(status.message(), "; tried ", attempts, " times",
                           repeatable ? "" : ", and an earlier attempt may have taken effect"));
}

}  // namespace lossd::client::internal
