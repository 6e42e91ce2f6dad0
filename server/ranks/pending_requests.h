// SPDX-License-Identifier: Apache-2.0
// The requests of one worker that have no answer yet, and what it says of them meanwhile.
//
// Thread-safe.
#ifndef LOSSD_SERVER_RANKS_PENDING_REQUESTS_H_
#define LOSSD_SERVER_RANKS_PENDING_REQUESTS_H_

#include <cstdint>
#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "lossd/ranks/v1/ranks.pb.h"

namespace lossd::ranks {

class PendingRequests {
 public:
  explicit PendingRequests(int rank) : rank_(rank) {}

  // A new one, to be awaited or forgotten once. Numbers count up from 1.
  uint64_t Add();
  // DEADLINE_EXCEEDED: the answer has not come, and may be awaited again. An error that the answer reports is
  // returned, or what the requests failed with.
  absl::StatusOr<v1::Answer> Await(uint64_t request, absl::Time deadline);
  // Nobody will ask for it any more.
  void Forget(uint64_t request);

  // What the worker has said last of a request that works on files.
  v1::FilesProgress Progress(uint64_t request) const;
  // Waits until it has said enough, or has answered, or all have failed. False at the deadline.
  bool AwaitProgress(uint64_t request, absl::FunctionRef<bool(const v1::FilesProgress&)> enough,
                     absl::Time deadline) const;
  // There is an answer that reports an error, or all have failed.
  bool HasFailed(uint64_t request) const;

  // INTERNAL if there is no such request.
  absl::Status OnAnswer(v1::Answer& answer);
  absl::Status OnProgress(v1::FilesProgress& progress);
  // The worker is lost: from now on everything fails so.
  void Fail(const absl::Status& status);

 private:
  struct Pending {
    bool done = false;
    bool forgotten = false;
    v1::Answer answer;
    v1::FilesProgress progress;
  };

  const int rank_;
  mutable absl::Mutex mutex_;
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<uint64_t, Pending> pending_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_PENDING_REQUESTS_H_
