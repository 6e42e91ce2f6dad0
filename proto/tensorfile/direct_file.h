// SPDX-License-Identifier: Apache-2.0
// Large files that go to the disk without passing through the page cache (O_DIRECT): a copy less, no memory
// of the system's for what is not read again soon, and nothing left to write back when the file is synced.
//
// Where a file system has no direct writes the file is written as CreateOutputFile does. Errors as in file.h.
#ifndef LOSSD_PROTO_TENSORFILE_DIRECT_FILE_H_
#define LOSSD_PROTO_TENSORFILE_DIRECT_FILE_H_

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "proto/tensorfile/file.h"

namespace lossd::formats {

// Memory, places in the file and numbers of bytes have to be multiples of this. Bytes that lie so, and come
// at such a place of the file, are written from where they are; others are copied first.
inline constexpr int64_t kDirectAlignment = 4096;
// What a file that is being written takes for these copies.
inline constexpr int64_t kDirectBufferBytes = int64_t{4} << 20;

struct FreeAligned {
  void operator()(uint8_t* memory) const { std::free(memory); }
};
using AlignedBuffer = std::unique_ptr<uint8_t[], FreeAligned>;

// At least `bytes` bytes without initial values, aligned to kDirectAlignment. Pages come into being as they
// are filled, large ones where the system has them.
AlignedBuffer AllocateAligned(int64_t bytes);

// Makes a file that did not exist. What was appended last may be in memory until Sync or Close.
absl::StatusOr<std::unique_ptr<OutputFile>> CreateDirectFile(const std::string& path);

}  // namespace lossd::formats

#endif  // LOSSD_PROTO_TENSORFILE_DIRECT_FILE_H_
