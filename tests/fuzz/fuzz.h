// SPDX-License-Identifier: Apache-2.0
// Helpers of all fuzzers: a check that ends the program (FUZZ_CHECK), files in memory for code that opens
// files by path (MemoryFile), a limit on the memory that reading takes (HeapWatch), and deeply nested JSON.
//
// A fuzzer is a function LLVMFuzzerTestOneInput that libFuzzer calls with ever new bytes. It must not depend
// on earlier inputs. CONTRIBUTING.md says how to add one, run it and reproduce a finding.
#ifndef LOSSD_TESTS_FUZZ_FUZZ_H_
#define LOSSD_TESTS_FUZZ_FUZZ_H_

#include <sanitizer/allocator_interface.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "proto/tensorfile/file.h"

// Ends the program unless the property holds; libFuzzer then reports the input. `message` is a string.
#define FUZZ_CHECK(property, message)                                                                     \
  do {                                                                                                    \
    if (!(property)) ::lossd::fuzz::Fail(__FILE__, __LINE__, #property, ::absl::StrCat(message).c_str()); \
  } while (false)

namespace lossd::fuzz {

[[noreturn]] inline void Fail(const char* file, int line, const char* property, const char* message) {
  std::fprintf(stderr, "%s:%d: does not hold: %s\n%s\n", file, line, property, message);
  std::abort();
}

inline absl::string_view AsText(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

// A regular file in memory. Thread-compatible.
class MemoryFile {
 public:
  MemoryFile() : descriptor_(memfd_create("fuzz", MFD_CLOEXEC)) {
    FUZZ_CHECK(descriptor_ >= 0, "memfd_create");
  }
  ~MemoryFile() { close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  std::string path() const { return absl::StrCat("/proc/self/fd/", descriptor_); }

  // Replaces the content.
  void Write(absl::string_view content) {
    FUZZ_CHECK(ftruncate(descriptor_, 0) == 0, "ftruncate");
    const ssize_t written = pwrite(descriptor_, content.data(), content.size(), 0);
    FUZZ_CHECK(written == static_cast<ssize_t>(content.size()), "pwrite");
  }

 private:
  const int descriptor_;
};

// An OutputFile that appends to a string. The string must outlive it.
class StringFile final : public formats::OutputFile {
 public:
  explicit StringFile(std::string* content) : content_(content) {}

  absl::Status Append(absl::Span<const uint8_t> bytes) override {
    content_->append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    return absl::OkStatus();
  }
  absl::Status Sync() override { return absl::OkStatus(); }
  absl::Status Close() override { return absl::OkStatus(); }

 private:
  std::string* const content_;
};

inline formats::OutputFileFactory Into(std::string* content) {
  return [content](const std::string&) -> absl::StatusOr<std::unique_ptr<formats::OutputFile>> {
    return std::make_unique<StringFile>(content);
  };
}

// Counts what this thread allocates from the construction on, and the most memory that it holds at one time.
// Reading a file of n bytes must not take a large multiple of n. At most one HeapWatch at a time.
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

  // Checks that the peak is at most `per_byte` bytes for each byte of input, plus a fixed amount.
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

// Calls Reader::Open for a file with these bytes. Opening may take `memory_per_byte` bytes of memory for each
// of them. The file exists until the next call.
template <typename Reader>
auto OpenFile(const uint8_t* data, size_t size, int64_t memory_per_byte) {
  static MemoryFile file;
  file.Write(AsText(data, size));
  const std::string path = file.path();
  const HeapWatch heap;
  auto reader = Reader::Open(path);
  heap.Check(size, memory_per_byte);
  return reader;
}

struct Nesting {
  int depth = 0;
  size_t at = 0;  // the place after the bracket that opens the innermost array
};

// Finds the array that is nested deepest in arrays and objects of a JSON text. Brackets in strings do not
// count. A fuzzer nests more arrays in it, so that code that recurses without a limit runs out of stack;
// random changes rarely reach such a depth.
inline Nesting DeepestArray(absl::string_view text) {
  Nesting deepest;
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string && c == '\\') {
      ++i;  // skips the escaped character
      continue;
    }
    if (c == '"') in_string = !in_string;
    if (in_string) continue;
    if (c == '[' || c == '{') ++depth;
    if (c == ']' || c == '}') --depth;
    if (c == '[' && depth > deepest.depth) deepest = {.depth = depth, .at = i + 1};
  }
  return deepest;
}

// `text` with 100,000 nested arrays added in the deepest array.
inline std::string Deepened(absl::string_view text, const Nesting& deepest) {
  constexpr size_t kLevels = 100'000;
  const absl::string_view rest = text.substr(deepest.at);
  const bool last = !rest.empty() && rest[0] == ']';
  return absl::StrCat(text.substr(0, deepest.at), std::string(kLevels, '['), std::string(kLevels, ']'),
                      last ? "" : ",", rest);
}

}  // namespace lossd::fuzz

#endif  // LOSSD_TESTS_FUZZ_FUZZ_H_
