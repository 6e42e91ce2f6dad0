// SPDX-License-Identifier: Apache-2.0
// A fixed number of threads that run what must not run on gRPC's callback threads or on the engine's:
// calls that block, and writes to the transport.
//
// Thread-safe.
#ifndef LOSSD_SERVER_RPC_WORKER_POOL_H_
#define LOSSD_SERVER_RPC_WORKER_POOL_H_

#include <cstddef>
#include <deque>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"

namespace lossd::rpc {

class WorkerPool {
 public:
  using Task = absl::AnyInvocable<void()>;

  WorkerPool(int threads, size_t max_queued_tasks);
  // Runs what is queued, then joins.
  ~WorkerPool() { Stop(); }
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Runs `task` on one of the threads, in order of submission. False, without running it, if the queue
  // is full or the pool has stopped.
  bool Schedule(Task task) ABSL_LOCKS_EXCLUDED(mutex_);
  // Takes no more tasks, runs what is queued and joins.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopped_ || !tasks_.empty(); }
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);

  const size_t max_queued_tasks_;
  absl::Mutex mutex_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_WORKER_POOL_H_
