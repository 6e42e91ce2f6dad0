// SPDX-License-Identifier: Apache-2.0
// Threads and memory of the CPU backend:
// - ThreadPool: a small fixed pool of threads that splits loops.
// - Gemm, AddColumnSums: matrix products and column sums over the threads of a pool.
// - ToFloat, FromFloat: conversion between fp32 and the dtypes of hidden states and tensors.
// - Arena: arrays carved out of one zeroed allocation.
// - MemoryAccounting: the count of the memory that the backend has promised.
// - CpuRetained: retained hidden states.
#ifndef LOSSD_KERNELS_CPU_THREADS_AND_MEMORY_H_
#define LOSSD_KERNELS_CPU_THREADS_AND_MEMORY_H_

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/head_config.h"
#include "kernels/host_memory.h"

namespace lossd::kernels {

// The grain of loops over the elements of tensors: the number of elements for which a thread is worth waking,
// if each element takes a few operations.
inline constexpr int64_t kElementGrain = int64_t{1} << 15;

// The floats of a block of a sum over several parts. A thread adds up the block of each part, in the order of
// the parts, in an array of its own.
inline constexpr int64_t kSumBlock = 4096;

// A small fixed pool of threads. One thread at a time calls it, and takes part in the work. Allocates nothing
// after construction.
class ThreadPool {
 public:
  // `threads` >= 1 includes the calling thread.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(begin, end) on disjoint ranges that cover [0, n), at most one range on each thread, and
  // returns when all calls have returned. Each range except the last has at least `grain` elements. The split
  // depends only on n, grain and threads(). `body` must not call ParallelFor.
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
  // The number of loops so far. It lets a worker run each loop once.
  uint64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;
  int busy_ ABSL_GUARDED_BY(mutex_) = 0;  // workers that have not finished the current loop
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  std::vector<std::thread> workers_;
};

// Matrix products and column sums over the pool's threads. Call them as ThreadPool::ParallelFor.
//
// Each thread of the pool makes its own call of OpenBLAS. So there is one set of threads, which one option
// bounds, and the split depends only on the shape. OpenBLAS's own threads must be turned off
// (UseSingleThreadedBlas).

// Turns OpenBLAS's own threads off for the whole process.
void UseSingleThreadedBlas();

// A row-major matrix, or its transpose.
struct GemmOperand {
  const float* data;
  int64_t stride;  // elements from one stored row to the next
  bool transposed = false;
};

// c [m, n] = alpha * a [m, k] * b [k, n] + beta * c. c is row-major, with `stride` elements from one row to
// the next. m, n and k are < 2^31 and may be 0; with k = 0 the product is 0.
void Gemm(ThreadPool& pool, int64_t m, int64_t n, int64_t k, float alpha, GemmOperand a, GemmOperand b,
          float beta, float* c, int64_t stride);

// sums [cols] += sum over the rows of a [rows, cols], or of the elementwise product a * b if b [rows, cols]
// is not null. A call adds in double.
void AddColumnSums(ThreadPool& pool, const float* a, const float* b, int64_t rows, int64_t cols, float* sums);

// Conversion between fp32 and the dtypes of hidden states and tensors. Conversion to 16 bits rounds to
// nearest even; values that are too large become infinite, and NaN stays NaN. Stateless and thread-safe. The
// loops have no branches, so that compilers vectorize them.

// Converts `from` [n] in `dtype`, with any alignment, to fp32.
void ToFloat(DType dtype, const void* from, int64_t n, float* to);
// Converts fp32 to `to` [n] in `dtype`, with any alignment.
void FromFloat(DType dtype, const float* from, int64_t n, void* to);

// to[i] += scale * from[i], where product and sum are each rounded to fp32. `from` [n] as in ToFloat.
void AddScaled(DType dtype, const void* from, int64_t n, float scale, float* to);

// Memory of the CPU backend: Arena, MemoryAccounting and CpuRetained.

inline constexpr int64_t kMemoryAlignment = 64;  // bytes: a cache line and the widest register
constexpr int64_t RoundUpToAlignment(int64_t bytes) {
  return (bytes + kMemoryAlignment - 1) / kMemoryAlignment * kMemoryAlignment;
}

// Frees memory of std::aligned_alloc.
struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};
using AlignedBytes = std::unique_ptr<uint8_t[], FreeDeleter>;

// Allocates `bytes` >= 0 bytes, aligned to 64, with unspecified content. RESOURCE_EXHAUSTED if the system has
// no more memory.
absl::StatusOr<AlignedBytes> AllocateAligned(int64_t bytes);

// Arrays carved out of one zeroed allocation. The same code plans the arrays and takes them: an arena without
// memory only counts the bytes, so plan and allocation cannot differ. The arrays live as long as the arena.
// Thread-compatible.
class Arena {
 public:
  // An arena without memory. It only counts, and Take returns null.
  Arena() = default;
  // Allocates `bytes` of zeros. RESOURCE_EXHAUSTED if the system has no more memory.
  static absl::StatusOr<Arena> Allocate(int64_t bytes);

  // The next `n` elements, aligned to 64. T must be trivial.
  template <typename T>
  T* Take(int64_t n) {
    uint8_t* const begin = memory_ == nullptr ? nullptr : memory_.get() + used_;
    const int64_t bytes = n * static_cast<int64_t>(sizeof(T));
    used_ += RoundUpToAlignment(bytes);
    return reinterpret_cast<T*>(begin);
  }

  // Bytes taken so far.
  int64_t used() const { return used_; }

 private:
  AlignedBytes memory_;
  int64_t used_ = 0;
};

// Counts the memory that a backend has promised to heads and buffers, and refuses more than a limit or than
// the system still has. Thread-safe.
class MemoryAccounting {
 public:
  // Bytes that are counted until the object is destroyed. Destroy it before the accounting.
  class Reservation {
   public:
    Reservation() = default;
    Reservation(Reservation&& other) noexcept;
    Reservation& operator=(Reservation&& other) noexcept;
    ~Reservation();

    const MemoryBytes& bytes() const { return bytes_; }
    // Call once, when all of the memory has been written: the system then counts it as used.
    void MarkResident();

   private:
    friend class MemoryAccounting;
    Reservation(MemoryAccounting* accounting, const MemoryBytes& bytes)
        : accounting_(accounting), bytes_(bytes) {}

    MemoryAccounting* accounting_ = nullptr;
    MemoryBytes bytes_;
    int64_t pending_bytes_ = 0;  // bytes that the system does not count as used yet
  };

  // `limit` in bytes; 0: no limit. `reserve_bytes`: memory of the system that is left to other programs.
  explicit MemoryAccounting(int64_t limit, HostMemory host = HostMemory(), int64_t reserve_bytes = 0)
      : host_(std::move(host)), reserve_bytes_(reserve_bytes) {
    stats_.limit = limit;
  }

  // Counts the bytes. RESOURCE_EXHAUSTED, naming `what`, the bytes by kind, the bytes in use and the limit,
  // if the total would exceed the limit or the system's available memory; then nothing is counted.
  // `filled_at_once`: the caller writes all of the memory right away, and then calls MarkResident. Other
  // memory is taken from the system only as it is used.
  absl::StatusOr<Reservation> Reserve(absl::string_view what, const MemoryBytes& bytes,
                                      bool filled_at_once = false);
  // OK if Reserve would succeed now with `beside` already counted; otherwise the error of Reserve.
  absl::Status Check(absl::string_view what, const MemoryBytes& bytes, const MemoryBytes& beside) const;
  MemoryStats stats() const;

 private:
  absl::Status CheckLocked(absl::string_view what, const MemoryBytes& bytes, int64_t beside) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Release(const MemoryBytes& bytes, int64_t pending_bytes);
  void MarkResident(int64_t bytes);
  absl::Status CheckHost(absl::string_view what, const MemoryBytes& bytes, int64_t beside) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const HostMemory host_;
  const int64_t reserve_bytes_;
  mutable absl::Mutex mutex_;
  MemoryStats stats_ ABSL_GUARDED_BY(mutex_);
  int64_t pending_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // the part of stats_ that is promised and being filled
};

// Memory for retained hidden states of the CPU backend. It is plain host memory. Thread-compatible.
class CpuRetained final : public RetainedMemory {
 public:
  CpuRetained(AlignedBytes memory, int64_t bytes, MemoryAccounting::Reservation reservation)
      : reservation_(std::move(reservation)), memory_(std::move(memory)), bytes_(bytes) {}

  int64_t size() const override { return bytes_; }
  absl::Status ReadBytes(int64_t offset, absl::Span<uint8_t> out) const override {
    std::copy_n(memory_.get() + offset, out.size(), out.data());
    return absl::OkStatus();
  }
  absl::Status WriteBytes(int64_t offset, absl::Span<const uint8_t> in) override {
    std::copy_n(in.data(), in.size(), memory_.get() + offset);
    return absl::OkStatus();
  }
  uint8_t* data() { return memory_.get(); }

 private:
  const MemoryAccounting::Reservation reservation_;
  const AlignedBytes memory_;
  const int64_t bytes_;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_THREADS_AND_MEMORY_H_
