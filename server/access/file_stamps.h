// SPDX-License-Identifier: Apache-2.0
// By what a change of a file is noticed, without reading it.
//
// Stateless and thread-safe.
#ifndef LOSSD_SERVER_ACCESS_FILE_STAMPS_H_
#define LOSSD_SERVER_ACCESS_FILE_STAMPS_H_

#include <cstdint>
#include <string>
#include <vector>

namespace lossd::access {

// Device, inode, size, and times of content and of inode in nanoseconds; zeros for a file that is not there.
struct FileStamp {
  uint64_t device = 0;
  uint64_t inode = 0;
  int64_t size = 0;
  int64_t modified = 0;
  int64_t changed = 0;
  friend bool operator==(const FileStamp&, const FileStamp&) = default;
};
using FileStamps = std::vector<FileStamp>;

FileStamps StampsOf(const std::vector<std::string>& paths);

}  // namespace lossd::access

#endif  // LOSSD_SERVER_ACCESS_FILE_STAMPS_H_
