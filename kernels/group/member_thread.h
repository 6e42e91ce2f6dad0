// SPDX-License-Identifier: Apache-2.0
// The driving thread of one member of a group, which its backend and its heads are called on. So members that
// compute while they are called, as CPUs do, work at the same time.
//
// Thread-safe.
#ifndef LOSSD_KERNELS_GROUP_MEMBER_THREAD_H_
#define LOSSD_KERNELS_GROUP_MEMBER_THREAD_H_

#include <deque>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"

namespace lossd::kernels {

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
  void EndChunk();

 private:
  void Run(int index);

  const int max_chunks_;
  absl::Mutex mutex_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  int chunks_ ABSL_GUARDED_BY(mutex_) = 0;
  std::thread thread_;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_GROUP_MEMBER_THREAD_H_
