// SPDX-License-Identifier: Apache-2.0
// A small fixed pool of threads that splits loops.
#ifndef LOSSD_KERNELS_CPU_PARALLEL_FOR_H_
#define LOSSD_KERNELS_CPU_PARALLEL_FOR_H_

#include <cstdint>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"

namespace lossd::kernels {

// Elements of tensors that are worth a thread: the grain of loops over them, in which every element takes a
// few operations.
inline constexpr int64_t kElementGrain = int64_t{1} << 15;

// Floats of a block that a thread adds up in an array of its own, from all parts of a sum one after the
// other.
inline constexpr int64_t kSumBlock = 4096;

// Driven by one thread at a time, which takes part in the work. Allocates nothing after construction.
class ThreadPool {
 public:
  // `threads` >= 1 counts the driving thread.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(begin, end) on disjoint ranges that cover [0, n), each at least `grain` long (but for the
  // last) and at most one a thread; returns when all have. The split depends on n, grain and threads() alone.
  // `body` must not call ParallelFor.
  void ParallelFor(int64_t n, int64_t grain, absl::FunctionRef<void(int64_t begin, int64_t end)> body);

 private:
  struct Loop {
    int64_t n = 0;
    int64_t part = 0;  // length of each range
    const absl::FunctionRef<void(int64_t, int64_t)>* body = nullptr;
  };

  void Work(int index);
  static void RunPart(const Loop& loop, int index);

  absl::Mutex mutex_;
  Loop loop_ ABSL_GUARDED_BY(mutex_);
  uint64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;  // counts loops, so that a worker runs each once
  int busy_ ABSL_GUARDED_BY(mutex_) = 0;             // workers that have not finished the current loop
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  std::vector<std::thread> workers_;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_PARALLEL_FOR_H_
