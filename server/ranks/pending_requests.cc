// SPDX-License-Identifier: Apache-2.0
#include "server/ranks/pending_requests.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/clocks/waits.h"
#include "server/ranks/messages.h"

namespace lossd::ranks {

uint64_t PendingRequests::Add() {
  absl::MutexLock lock(&mutex_);
  const uint64_t id = next_++;
  pending_[id];
  return id;
}

absl::StatusOr<v1::Answer> PendingRequests::Await(uint64_t request, absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  Pending& pending = pending_[request];
  const auto over = [&] {
    mutex_.AssertHeld();
    return pending.done || !failed_.ok();
  };
  if (!clocks::AwaitUntil(mutex_, absl::Condition(&over), deadline)) {
    return absl::DeadlineExceededError(absl::StrCat("rank ", rank_, " does not answer"));
  }
  v1::Answer answer = std::move(pending.answer);
  const bool answered = pending.done;
  pending_.erase(request);
  if (!answered) return failed_;
  if (absl::Status status = FromProto(answer.status()); !status.ok()) return status;
  return answer;
}

void PendingRequests::Forget(uint64_t request) {
  absl::MutexLock lock(&mutex_);
  const auto found = pending_.find(request);
  if (found == pending_.end()) return;
  found->second.forgotten = true;
  if (found->second.done || !failed_.ok()) pending_.erase(found);
}

v1::FilesProgress PendingRequests::Progress(uint64_t request) const {
  absl::MutexLock lock(&mutex_);
  const auto found = pending_.find(request);
  return found == pending_.end() ? v1::FilesProgress() : found->second.progress;
}

bool PendingRequests::AwaitProgress(uint64_t request,
                                    absl::FunctionRef<bool(const v1::FilesProgress&)> enough,
                                    absl::Time deadline) const {
  absl::MutexLock lock(&mutex_);
  const auto over = [&] {
    mutex_.AssertHeld();
    const auto found = pending_.find(request);
    return !failed_.ok() || found == pending_.end() || found->second.done || enough(found->second.progress);
  };
  return clocks::AwaitUntil(mutex_, absl::Condition(&over), deadline);
}

bool PendingRequests::HasFailed(uint64_t request) const {
  absl::MutexLock lock(&mutex_);
  const auto found = pending_.find(request);
  if (!failed_.ok()) return true;
  return found != pending_.end() && found->second.done && found->second.answer.status().code() != 0;
}

absl::Status PendingRequests::OnAnswer(v1::Answer& answer) {
  absl::MutexLock lock(&mutex_);
  const auto found = pending_.find(answer.request());
  if (found == pending_.end()) {
    return absl::InternalError(
        absl::StrCat("it answered request ", answer.request(), ", which there is not"));
  }
  if (found->second.forgotten) {
    pending_.erase(found);
    return absl::OkStatus();
  }
  found->second.answer.Swap(&answer);
  found->second.done = true;
  return absl::OkStatus();
}

absl::Status PendingRequests::OnProgress(v1::FilesProgress& progress) {
  absl::MutexLock lock(&mutex_);
  const auto found = pending_.find(progress.request());
  if (found == pending_.end()) {
    return absl::InternalError(
        absl::StrCat("it works on the files of request ", progress.request(), ", which there is not"));
  }
  found->second.progress.Swap(&progress);
  return absl::OkStatus();
}

void PendingRequests::Fail(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  failed_ = status;
}

}  // namespace lossd::ranks
