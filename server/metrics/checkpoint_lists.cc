// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/checkpoint_lists.h"

#include <algorithm>
#include <utility>

#include "kernels/clocks/clock.h"
#include "kernels/clocks/waits.h"

namespace lossd::metrics {

CheckpointLists::CheckpointLists(std::string directory)
    : directory_(std::move(directory)), thread_([this] { Run(); }) {}

CheckpointLists::~CheckpointLists() {
  {
    absl::MutexLock lock(&mutex_);
    stopped_ = true;
  }
  thread_.join();
}

std::optional<absl::StatusOr<head::NewestCheckpoints>> CheckpointLists::Of(absl::string_view head) {
  if (directory_.empty()) return head::NewestCheckpoints();
  const std::string name(head);
  absl::MutexLock lock(&mutex_);
  Entry& entry = by_head_[name];
  entry.asked_at = clocks::SteadyNow();
  if (!entry.waits && entry.asked_at - entry.read_at > kFresh) {
    entry.waits = true;
    queue_.push_back(name);
  }
  if (entry.list.has_value()) return entry.list;
  const auto has_list = [this, &name]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto found = by_head_.find(name);
    return stopped_ || found == by_head_.end() || found->second.list.has_value();
  };
  clocks::AwaitFor(mutex_, absl::Condition(&has_list), kPatience);
  const auto found = by_head_.find(name);
  return found == by_head_.end() ? std::nullopt : found->second.list;
}

void CheckpointLists::Run() {
  while (true) {
    std::string head;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &CheckpointLists::HasWork));
      if (stopped_) return;
      head = std::move(queue_.front());
      queue_.pop_front();
    }
    absl::StatusOr<head::NewestCheckpoints> list = head::ListNewest(directory_, head, kShown, kMostFolders);
    absl::MutexLock lock(&mutex_);
    Entry& entry = by_head_[head];
    entry.list = std::move(list);
    entry.read_at = clocks::SteadyNow();
    entry.waits = false;
    if (by_head_.size() > kMostHeads) ForgetOldest();
  }
}

// One that waits stays: it is in the queue.
void CheckpointLists::ForgetOldest() {
  auto oldest = by_head_.end();
  for (auto it = by_head_.begin(); it != by_head_.end(); ++it) {
    if (it->second.waits) continue;
    if (oldest == by_head_.end() || it->second.asked_at < oldest->second.asked_at) oldest = it;
  }
  if (oldest != by_head_.end()) by_head_.erase(oldest);
}

}  // namespace lossd::metrics
