// SPDX-License-Identifier: Apache-2.0
// Opens what a fuzzer was given as a file, by a reader of the format.
#ifndef LOSSD_TESTS_FUZZ_OPEN_FILE_H_
#define LOSSD_TESTS_FUZZ_OPEN_FILE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/heap_watch.h"

namespace lossd::fuzz {

// Reader::Open of a file with these bytes; to open may take so much memory for each of them. The file is
// there until the next call.
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

}  // namespace lossd::fuzz

#endif  // LOSSD_TESTS_FUZZ_OPEN_FILE_H_
