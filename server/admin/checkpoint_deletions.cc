// SPDX-License-Identifier: Apache-2.0
#include "server/admin/checkpoint_deletions.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"
#include "server/head/checkpoint_removal.h"
#include "server/head/temporary_folder.h"
#include "server/log/log.h"
#include "server/messages/texts.h"

namespace lossd::admin {
namespace {

constexpr char kDeletionIdField[] = "deletion_id";

}  // namespace

absl::StatusOr<v1::DeleteCheckpointResponse> CheckpointDeletions::Delete(
    const v1::DeleteCheckpointRequest& request) {
  if (absl::Status status = messages::CheckCallId(kDeletionIdField, request.deletion_id()); !status.ok())
    return status;
  const NamedLocks::Guard guard = under_way_.Lock(request.deletion_id());
  const absl::StatusOr<std::optional<int64_t>> before = Find(request);
  if (!before.ok()) return before.status();
  v1::DeleteCheckpointResponse response;
  if (before->has_value()) {
    response.set_bytes(static_cast<uint64_t>(**before));
    response.set_repeated_call(true);
    return response;
  }
  const absl::StatusOr<head::RemovedCheckpoint> removed =
      head::RemoveCheckpoint(directory_, request.checkpoint(), disk_);
  if (!removed.ok()) return removed.status();
  Remember(request, removed->bytes, removed->unremoved);
  metrics_->saves().OnRemoved(metrics::SaveMetrics::Cause::kDeleted, 1);
  const std::string head = request.checkpoint().substr(0, request.checkpoint().find('/'));
  metrics_->events().Add(metrics::EventLevel::kInfo, "checkpoint_deleted", head,
                         absl::StrCat("deleted ", request.checkpoint()));
  log::Log(log::LogLevel::kInfo, "checkpoint deleted",
           {{"checkpoint", request.checkpoint()},
            {"bytes", removed->bytes},
            {"in_use", !removed->unremoved.empty()}});
  response.set_bytes(static_cast<uint64_t>(removed->bytes));
  return response;
}

absl::StatusOr<std::optional<int64_t>> CheckpointDeletions::Find(
    const v1::DeleteCheckpointRequest& request) const {
  absl::MutexLock lock(&mutex_);
  const auto found = by_id_.find(request.deletion_id());
  if (found == by_id_.end()) return std::nullopt;
  if (found->second.checkpoint == request.checkpoint()) return found->second.bytes;
  return errors::FieldProblem(
      kDeletionIdField,
      absl::StrCat("has deleted ", found->second.checkpoint, " before and not ", request.checkpoint()),
      request.deletion_id(), absl::StatusCode::kFailedPrecondition);
}

void CheckpointDeletions::Remember(const v1::DeleteCheckpointRequest& request, int64_t bytes,
                                   const std::string& unremoved) {
  absl::MutexLock lock(&mutex_);
  by_id_[request.deletion_id()] = {request.checkpoint(), bytes};
  ids_.push_back(request.deletion_id());
  if (ids_.size() > kMostRemembered) {
    by_id_.erase(ids_.front());
    ids_.pop_front();
  }
  if (unremoved.empty()) return;
  unremoved_.push_back(unremoved);
  if (unremoved_.size() > kMostUnremoved) unremoved_.pop_front();
}

void CheckpointDeletions::RemoveUnused() {
  std::deque<std::string> paths;
  {
    absl::MutexLock lock(&mutex_);
    paths.swap(unremoved_);
  }
  std::erase_if(paths, [this](const std::string& path) { return head::RemoveIfUnused(disk_, path); });
  absl::MutexLock lock(&mutex_);
  unremoved_.insert(unremoved_.begin(), paths.begin(), paths.end());
}

}  // namespace lossd::admin
