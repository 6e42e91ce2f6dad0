// SPDX-License-Identifier: Apache-2.0
// Threads and memory of the CPU backend: a small fixed pool of threads that splits loops (ThreadPool), matrix
// products over its threads (Gemm), conversion between fp32 and the dtypes of hidden states and tensors
// (ToFloat, FromFloat), arrays carved out of one zeroed allocation (Arena), the count of what the backend has
// promised (MemoryAccounting), and retained hidden states (CpuRetained).
#ifndef LOSSD_KERNELS_CPU_PARALLEL_FOR_H_
#define LOSSD_KERNELS_CPU_PARALLEL_FOR_H_

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

// Memory of the CPU backend: arrays carved out of one zeroed allocation (Arena), the count of what the
// backend has promised (MemoryAccounting), and retained hidden states (CpuRetained).

inline constexpr int64_t kMemoryAlignment = 64;  // bytes: a cache line and the widest register
constexpr int64_t RoundUpToAlignment(int64_t bytes) {
  return (bytes + kMemoryAlignment - 1) / kMemoryAlignment * kMemoryAlignment;
}

// Frees what std::aligned_alloc gave.
struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};
using AlignedBytes = std::unique_ptr<uint8_t[], FreeDeleter>;

// `bytes` >= 0, aligned to 64, content unspecified. RESOURCE_EXHAUSTED if the system has no more.
absl::StatusOr<AlignedBytes> AllocateAligned(int64_t bytes);

// Arrays carved out of one zeroed allocation. The same code that takes the arrays also plans them: an arena
// without memory only counts, so a plan and the allocation made from it cannot differ. The arrays live as
// long as the arena. Thread-compatible.
class Arena {
 public:
  // Counts only; Take returns null.
  Arena() = default;
  // Holds `bytes` of zeroes. RESOURCE_EXHAUSTED if the system has no more.
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

// Counts the memory that a backend has promised, against a limit and against what the system still has.
// Thread-safe.
class MemoryAccounting {
 public:
  // Bytes counted until destruction, which must come before the accounting's.
  class Reservation {
   public:
    Reservation() = default;
    Reservation(Reservation&& other) noexcept;
    Reservation& operator=(Reservation&& other) noexcept;
    ~Reservation();

    const MemoryBytes& bytes() const { return bytes_; }
    // All of it has been written, so the system knows of it. To be called once.
    void MarkResident();

   private:
    friend class MemoryAccounting;
    Reservation(MemoryAccounting* accounting, const MemoryBytes& bytes)
        : accounting_(accounting), bytes_(bytes) {}

    MemoryAccounting* accounting_ = nullptr;
    MemoryBytes bytes_;
    int64_t pending_bytes_ = 0;  // that the system does not know of
  };

  // `limit` in bytes; 0: none. `reserve_bytes`: of what the system has, so much is left to others.
  explicit MemoryAccounting(int64_t limit, HostMemory host = HostMemory(), int64_t reserve_bytes = 0)
      : host_(std::move(host)), reserve_bytes_(reserve_bytes) {
    stats_.limit = limit;
  }

  // RESOURCE_EXHAUSTED, naming `what`, the bytes by kind, those in use and the limit, if the total would pass
  // the limit or what the system can give; then nothing is counted. `filled_at_once`: all of it is written
  // right away, which MarkResident reports; other memory is taken from the system as it is used.
  absl::StatusOr<Reservation> Reserve(absl::string_view what, const MemoryBytes& bytes,
                                      bool filled_at_once = false);
  // Whether Reserve would do that now, if `beside` were counted too; its error if not.
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
  int64_t pending_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // of stats_, promised and being filled
};

// Retained hidden states of the CPU backend: plain host memory. Thread-compatible.
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

#endif  // LOSSD_KERNELS_CPU_PARALLEL_FOR_H_
