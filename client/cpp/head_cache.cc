#include "client/cpp/head_cache.h"

#include <string>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"

namespace lossd::client::internal {

namespace {

constexpr char kRestartPayload[] = "lossd/restart";

absl::Status Restarted(uint64_t before, uint64_t now, absl::string_view consequence) {
  absl::Status status = absl::AbortedError(
      absl::StrFormat("server restarted (incarnation %016x -> %016x); %s", before, now, consequence));
  status.SetPayload(kRestartPayload, absl::Cord(absl::StrCat(before, " ", now)));
  return status;
}

}  // namespace

absl::Status RestartedError(absl::string_view head, uint64_t before, uint64_t now,
                            std::optional<uint64_t> step) {
  const std::string lost = step.has_value() ? absl::StrCat("gradients of step ", *step, " are lost")
                                            : "its weights may have changed";
  return Restarted(before, now, absl::StrFormat("%s: restore head \"%s\" or repeat the step", lost, head));
}

absl::Status RestartedError(uint64_t before, uint64_t now) {
  return Restarted(before, now, "gradients of open steps are lost: restore the heads or repeat the steps");
}

std::optional<Restart> RestartIn(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kRestartPayload);
  if (!payload.has_value()) return std::nullopt;
  const std::vector<std::string> numbers = absl::StrSplit(std::string(*payload), ' ');
  Restart restart;
  if (numbers.size() != 2 || !absl::SimpleAtoi(numbers[0], &restart.before) ||
      !absl::SimpleAtoi(numbers[1], &restart.now)) {
    return std::nullopt;
  }
  return restart;
}

std::optional<HeadInfo> HeadCache::Facts(absl::string_view head) const {
  absl::ReaderMutexLock lock(&mu_);
  auto it = facts_.find(head);
  if (it == facts_.end()) return std::nullopt;
  return it->second;
}

void HeadCache::Learn(const v1::HeadDescription& description) {
  absl::MutexLock lock(&mu_);
  facts_[description.spec().name()] = {description.spec().hidden_size(), description.slice_limits()};
}

void HeadCache::ForgetFacts(absl::string_view head) {
  absl::MutexLock lock(&mu_);
  facts_.erase(head);
}

absl::Status HeadCache::Check(absl::string_view head, uint64_t step, uint64_t incarnation) const {
  uint64_t before =
      expected_incarnation_ != 0 && !acknowledged_.contains(head) ? expected_incarnation_ : incarnation;
  auto it = accumulations_.find(head);
  if (it != accumulations_.end() && it->second.step == step) before = it->second.incarnation;
  return before == incarnation ? absl::OkStatus() : RestartedError(head, before, incarnation, step);
}

absl::Status HeadCache::NoteAccumulation(absl::string_view head, uint64_t step, uint64_t incarnation) {
  absl::MutexLock lock(&mu_);
  absl::Status status = Check(head, step, incarnation);
  if (status.ok()) accumulations_[head] = {step, incarnation};
  return status;
}

std::optional<uint64_t> HeadCache::IncarnationOf(absl::string_view head, uint64_t step) const {
  absl::ReaderMutexLock lock(&mu_);
  auto it = accumulations_.find(head);
  if (it != accumulations_.end() && it->second.step == step) return it->second.incarnation;
  if (expected_incarnation_ != 0 && !acknowledged_.contains(head)) return expected_incarnation_;
  return std::nullopt;
}

absl::Status HeadCache::CheckIncarnation(absl::string_view head, uint64_t step, uint64_t incarnation) const {
  absl::ReaderMutexLock lock(&mu_);
  return Check(head, step, incarnation);
}

void HeadCache::CloseStep(absl::string_view head, uint64_t step) {
  absl::MutexLock lock(&mu_);
  auto it = accumulations_.find(head);
  if (it != accumulations_.end() && it->second.step <= step) accumulations_.erase(it);
}

void HeadCache::ForgetAccumulation(absl::string_view head) {
  absl::MutexLock lock(&mu_);
  accumulations_.erase(head);
  if (expected_incarnation_ != 0) acknowledged_.insert(std::string(head));
}

}  // namespace lossd::client::internal
