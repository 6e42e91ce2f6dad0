// Counts the memory that a backend has promised, against a limit.
#ifndef LOSSD_KERNELS_CPU_ACCOUNTING_H_
#define LOSSD_KERNELS_CPU_ACCOUNTING_H_

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
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

   private:
    friend class MemoryAccounting;
    Reservation(MemoryAccounting* accounting, const MemoryBytes& bytes)
        : accounting_(accounting), bytes_(bytes) {}

    MemoryAccounting* accounting_ = nullptr;
    MemoryBytes bytes_;
  };

  // `limit` in bytes; 0: none.
  explicit MemoryAccounting(int64_t limit) { stats_.limit = limit; }

  // RESOURCE_EXHAUSTED, naming `what`, the bytes by kind, those in use and the limit, if the total would pass
  // the limit; then nothing is counted.
  absl::StatusOr<Reservation> Reserve(absl::string_view what, const MemoryBytes& bytes);
  MemoryStats stats() const;

 private:
  void Release(const MemoryBytes& bytes);

  mutable absl::Mutex mutex_;
  MemoryStats stats_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_ACCOUNTING_H_
