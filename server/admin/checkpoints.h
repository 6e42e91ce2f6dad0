// SPDX-License-Identifier: Apache-2.0
// Checkpoints saves, lists, prunes and deletes the checkpoints of heads, without gRPC. CheckpointDeletions
// makes sure that a deletion which a client repeats happens once. NamedLocks has a lock for each head.
//
// A checkpoint shows its head at one step boundary. While a save reads the head's tensors into memory, calls
// that change the head wait, and streams of rows go on. After that the head is free, and the disk takes the
// time it needs.
//
// All classes are thread-safe. Calls block. Saves take turns, so their memory is at most one buffer.
#ifndef LOSSD_SERVER_ADMIN_CHECKPOINTS_H_
#define LOSSD_SERVER_ADMIN_CHECKPOINTS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "lossd/v1/head.pb.h"
#include "server/engine/engine.h"
#include "server/head/checkpoint.h"
#include "server/head/disk.h"
#include "server/head/file_sites.h"
#include "server/log/log.h"
#include "server/metrics/metrics.h"

namespace lossd::admin {

// One lock for each name. A lock is made when it is first asked for, and is gone when no thread holds it.
class NamedLocks {
 public:
  // Holds the lock of one name until destroyed or told to let go, on the thread that took it.
  class Guard {
   public:
    explicit Guard(std::shared_ptr<absl::Mutex> mutex) ABSL_NO_THREAD_SAFETY_ANALYSIS
        : mutex_(std::move(mutex)) {
      mutex_->Lock();
    }
    ~Guard() { Unlock(); }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

    // Lets go early; later calls do nothing.
    void Unlock() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      if (mutex_ != nullptr) mutex_->Unlock();
      mutex_ = nullptr;
    }

   private:
    std::shared_ptr<absl::Mutex> mutex_;  // null: not held any more
  };

  // Blocks until the lock of `name` is free.
  Guard Lock(absl::string_view name) { return Guard(Find(name)); }

 private:
  std::shared_ptr<absl::Mutex> Find(absl::string_view name) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    std::erase_if(mutexes_, [](const auto& entry) { return entry.second.expired(); });
    std::weak_ptr<absl::Mutex>& known = mutexes_[std::string(name)];
    std::shared_ptr<absl::Mutex> mutex = known.lock();
    if (mutex == nullptr) known = mutex = std::make_shared<absl::Mutex>();
    return mutex;
  }

  absl::Mutex mutex_;
  std::map<std::string, std::weak_ptr<absl::Mutex>> mutexes_ ABSL_GUARDED_BY(mutex_);
};

// DeleteCheckpoint: a deletion happens once, however often a client repeats the call.
class CheckpointDeletions {
 public:
  static constexpr size_t kMostRemembered = 1000;
  // Of deleted checkpoints whose files were in use. Files beyond that number go with the next save or start.
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

struct CheckpointOptions {
  std::string directory;                      // made when it is first needed
  int64_t transfer_bytes = int64_t{8} << 20;  // per operation on the device; at least one row
  int64_t buffer_bytes = int64_t{1} << 30;    // host memory for what is read ahead of the disk
  head::ShardRules shards;                    // files of a checkpoint, and threads that write or read them
  int64_t keep = 0;                           // automatic checkpoints per head; 0: all
  int64_t memory_reserve_bytes = 0;           // the buffer leaves so much of the host's memory to others
  int64_t limit_bytes = 0;                    // of all files below the directory; 0: none
  head::Disk* disk = head::Disk::Real();
  head::FileSites* sites = nullptr;  // other processes that have parts of heads; null: there are none
};

// The checkpoints of all heads of a server.
class Checkpoints {
 public:
  // All pointers outlive this object. `head_locks`: every call that changes a head holds the lock of the
  // head.
  Checkpoints(const CheckpointOptions& options, engine::Engine* engine, metrics::Metrics* metrics,
              NamedLocks* head_locks);

  const CheckpointOptions& options() const { return options_; }

  // For the server's start: removes what interrupted saves left, if there is a directory.
  void RemoveLeftovers();
  // Makes the directory if need be.
  absl::Status PrepareDirectory() ABSL_LOCKS_EXCLUDED(directory_mutex_);

  // PERMISSION_DENIED naming the field if a save would keep fewer checkpoints than --keep_checkpoints says,
  // which is for admins to ask for. A server whose flag is 0 leaves the number to each save.
  absl::Status CheckKeep(const v1::SaveCheckpointRequest& request) const;
  // The same for a deletion: of an automatic checkpoint, which --keep_checkpoints keeps. Reads its manifest.
  absl::Status CheckDelete(const v1::DeleteCheckpointRequest& request) const;

  // Both callbacks run on this thread; `cancelled` is asked a few times a second, true ends the save.
  struct SaveCallbacks {
    std::function<void(const v1::SaveProgress&)> on_progress = [](const v1::SaveProgress&) {};
    std::function<bool()> cancelled = [] { return false; };
  };
  absl::StatusOr<v1::SaveCheckpointResponse> Save(const v1::SaveCheckpointRequest& request,
                                                  const SaveCallbacks& callbacks)
      ABSL_LOCKS_EXCLUDED(save_mutex_);
  // Ends saves with CANCELLED, now and in the future.
  void CancelSaves() { saves_cancelled_ = true; }

  // The other processes that have parts of a head, for one load.
  std::vector<std::unique_ptr<head::LoadSite>> LoadSites(const std::string& head) const;
  // For a load that begins now.
  head::LoadOptions LoadOptions(bool verify_first) const;

  absl::StatusOr<v1::ListCheckpointsResponse> List(const v1::ListCheckpointsRequest& request) const;

  absl::StatusOr<v1::DeleteCheckpointResponse> Delete(const v1::DeleteCheckpointRequest& request) {
    return deletions_.Delete(request);
  }
  // For the end of a load: what was deleted during it goes now.
  void EndReading() { deletions_.RemoveUnused(); }

 private:
  absl::StatusOr<v1::SaveCheckpointResponse> SaveInTurn(const v1::SaveCheckpointRequest& request,
                                                        const SaveCallbacks& callbacks)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(save_mutex_);
  // Counts a save that failed, and tells of it.
  void OnFailed(const v1::SaveCheckpointRequest& request, const absl::Status& status);
  std::vector<kernels::RemotePart> RemotePartsOf(const std::string& head) const;
  // Removes what `request` lets go; a failure is logged.
  void Prune(const v1::SaveCheckpointRequest& request, v1::SaveCheckpointResponse* response);

  const CheckpointOptions options_;
  engine::Engine* const engine_;
  metrics::Metrics* const metrics_;
  NamedLocks* const head_locks_;
  CheckpointDeletions deletions_;
  std::atomic<bool> saves_cancelled_{false};
  // By head, and what a client could have known apart from troubles of the disk, which none of these lines
  // may leave out.
  log::LineBudgets failed_lines_{20, 200};

  absl::Mutex save_mutex_;  // one save at a time
  absl::Mutex directory_mutex_;
  bool directory_ready_ ABSL_GUARDED_BY(directory_mutex_) = false;
};

}  // namespace lossd::admin

#endif  // LOSSD_SERVER_ADMIN_CHECKPOINTS_H_
