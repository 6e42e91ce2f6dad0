// SPDX-License-Identifier: Apache-2.0
// Checkpoints saves, lists, prunes and deletes the checkpoints of heads, without gRPC. CheckpointDeletions
// makes sure that a deletion which a client repeats happens once. NamedLocks has a lock for each head.
//
// A checkpoint shows its head at one step boundary. While a save reads the head's tensors into memory, calls
// that change the head wait, and streams of rows go on. After that, calls may change the head again while the
// disk is written.
//
// All classes are thread-safe. Calls block. Only one save runs at a time, so saves use at most one buffer.
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

// One lock for each name. A lock is made when it is first asked for, and removed when no thread holds it.
class NamedLocks {
 public:
  // Holds the lock of one name until Unlock or the destructor, on the thread that took it.
  class Guard {
   public:
    explicit Guard(std::shared_ptr<absl::Mutex> mutex) ABSL_NO_THREAD_SAFETY_ANALYSIS
        : mutex_(std::move(mutex)) {
      mutex_->Lock();
    }
    ~Guard() { Unlock(); }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

    // Releases the lock early. Later calls do nothing.
    void Unlock() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      if (mutex_ != nullptr) mutex_->Unlock();
      mutex_ = nullptr;
    }

   private:
    std::shared_ptr<absl::Mutex> mutex_;  // null: the lock is released
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

// Carries out DeleteCheckpoint. A deletion happens once, even if a client repeats the call.
class CheckpointDeletions {
 public:
  static constexpr size_t kMostRemembered = 1000;
  // How many deleted checkpoints may wait until their files are no longer in use. The files of further ones
  // are removed by the next save or start.
  static constexpr size_t kMostUnremoved = 1000;

  // The arguments outlive the object.
  CheckpointDeletions(const std::string& directory, head::Disk* disk, metrics::Metrics* metrics)
      : directory_(directory), disk_(disk), metrics_(metrics) {}

  // Deletes a checkpoint. INVALID_ARGUMENT if the deletion_id is malformed; FAILED_PRECONDITION if it has
  // deleted another checkpoint. Other errors as head::RemoveCheckpoint. A failed deletion is not remembered,
  // because it has changed nothing.
  absl::StatusOr<v1::DeleteCheckpointResponse> Delete(const v1::DeleteCheckpointRequest& request)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Call after a load or a save. Removes the files of checkpoints that were deleted while their files were in
  // use.
  void RemoveUnused() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Deletion {
    std::string checkpoint;
    int64_t bytes = 0;
  };

  // The bytes that an earlier call with this deletion_id has deleted; nullopt: there was no such call.
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
  std::deque<std::string> ids_ ABSL_GUARDED_BY(mutex_);  // keys of by_id_, the oldest first
  // The paths of the folders of deleted checkpoints, whose names are gone already.
  std::deque<std::string> unremoved_ ABSL_GUARDED_BY(mutex_);
};

struct CheckpointOptions {
  std::string directory;  // created when it is first needed
  // Bytes that are copied in one operation on the device; at least one row.
  int64_t transfer_bytes = int64_t{8} << 20;
  // Host memory for data that was read from the device and is not written yet.
  int64_t buffer_bytes = int64_t{1} << 30;
  // The files of a checkpoint, and the threads that write or read them.
  head::ShardRules shards;
  int64_t keep = 0;  // automatic checkpoints per head; 0: all
  // Host memory that the buffer leaves free, for other programs.
  int64_t memory_reserve_bytes = 0;
  int64_t limit_bytes = 0;  // for all files below the directory; 0: no limit
  head::Disk* disk = head::Disk::Real();
  // The other processes that have parts of heads; null: there are none.
  head::FileSites* sites = nullptr;
};

// Saves, lists, prunes and deletes the checkpoints of all heads of a server.
class Checkpoints {
 public:
  // All pointers outlive the object. `head_locks` has the lock of each head, which every call that changes
  // the head holds.
  Checkpoints(const CheckpointOptions& options, engine::Engine* engine, metrics::Metrics* metrics,
              NamedLocks* head_locks);

  const CheckpointOptions& options() const { return options_; }

  // Call when the server starts. Removes the files that interrupted saves left, if there is a directory.
  void RemoveLeftovers();
  // Creates the directory if it does not exist.
  absl::Status PrepareDirectory() ABSL_LOCKS_EXCLUDED(directory_mutex_);

  // Call for callers that are not admins. PERMISSION_DENIED naming the field if an automatic save asks to
  // keep fewer checkpoints than --keep_checkpoints. If the flag is 0, each save may choose the number.
  absl::Status CheckKeep(const v1::SaveCheckpointRequest& request) const;
  // PERMISSION_DENIED if a deletion would delete an automatic checkpoint, and --keep_checkpoints is not 0.
  // Reads the manifest of the checkpoint.
  absl::Status CheckDelete(const v1::DeleteCheckpointRequest& request) const;

  // Both callbacks run on the calling thread. `cancelled` is called a few times a second; the save ends if it
  // returns true.
  struct SaveCallbacks {
    std::function<void(const v1::SaveProgress&)> on_progress = [](const v1::SaveProgress&) {};
    std::function<bool()> cancelled = [] { return false; };
  };
  absl::StatusOr<v1::SaveCheckpointResponse> Save(const v1::SaveCheckpointRequest& request,
                                                  const SaveCallbacks& callbacks)
      ABSL_LOCKS_EXCLUDED(save_mutex_);
  // Ends running and later saves with CANCELLED.
  void CancelSaves() { saves_cancelled_ = true; }

  // The other processes that have parts of a head, for one load.
  std::vector<std::unique_ptr<head::LoadSite>> LoadSites(const std::string& head) const;
  // The options of a load that begins now.
  head::LoadOptions LoadOptions(bool verify_first) const;

  absl::StatusOr<v1::ListCheckpointsResponse> List(const v1::ListCheckpointsRequest& request) const;

  absl::StatusOr<v1::DeleteCheckpointResponse> Delete(const v1::DeleteCheckpointRequest& request) {
    return deletions_.Delete(request);
  }
  // Call at the end of a load. Removes the files of checkpoints that were deleted during the load.
  void EndReading() { deletions_.RemoveUnused(); }

 private:
  absl::StatusOr<v1::SaveCheckpointResponse> SaveInTurn(const v1::SaveCheckpointRequest& request,
                                                        const SaveCallbacks& callbacks)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(save_mutex_);
  // Counts a save that failed, and reports it as an event and in the log.
  void OnFailed(const v1::SaveCheckpointRequest& request, const absl::Status& status);
  std::vector<kernels::RemotePart> RemotePartsOf(const std::string& head) const;
  // Removes older checkpoints that `request` does not keep. Logs a failure.
  void Prune(const v1::SaveCheckpointRequest& request, v1::SaveCheckpointResponse* response);

  const CheckpointOptions options_;
  engine::Engine* const engine_;
  metrics::Metrics* const metrics_;
  NamedLocks* const head_locks_;
  CheckpointDeletions deletions_;
  std::atomic<bool> saves_cancelled_{false};
  // Limits the log lines of failed saves. Budgets are by head, and separate for errors that a client could
  // have foreseen and for errors of the disk. So lines of the first kind never displace lines of the second.
  log::LineBudgets failed_lines_{20, 200};

  absl::Mutex save_mutex_;  // one save at a time
  absl::Mutex directory_mutex_;
  bool directory_ready_ ABSL_GUARDED_BY(directory_mutex_) = false;
};

}  // namespace lossd::admin

#endif  // LOSSD_SERVER_ADMIN_CHECKPOINTS_H_
