// SPDX-License-Identifier: Apache-2.0
// Arrays carved out of one zeroed allocation. The same code that takes the arrays also plans them: an arena
// without memory only counts, so a plan and the allocation made from it cannot differ.
#ifndef LOSSD_KERNELS_CPU_ARENA_H_
#define LOSSD_KERNELS_CPU_ARENA_H_

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "absl/status/statusor.h"

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

// Thread-compatible. The arrays live as long as the arena.
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

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_ARENA_H_
