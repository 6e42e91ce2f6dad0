// SPDX-License-Identifier: Apache-2.0
// Loops over arrays of fp32 on several threads: a small fixed pool of threads that splits loops (ThreadPool),
// matrix products over its threads (Gemm), and conversion between fp32 and the dtypes of hidden states and
// tensors (ToFloat, FromFloat).
#ifndef LOSSD_KERNELS_CPU_PARALLEL_FOR_H_
#define LOSSD_KERNELS_CPU_PARALLEL_FOR_H_

#include <cstdint>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"
#include "kernels/head_config.h"

namespace lossd::kernels {

// Elements of tensors that are worth a thread: the grain of loops over them, in which every element takes a
// few operations.
inline constexpr int64_t kElementGrain = int64_t{1} << 15;

// Floats of a block that a thread adds up in an array of its own, from all parts of a sum one after the
// other.
inline constexpr int64_t kSumBlock = 4096;

// A small fixed pool of threads. Driven by one thread at a time, which takes part in the work. Allocates
// nothing after construction.
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

// Matrix products and column sums over the pool's threads, driven as the pool.
//
// OpenBLAS runs inside the pool's threads, one call each: one set of threads bounded by one option, and a
// split that depends on the shape alone. That needs OpenBLAS's own threads off (UseSingleThreadedBlas).

// Turns OpenBLAS's own threads off for the whole process.
void UseSingleThreadedBlas();

// A row-major matrix, or its transpose.
struct GemmOperand {
  const float* data;
  int64_t stride;  // elements from one stored row to the next
  bool transposed = false;
};

// c [m, n] (row-major, `stride` apart) = alpha * a [m, k] * b [k, n] + beta * c. m, n, k < 2^31, and may be
// 0: a product over no k is 0.
void Gemm(ThreadPool& pool, int64_t m, int64_t n, int64_t k, float alpha, GemmOperand a, GemmOperand b,
          float beta, float* c, int64_t stride);

// sums [cols] += sum over rows of a, or of a * b elementwise if b is not null; [rows, cols] each. In double
// within a call.
void AddColumnSums(ThreadPool& pool, const float* a, const float* b, int64_t rows, int64_t cols, float* sums);

// Conversion between fp32 and the dtypes of hidden states and tensors. To 16 bits: round to nearest even;
// what is too large becomes infinite, NaN stays NaN. Stateless and thread-safe. The loops have no branches
// and vectorise.

// `from` [n] in `dtype`, of any alignment, to fp32.
void ToFloat(DType dtype, const void* from, int64_t n, float* to);
// fp32 to `to` [n] in `dtype`, of any alignment.
void FromFloat(DType dtype, const float* from, int64_t n, void* to);

// to[i] += scale * from[i], the product and the sum each rounded to fp32; `from` [n] as in ToFloat.
void AddScaled(DType dtype, const void* from, int64_t n, float scale, float* to);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_PARALLEL_FOR_H_
