// SPDX-License-Identifier: Apache-2.0
// One request that works on files of a checkpoint, with a thread of its own (worker_files.h).
//
// Thread-safe. Ends when it is destroyed, which waits for its thread.
#ifndef LOSSD_SERVER_RANKS_FILE_JOB_H_
#define LOSSD_SERVER_RANKS_FILE_JOB_H_

#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "server/head/checkpoint.h"
#include "server/head/paths.h"
#include "server/ranks/worker_files.h"

namespace lossd::ranks {

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

#endif  // LOSSD_SERVER_RANKS_FILE_JOB_H_
