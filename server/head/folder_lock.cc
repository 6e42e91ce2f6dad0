// SPDX-License-Identifier: Apache-2.0
#include "server/head/folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/tensorfile/file.h"

namespace lossd::head {
namespace {

int Operation(FolderLock::Kind kind) { return kind == FolderLock::Kind::kShared ? LOCK_SH : LOCK_EX; }

// True if the descriptor is still what lies at `path`.
bool IsAt(int descriptor, const std::string& path) {
  struct stat opened {};
  struct stat there {};
  return fstat(descriptor, &opened) == 0 && stat(path.c_str(), &there) == 0 &&
         opened.st_dev == there.st_dev && opened.st_ino == there.st_ino;
}

}  // namespace

absl::StatusOr<FolderLock> FolderLock::Lock(const std::string& path, int operation) {
  FolderLock lock(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
  if (lock.descriptor_ < 0) return formats::FileError(path, "open folder", errno);
  while (flock(lock.descriptor_, operation) != 0) {
    if (errno == EWOULDBLOCK)
      return absl::FailedPreconditionError(absl::StrCat(path, ": is being written or read"));
    if (errno == EINTR) continue;
    return absl::UnimplementedError(
        absl::StrCat(path, ": the file system has no locks (flock: ", std::strerror(errno),
                     "), so another server could remove what this one saves; use a directory on a file "
                     "system with locks"));
  }
  return lock;
}

absl::StatusOr<FolderLock> FolderLock::Try(const std::string& path, Kind kind) {
  return Lock(path, Operation(kind) | LOCK_NB);
}

absl::StatusOr<FolderLock> FolderLock::Wait(const std::string& path, Kind kind) {
  absl::StatusOr<FolderLock> lock = Lock(path, Operation(kind));
  if (lock.ok() && !IsAt(lock->descriptor_, path)) {
    return absl::NotFoundError(absl::StrCat(path, ": was removed just now"));
  }
  return lock;
}

FolderLock::FolderLock(FolderLock&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}

FolderLock& FolderLock::operator=(FolderLock&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

FolderLock::~FolderLock() {
  if (descriptor_ >= 0) close(descriptor_);
}

}  // namespace lossd::head
