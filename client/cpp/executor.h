// SPDX-License-Identifier: Apache-2.0
// Runs tasks one after another, now or at a time: the steps of asynchronous calls and the callbacks of the
// client's users. It has a thread of its own, so that gRPC's few threads never wait for either.
//
// Thread-safe. Tasks may post tasks. Tasks must not destroy the executor.
#ifndef LOSSD_CLIENT_CPP_EXECUTOR_H_
#define LOSSD_CLIENT_CPP_EXECUTOR_H_

#include <cstdint>
#include <map>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace lossd::client::internal {

class Executor {
 public:
  using Task = absl::AnyInvocable<void()>;

  Executor();
  // Runs the tasks that are due and drops those that are not.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  void Post(Task task) { PostAt(absl::InfinitePast(), std::move(task)); }
  // Runs `task` on this thread if no task runs and none is due, since waking the other thread takes longer
  // than a short task; posts it otherwise. The task is to take microseconds and must not call users back.
  void RunOrPost(Task task) ABSL_LOCKS_EXCLUDED(mu_);
  // Runs `task` at or after `when`; tasks of the same time run in the order they were posted.
  void PostAt(absl::Time when, Task task);

 private:
  using Key = std::pair<absl::Time, uint64_t>;  // when, order of posting

  void Run();
  bool Ready() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  absl::Mutex mu_;
  std::map<Key, Task> tasks_ ABSL_GUARDED_BY(mu_);
  uint64_t posted_ ABSL_GUARDED_BY(mu_) = 0;
  bool elsewhere_ ABSL_GUARDED_BY(mu_) = false;  // a task runs on another thread, by RunOrPost
  bool running_ ABSL_GUARDED_BY(mu_) = false;    // a task runs on thread_
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_EXECUTOR_H_
