// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/head_cache.h"

#include "client/cpp/client.h"
#include "client/cpp/step_errors.h"

namespace lossd::client::internal {

std::optional<HeadInfo> HeadCache::Facts(absl::string_view head) const {
  absl::ReaderMutexLock lock(&mu_);
  auto it = facts_.find(head);
  if (it == facts_.end()) return std::nullopt;
  return it->second;
}

void HeadCache::Learn(const v1::HeadDescription& description) {
  absl::MutexLock lock(&mu_);
  facts_[description.spec().name()] = {description.spec().hidden_size(), description.slice_limits(),
                                       description.has_history()};
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
  if (detail.has_value() && detail->incarnation() != 0) {
    absl::Status restarted = Check(at, {.incarnation = detail->incarnation()});
    if (!restarted.ok()) return restarted;
  }
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

}  // namespace lossd::client::internal
