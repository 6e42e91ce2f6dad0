#include "client/cpp/head_book.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace lossd::client::internal {

absl::Status RestartedError(absl::string_view head, uint64_t before, uint64_t now,
                            std::optional<uint64_t> step) {
  const std::string lost = step.has_value() ? absl::StrCat("gradients of step ", *step, " are lost")
                                            : "its weights may have changed";
  return absl::AbortedError(absl::StrFormat(
      "server restarted (incarnation %016x -> %016x); %s: restore head \"%s\" or repeat the step", before,
      now, lost, head));
}

std::optional<HeadFacts> HeadBook::Facts(absl::string_view head) const {
  absl::ReaderMutexLock lock(&mu_);
  auto it = facts_.find(head);
  if (it == facts_.end()) return std::nullopt;
  return it->second;
}

void HeadBook::Learn(const v1::HeadDescription& description) {
  absl::MutexLock lock(&mu_);
  facts_[description.spec().name()] = {description.spec().hidden_size(), description.slice_limits()};
}

void HeadBook::ForgetFacts(absl::string_view head) {
  absl::MutexLock lock(&mu_);
  facts_.erase(head);
}

absl::Status HeadBook::Check(absl::string_view head, uint64_t step, uint64_t incarnation) const {
  auto it = accumulations_.find(head);
  if (it == accumulations_.end() || it->second.step != step) return absl::OkStatus();
  if (it->second.incarnation == incarnation) return absl::OkStatus();
  return RestartedError(head, it->second.incarnation, incarnation, step);
}

absl::Status HeadBook::NoteAccumulation(absl::string_view head, uint64_t step, uint64_t incarnation) {
  absl::MutexLock lock(&mu_);
  absl::Status status = Check(head, step, incarnation);
  if (status.ok()) accumulations_[head] = {step, incarnation};
  return status;
}

std::optional<uint64_t> HeadBook::IncarnationOf(absl::string_view head, uint64_t step) const {
  absl::ReaderMutexLock lock(&mu_);
  auto it = accumulations_.find(head);
  if (it == accumulations_.end() || it->second.step != step) return std::nullopt;
  return it->second.incarnation;
}

absl::Status HeadBook::CheckIncarnation(absl::string_view head, uint64_t step, uint64_t incarnation) const {
  absl::ReaderMutexLock lock(&mu_);
  return Check(head, step, incarnation);
}

void HeadBook::CloseStep(absl::string_view head, uint64_t step) {
  absl::MutexLock lock(&mu_);
  auto it = accumulations_.find(head);
  if (it != accumulations_.end() && it->second.step <= step) accumulations_.erase(it);
}

void HeadBook::ForgetAccumulation(absl::string_view head) {
  absl::MutexLock lock(&mu_);
  accumulations_.erase(head);
}

}  // namespace lossd::client::internal
