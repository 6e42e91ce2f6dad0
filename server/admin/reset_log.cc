// SPDX-License-Identifier: Apache-2.0
#include "server/admin/reset_log.h"

#include <utility>

#include "kernels/errors/field_error.h"

namespace lossd::admin {
namespace {

// Two requests of one content ask for the same.
std::string ContentOf(const v1::ResetHeadRequest& request) {
  v1::ResetHeadRequest content = request;
  content.clear_head();
  content.clear_reset_id();
  content.clear_incarnation();
  content.DiscardUnknownFields();
  const bool names_values = content.init_case() != v1::ResetHeadRequest::INIT_NOT_SET;
  if (content.scope() == v1::RESET_SCOPE_ALL && !names_values) content.mutable_kaiming_uniform();
  return content.SerializeAsString();
}

}  // namespace

absl::StatusOr<std::optional<v1::ResetHeadResponse>> ResetLog::Find(
    const v1::ResetHeadRequest& request) const {
  absl::MutexLock lock(&mutex_);
  const auto head = done_.find(request.head());
  if (head == done_.end()) return std::nullopt;
  for (const Done& done : head->second) {
    if (done.id != request.reset_id()) continue;
    if (done.content == ContentOf(request)) return done.response;
    return errors::FieldError("reset_id", "be another one for another reset: this one has been done",
                              request.reset_id(), absl::StatusCode::kFailedPrecondition);
  }
  return std::nullopt;
}

void ResetLog::Add(const v1::ResetHeadRequest& request, const v1::ResetHeadResponse& response) {
  absl::MutexLock lock(&mutex_);
  std::deque<Done>& done = done_[request.head()];
  done.push_back({request.reset_id(), ContentOf(request), response});
  if (done.size() > kRemembered) done.pop_front();
}

void ResetLog::Forget(absl::string_view head) {
  absl::MutexLock lock(&mutex_);
  if (const auto found = done_.find(head); found != done_.end()) done_.erase(found);
}

}  // namespace lossd::admin
