// SPDX-License-Identifier: Apache-2.0
// DeleteCheckpoint: each deletion happens once, whatever is repeated.
//
// Thread-safe. Calls block.
#ifndef LOSSD_SERVER_ADMIN_CHECKPOINT_DELETIONS_H_
#define LOSSD_SERVER_ADMIN_CHECKPOINT_DELETIONS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "lossd/v1/head.pb.h"
#include "server/admin/named_locks.h"
#include "server/head/disk.h"
#include "server/metrics/metrics.h"

namespace lossd::admin {

class CheckpointDeletions {
 public:
  static constexpr size_t kMostRemembered = 1000;
  // Of deleted checkpoints whose files were in use; those of older ones go with the next save or start.
  static constexpr size_t kMostUnremoved = 1000;

  // All outlive this.
  CheckpointDeletions(const std::string& directory, head::Disk* disk, metrics::Metrics* metrics)
      : directory_(directory), disk_(disk), metrics_(metrics) {}

  // INVALID_ARGUMENT for a deletion_id that is none; FAILED_PRECONDITION if it has deleted another
  // checkpoint. Other errors as head::RemoveCheckpoint. What fails is not remembered, since it has changed
  // nothing.
  absl::StatusOr<v1::DeleteCheckpointResponse> Delete(const v1::DeleteCheckpointRequest& request)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // After a load or a save: removes what was deleted while its files were in use.
  void RemoveUnused() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Deletion {
    std::string checkpoint;
    int64_t bytes = 0;
  };

  // The stored result of a deletion; nullopt: there is none.
  absl::StatusOr<std::optional<int64_t>> Find(const v1::DeleteCheckpointRequest& request) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  void Remember(const v1::DeleteCheckpointRequest& request, int64_t bytes, const std::string& unremoved)
      ABSL_LOCKS_EXCLUDED(mutex_);

  const std::string& directory_;
  head::Disk* const disk_;
  metrics::Metrics* const metrics_;
  NamedLocks under_way_;  // by deletion_id: a repeat waits for the first call

  mutable absl::Mutex mutex_;
  std::map<std::string, Deletion> by_id_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::string> ids_ ABSL_GUARDED_BY(mutex_);        // of by_id_, the oldest first
  std::deque<std::string> unremoved_ ABSL_GUARDED_BY(mutex_);  // paths of folders that have no name any more
};

}  // namespace lossd::admin

#endif  // LOSSD_SERVER_ADMIN_CHECKPOINT_DELETIONS_H_
