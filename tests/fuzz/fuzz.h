// SPDX-License-Identifier: Apache-2.0
// What the fuzzers share: a check that ends the program, and files in memory for code that opens files by
// path.
//
// A fuzzer is a function LLVMFuzzerTestOneInput that libFuzzer calls with ever new bytes. It must not depend
// on earlier inputs. CONTRIBUTING.md says how to add one, run it and reproduce a finding.
#ifndef LOSSD_TESTS_FUZZ_FUZZ_H_
#define LOSSD_TESTS_FUZZ_FUZZ_H_

#include <sys/mman.h>
#include <unistd.h>

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

// Ends the program, which libFuzzer reports with the input, unless the property holds. `message`: a string.
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

// An OutputFile that appends to a string, which outlives it.
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

}  // namespace lossd::fuzz

#endif  // LOSSD_TESTS_FUZZ_FUZZ_H_
