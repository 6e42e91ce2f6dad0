// SPDX-License-Identifier: Apache-2.0
// A folder that becomes a checkpoint or disappears, and what interrupted work leaves of such folders. Their
// names start with a dot, as no checkpoint's does, and they are locked while they are in use.
//
// Thread-compatible; the free functions are thread-safe.
#ifndef LOSSD_SERVER_HEAD_TEMPORARY_FOLDER_H_
#define LOSSD_SERVER_HEAD_TEMPORARY_FOLDER_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/head/disk.h"
#include "server/head/folder_lock.h"

namespace lossd::head {

class TemporaryFolder {
 public:
  // Makes an empty one in `parent` for a checkpoint that will be called `name`. `disk` outlives it.
  // FAILED_PRECONDITION if the file system has no locks. `kind`: shared if other processes write into it, who
  // lock it too.
  static absl::StatusOr<TemporaryFolder> Create(Disk* disk, const std::string& parent, absl::string_view name,
                                                FolderLock::Kind kind = FolderLock::Kind::kExclusive);
  // Turns the folder `name` of `parent` into one, so that after a crash it is either there as it was or not
  // at all. FAILED_PRECONDITION if it is locked, because it is being read.
  static absl::StatusOr<TemporaryFolder> Adopt(Disk* disk, const std::string& parent, absl::string_view name);

  TemporaryFolder(TemporaryFolder&& other) noexcept;
  TemporaryFolder& operator=(TemporaryFolder&&) = delete;
  // Removes it, if it did not become something; errors are ignored: what is left is a leftover.
  ~TemporaryFolder();

  const std::string& path() const { return path_; }
  std::string File(absl::string_view name) const;
  // Brings it to the disk and renames it to `target`. ALREADY_EXISTS if there is something.
  absl::Status Become(const std::string& target);

 private:
  TemporaryFolder(Disk* disk, std::string path) : disk_(disk), path_(std::move(path)) {}

  Disk* const disk_;
  std::string path_;  // empty: nothing to remove
  FolderLock lock_;
};

// Gives the folder `name` of `parent` a temporary name and returns its new path: after a crash it is there as
// it was, or a leftover. Who reads its files goes on. If it fails, the folder has its name, unless the disk
// refuses that as well.
absl::StatusOr<std::string> TakeNameAway(Disk* disk, const std::string& parent, absl::string_view name);

// INVALID_ARGUMENT unless a temporary folder may be called so.
absl::Status ValidateTemporaryName(absl::string_view name);

// Removes a temporary folder unless it is in use. True: it is gone; false: it is in use, or could not be
// removed as a whole.
bool RemoveIfUnused(Disk* disk, const std::string& path);

// Removes temporary folders in `parent` that no process uses any more; what cannot be removed stays.
void RemoveLeftovers(Disk* disk, const std::string& parent);

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_TEMPORARY_FOLDER_H_
