// SPDX-License-Identifier: Apache-2.0
// How much memory a piece of code holds at most: a file of n bytes must not take a large multiple of n to
// read.
#ifndef LOSSD_TESTS_FUZZ_HEAP_WATCH_H_
#define LOSSD_TESTS_FUZZ_HEAP_WATCH_H_

#include <sanitizer/allocator_interface.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "tests/fuzz/fuzz.h"

namespace lossd::fuzz {

// Counts what this thread allocates from construction on. One at a time.
class HeapWatch {
 public:
  HeapWatch() {
    static const int installed = __sanitizer_install_malloc_and_free_hooks(&OnAllocate, &OnFree);
    FUZZ_CHECK(installed != 0, "the allocator takes no hooks");
    live_ = peak_ = 0;
    counting_ = true;
  }
  ~HeapWatch() { counting_ = false; }
  HeapWatch(const HeapWatch&) = delete;
  HeapWatch& operator=(const HeapWatch&) = delete;

  int64_t peak_bytes() const { return peak_; }

  // `per_byte` bytes for each byte of the input, and some for what does not depend on it.
  void Check(size_t input_bytes, int64_t per_byte) const {
    constexpr int64_t kFixedBytes = int64_t{96} << 10;
    FUZZ_CHECK(peak_ <= kFixedBytes + per_byte * static_cast<int64_t>(input_bytes),
               absl::StrCat(input_bytes, " bytes of input took ", peak_, " bytes of memory"));
  }

 private:
  static void OnAllocate(const volatile void*, size_t size) {
    if (!counting_) return;
    live_ += static_cast<int64_t>(size);
    peak_ = std::max(peak_, live_);
  }
  static void OnFree(const volatile void* memory) {
    if (!counting_ || memory == nullptr) return;
    live_ -= static_cast<int64_t>(__sanitizer_get_allocated_size(const_cast<const void*>(memory)));
  }

  static inline thread_local bool counting_ = false;
  static inline thread_local int64_t live_ = 0;
  static inline thread_local int64_t peak_ = 0;
};

}  // namespace lossd::fuzz

#endif  // LOSSD_TESTS_FUZZ_HEAP_WATCH_H_
