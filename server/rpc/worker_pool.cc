// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/worker_pool.h"

#include <utility>

namespace lossd::rpc {

WorkerPool::WorkerPool(int threads, size_t max_queued_tasks) : max_queued_tasks_(max_queued_tasks) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
}

bool WorkerPool::Schedule(Task task) {
  absl::MutexLock lock(&mutex_);
  if (stopped_ || tasks_.size() >= max_queued_tasks_) return false;
  tasks_.push_back(std::move(task));
  return true;
}

void WorkerPool::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stopped_ = true;
  }
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

void WorkerPool::Run() {
  while (true) {
    Task task;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &WorkerPool::HasWork));
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

}  // namespace lossd::rpc
