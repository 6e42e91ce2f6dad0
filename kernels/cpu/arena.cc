// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/arena.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/errors/bytes.h"

namespace lossd::kernels {

absl::StatusOr<AlignedBytes> AllocateAligned(int64_t bytes) {
  const auto size = static_cast<size_t>(RoundUpToAlignment(std::max<int64_t>(bytes, 1)));
  AlignedBytes memory(static_cast<uint8_t*>(std::aligned_alloc(kMemoryAlignment, size)));
  if (memory == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the system has no ", errors::ExactBytes(bytes), " of memory left"));
  }
  return memory;
}

absl::StatusOr<Arena> Arena::Allocate(int64_t bytes) {
  absl::StatusOr<AlignedBytes> memory = AllocateAligned(bytes);
  if (!memory.ok()) return memory.status();
  std::memset(memory->get(), 0, static_cast<size_t>(bytes));
  Arena arena;
  arena.memory_ = *std::move(memory);
  return arena;
}

}  // namespace lossd::kernels
