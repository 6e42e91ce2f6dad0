#include "server/app/heap.h"

#include <malloc.h>

namespace lossd::app {

void BoundFreedMemory() {
  // Either call also ends the adaptation.
  constexpr int kMappedBytes = 8 << 20;
  constexpr int kKeptBytes = 32 << 20;
  mallopt(M_MMAP_THRESHOLD, kMappedBytes);
  mallopt(M_TRIM_THRESHOLD, kKeptBytes);
}

void GiveBackFreedMemory() {
  constexpr size_t kFreeBytes = size_t{64} << 20;
  if (mallinfo2().fordblks > kFreeBytes) malloc_trim(/*pad=*/0);
}

}  // namespace lossd::app
