// SPDX-License-Identifier: Apache-2.0
// The work of a worker on files of checkpoints: it writes the files of its classes, and reads what its part
// of a head needs, below its own checkpoint directory. Names come from the leader and are checked here; the
// worker makes files in a temporary folder only, under names that it makes itself.
//
// Each request has a thread, and goes between it and the device's: the driving thread reads and writes
// tensors a slice at a time, between chunks. Thread-safe.
#ifndef LOSSD_SERVER_RANKS_WORKER_FILES_H_
#define LOSSD_SERVER_RANKS_WORKER_FILES_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
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
#include "server/head/disk.h"

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

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_WORKER_FILES_H_
