// SPDX-License-Identifier: Apache-2.0
// The driving thread of one member of a group, which its backend and its heads are called on. So members that
// compute while they are called, as CPUs do, work at the same time.
//
// Thread-safe.
#ifndef LOSSD_KERNELS_GROUP_MEMBER_THREAD_H_
#define LOSSD_KERNELS_GROUP_MEMBER_THREAD_H_

#include <cstdint>
#include <deque>
#include <optional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"
#include "kernels/busy_clock.h"

namespace lossd::kernels {

// What a member has done, since its thread started.
struct MemberWork {
  int64_t chunks = 0;   // or parts of them, computed without an error
  int64_t rows = 0;     // of these, those without a target included
  absl::Duration busy;  // there was a chunk to compute, or something else to do
};

class MemberThread {
 public:
  using Task = absl::AnyInvocable<void()>;

  // `max_chunks`: that the member takes at a time.
  MemberThread(int index, int max_chunks);
  // Runs what was posted, then ends.
  ~MemberThread();
  MemberThread(const MemberThread&) = delete;
  MemberThread& operator=(const MemberThread&) = delete;

  // Tasks run one after the other, in the order of their posting.
  void Post(Task task);

  // Called by a task: waits until the member takes another chunk. Chunks end without this thread's help.
  void StartChunk();
  // `rows`: that it had, or none if it has failed.
  void EndChunk(std::optional<int64_t> rows);

  MemberWork work() const;

 private:
  void Run(int index);

  const int max_chunks_;
  BusyClock busy_;
  mutable absl::Mutex mutex_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  int chunks_ ABSL_GUARDED_BY(mutex_) = 0;  // that have started and not ended
  int64_t chunks_done_ ABSL_GUARDED_BY(mutex_) = 0, rows_done_ ABSL_GUARDED_BY(mutex_) = 0;
  std::thread thread_;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_GROUP_MEMBER_THREAD_H_
