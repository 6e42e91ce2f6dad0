// SPDX-License-Identifier: Apache-2.0
// The operations on files that saving and removing checkpoints consist of. Tests replace them, to have any
// single one fail or be the last before a crash.
//
// Thread-safe. Errors as in proto/tensorfile/file.h.
#ifndef LOSSD_SERVER_HEAD_DISK_H_
#define LOSSD_SERVER_HEAD_DISK_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/tensorfile/file.h"

namespace lossd::head {

class Disk {
 public:
  // The operating system's.
  static Disk* Real();
  virtual ~Disk() = default;

  // ALREADY_EXISTS if there is such a file or folder.
  virtual absl::StatusOr<std::unique_ptr<formats::OutputFile>> CreateFile(const std::string& path);
  // The same for a large file, which does not pass through the page cache if the file system allows that.
  virtual absl::StatusOr<std::unique_ptr<formats::OutputFile>> CreateLargeFile(const std::string& path);
  virtual absl::Status CreateFolder(const std::string& path);
  // Brings the names in a folder to the disk.
  virtual absl::Status SyncFolder(const std::string& path);
  // ALREADY_EXISTS if there is something at `to`; nothing is ever replaced.
  virtual absl::Status Rename(const std::string& from, const std::string& to);
  virtual absl::Status RemoveFile(const std::string& path);
  // INTERNAL if it is not empty.
  virtual absl::Status RemoveFolder(const std::string& path);
};

// Removes a folder with everything in it, following no links; stops at the first error.
absl::Status RemoveTree(Disk* disk, const std::string& folder);

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_DISK_H_
