// SPDX-License-Identifier: Apache-2.0
// A lock on a folder, against other threads and processes (flock). It tells those who would remove the folder
// that it is being written or read. Where the file system has no locks, none is given (UNIMPLEMENTED).
//
// Thread-compatible. The lock ends with the object or the process.
#ifndef LOSSD_SERVER_HEAD_FOLDER_LOCK_H_
#define LOSSD_SERVER_HEAD_FOLDER_LOCK_H_

#include <string>

#include "absl/status/statusor.h"

namespace lossd::head {

class FolderLock {
 public:
  enum class Kind { kShared, kExclusive };

  // Never waits: FAILED_PRECONDITION if the folder is locked otherwise.
  static absl::StatusOr<FolderLock> Try(const std::string& path, Kind kind);
  // Waits for a lock that is held otherwise. NOT_FOUND if the folder was removed or renamed meanwhile.
  static absl::StatusOr<FolderLock> Wait(const std::string& path, Kind kind);

  FolderLock() = default;  // holds nothing
  FolderLock(FolderLock&& other) noexcept;
  FolderLock& operator=(FolderLock&& other) noexcept;
  ~FolderLock();

 private:
  explicit FolderLock(int descriptor) : descriptor_(descriptor) {}
  static absl::StatusOr<FolderLock> Lock(const std::string& path, int operation);

  int descriptor_ = -1;
};

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_FOLDER_LOCK_H_
