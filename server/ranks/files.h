// SPDX-License-Identifier: Apache-2.0
// The work of a worker on files of checkpoints: it writes the files of its classes, and reads what its part
// of a head needs, below its own checkpoint directory. WorkerFiles takes the leader's requests; a FileJob is
// one of them. RankFiles (remote_backend.h) is the leader's end.
//
// Names come from the leader and are checked here. The worker makes files only in a temporary folder, under
// names that it makes itself.
//
// Threads. Each request has a thread of its own, which works on the files. The worker's driving thread reads
// and writes the tensors for it, a slice at a time, between chunks. Both classes are thread-safe.
#ifndef LOSSD_SERVER_RANKS_FILES_H_
#define LOSSD_SERVER_RANKS_FILES_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/backend.h"
#include "lossd/ranks/v1/ranks.pb.h"
#include "server/head/checkpoint.h"
#include "server/head/disk.h"
#include "server/head/paths.h"

namespace lossd::ranks {

struct WorkerFilesOptions {
  int rank = 1;
  std::string directory;                    // of checkpoints; empty: none
  int64_t slice_bytes = int64_t{8} << 20;   // that the driving thread deals with at once
  int64_t buffer_bytes = int64_t{1} << 30;  // of one request, at most
  int64_t reserve_bytes = 0;                // of the host's memory, which stay to others
  int threads = 4;                          // that read at once in a load
  head::Disk* disk = head::Disk::Real();
};

class FileJob;

// Takes the leader's requests that concern files, and has a FileJob for each that is under way. Thread-safe.
class WorkerFiles {
 public:
  struct Parts {
    // Has the driving thread run it, after what it was given before; if that ends, never.
    std::function<void(std::function<void()>)> on_driver;
    // A head of the worker's, for the driving thread; null: there is none.
    std::function<kernels::HeadKernels*(uint64_t head)> find;
    std::function<void(v1::FromWorker)> send;  // thread-safe
  };

  // At most so many requests at a time.
  static constexpr size_t kMostJobs = 16;

  WorkerFiles(const WorkerFilesOptions& options, Parts parts);
  ~WorkerFiles();

  // Whether `request` is for this.
  static bool IsFor(const v1::Request& request);
  // On the driving thread; does not block. What has to be answered at once is answered.
  void Handle(const v1::Request& request) ABSL_LOCKS_EXCLUDED(mutex_);
  // The driving thread has ended: all work ends.
  void End() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  absl::Status Do(const v1::Request& request) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Begin(const v1::Request& request) ABSL_LOCKS_EXCLUDED(mutex_);
  FileJob* Find(uint64_t request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void JoinEnded() ABSL_LOCKS_EXCLUDED(mutex_);

  const WorkerFilesOptions options_;
  const Parts parts_;
  absl::Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<uint64_t, std::unique_ptr<FileJob>> jobs_ ABSL_GUARDED_BY(mutex_);
};

// One request that works on files of a checkpoint, with a thread of its own.
//
// Thread-safe. Ends when it is destroyed, which waits for its thread.
class FileJob {
 public:
  // Begins. All outlive it.
  FileJob(const WorkerFilesOptions& options, const WorkerFiles::Parts& parts, const v1::Request& request);
  ~FileJob();

  // INTERNAL if it does not wait for that.
  absl::Status GoOn(const v1::GoOn& go_on) ABSL_LOCKS_EXCLUDED(mutex_);
  void Cancel() ABSL_LOCKS_EXCLUDED(mutex_);
  // What waits for the driving thread waits no longer.
  void EndDriver() ABSL_LOCKS_EXCLUDED(mutex_);
  bool ended() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Run();
  absl::Status Save(v1::Answer& answer);
  absl::Status Load();

  // ---- Of a save ----
  // Reads the leader's file and writes its own: `progress_` has both.
  absl::Status Prove(const head::FolderBelow& folder);
  absl::StatusOr<std::vector<head::PlannedFile>> FilesOf(const v1::GoOn& go_on,
                                                         const kernels::HeadConfig& config) const;
  absl::StatusOr<std::vector<head::ManifestShard>> Write(const head::FolderBelow& folder,
                                                         const kernels::HeadConfig& config,
                                                         const std::vector<head::PlannedFile>& files,
                                                         int threads);
  // ---- Of a load ----
  absl::Status WriteRows(kernels::TensorId id, int64_t row_begin, int64_t rows, absl::Span<const uint8_t> in);

  // Tells the leader that this is ready, and waits. CANCELLED.
  absl::StatusOr<v1::GoOn> AwaitGoOn() ABSL_LOCKS_EXCLUDED(mutex_);
  bool cancelled() const ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<kernels::HeadConfig> Config();
  // Runs `fn` on the driving thread with the head.
  absl::Status OnDriver(absl::FunctionRef<absl::Status(kernels::HeadKernels& head)> fn)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void SendProgress();
  int64_t BufferBytes(int threads) const;

  const WorkerFilesOptions& options_;
  const WorkerFiles::Parts& parts_;
  const v1::Request request_;
  v1::FilesProgress progress_;  // of the job's thread

  mutable absl::Mutex mutex_;
  bool waits_ ABSL_GUARDED_BY(mutex_) = false;  // for GoOn
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  bool driver_ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<v1::GoOn> go_on_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;  // last
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_FILES_H_
