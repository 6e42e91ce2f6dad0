// SPDX-License-Identifier: Apache-2.0
#include "server/app/heap.h"

#include <malloc.h>

namespace lossd::app {
namespace {

constexpr int kArenas = 8;
constexpr int kMappedBytes = 8 << 20;
constexpr int kKeptBytes = 8 << 20;  // at the end of each arena
constexpr size_t kFreeBytes = 16 << 20;

}  // namespace

void BoundFreedMemory() {
  mallopt(M_ARENA_MAX, kArenas);
  // Either of these also ends the adaptation.
  mallopt(M_MMAP_THRESHOLD, kMappedBytes);
  mallopt(M_TRIM_THRESHOLD, kKeptBytes);
}

void GiveBackFreedMemory() {
  if (mallinfo2().fordblks > kFreeBytes) malloc_trim(/*pad=*/0);
}

}  // namespace lossd::app
