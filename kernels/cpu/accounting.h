// SPDX-License-Identifier: Apache-2.0
// Counts the memory that a backend has promised, against a limit and against what the system still has.
#ifndef LOSSD_KERNELS_CPU_ACCOUNTING_H_
#define LOSSD_KERNELS_CPU_ACCOUNTING_H_

#include <cstdint>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "kernels/host_memory.h"
#include "kernels/memory.h"

namespace lossd::kernels {

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

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_ACCOUNTING_H_
