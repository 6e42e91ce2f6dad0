// SPDX-License-Identifier: Apache-2.0
// Memory of the CPU backend: arrays carved out of one zeroed allocation (Arena), the count of what the
// backend has promised (MemoryAccounting), and retained hidden states (CpuRetained).
#ifndef LOSSD_KERNELS_CPU_MEMORY_H_
#define LOSSD_KERNELS_CPU_MEMORY_H_

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/host_memory.h"

namespace lossd::kernels {

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

#endif  // LOSSD_KERNELS_CPU_MEMORY_H_
