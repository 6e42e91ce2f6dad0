// SPDX-License-Identifier: Apache-2.0
// The checkpoints of heads, as their pages list them. A thread of its own reads the directory, since a disk
// may be slow and the thread that answers HTTP may not wait for it.
//
// What is read is bounded: names and times of at most kMostFolders folders, and the manifests of the kShown
// newest of them. It is read when somebody looks, at most once in kFresh for each head.
//
// Thread-safe.
#ifndef LOSSD_SERVER_METRICS_CHECKPOINT_LISTS_H_
#define LOSSD_SERVER_METRICS_CHECKPOINT_LISTS_H_

#include <cstddef>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/head/checkpoint_store.h"

namespace lossd::metrics {

class CheckpointLists {
 public:
  static constexpr size_t kShown = 20;
  static constexpr size_t kMostFolders = 10'000;
  static constexpr size_t kMostHeads = 200;  // that are remembered
  static constexpr absl::Duration kFresh = absl::Seconds(2);
  static constexpr absl::Duration kPatience = absl::Milliseconds(50);  // of the first look at a head

  // Empty `directory`: the server has none.
  explicit CheckpointLists(std::string directory);
  ~CheckpointLists();
  CheckpointLists(const CheckpointLists&) = delete;
  CheckpointLists& operator=(const CheckpointLists&) = delete;

  // What was read last; an older list is read anew for the next look. nullopt: none was read yet.
  std::optional<absl::StatusOr<head::NewestCheckpoints>> Of(absl::string_view head)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Entry {
    std::optional<absl::StatusOr<head::NewestCheckpoints>> list;
    absl::Time read_at = absl::InfinitePast();
    absl::Time asked_at = absl::InfinitePast();
    bool waits = false;  // to be read
  };

  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  void ForgetOldest() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopped_ || !queue_.empty(); }

  const std::string directory_;
  absl::Mutex mutex_;
  std::map<std::string, Entry, std::less<>> by_head_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::string> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last
};

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_CHECKPOINT_LISTS_H_
