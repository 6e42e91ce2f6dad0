// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/parallel_for.h"

#include <algorithm>

namespace lossd::kernels {

ThreadPool::ThreadPool(int threads) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { Work(i); });
}

ThreadPool::~ThreadPool() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::ParallelFor(int64_t n, int64_t grain, absl::FunctionRef<void(int64_t, int64_t)> body) {
  if (n <= 0) return;
  const int64_t even = (n + threads() - 1) / threads();
  const Loop loop{n, std::max({even, grain, int64_t{1}}), &body};
  if (loop.part >= n) {
    body(0, n);
    return;
  }
  {
    absl::MutexLock lock(&mutex_);
    loop_ = loop;
    busy_ = static_cast<int>(workers_.size());
    ++generation_;
  }
  RunPart(loop, 0);
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(
      +[](int* busy) { return *busy == 0; }, &busy_));
}

void ThreadPool::RunPart(const Loop& loop, int index) {
  const int64_t begin = loop.part * index;
  if (begin < loop.n) (*loop.body)(begin, std::min(loop.n, begin + loop.part));
}

void ThreadPool::Work(int index) {
  uint64_t seen = 0;
  while (true) {
    Loop loop;
    {
      absl::MutexLock lock(&mutex_);
      const auto ready = [this, &seen]()
                             ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return stopping_ || generation_ != seen; };
      mutex_.Await(absl::Condition(&ready));
      if (stopping_) return;
      seen = generation_;
      loop = loop_;
    }
    RunPart(loop, index);
    absl::MutexLock lock(&mutex_);
    --busy_;
  }
}

}  // namespace lossd::kernels
