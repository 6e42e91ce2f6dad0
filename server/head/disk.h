// SPDX-License-Identifier: Apache-2.0
// Files and folders of the checkpoint directory. Names and paths that come from clients are confined to the
// directory: they are checked, resolved and opened here (ValidateName, ResolveBelow, OpenBelow, FolderBelow).
// Disk has the operations that change files, CheckRoom holds the directory to a limit, FolderLock keeps a
// folder from removal, and TemporaryFolder becomes a checkpoint or disappears. RunInThreads divides work on
// files among threads.
//
// All functions are thread-safe; objects are thread-compatible unless their class says otherwise. Errors as
// in proto/tensorfile/file.h. Errors about what a client named repeat what the client said and nothing of the
// server's own paths.
#ifndef LOSSD_SERVER_HEAD_DISK_H_
#define LOSSD_SERVER_HEAD_DISK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "proto/tensorfile/file.h"

namespace lossd::head {

// ---- Operations on files ----

// The operations on files that saving and removing checkpoints consist of. Tests replace them, to have any
// single one fail or be the last before a crash. Thread-safe.
class Disk {
 public:
  // The operating system's.
  static Disk* Real();
  virtual ~Disk() = default;

  // ALREADY_EXISTS if there is such a file or folder.
  virtual absl::StatusOr<std::unique_ptr<formats::OutputFile>> CreateFile(const std::string& path);
  // As CreateFile, for a large file, which does not pass through the page cache if the file system allows
  // that.
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

// ---- What a directory takes on the disk, against a limit ----

// The bytes of all regular files below `directory`, at any depth; links are not followed.
absl::StatusOr<int64_t> DirectoryBytes(const std::string& directory);

// RESOURCE_EXHAUSTED naming all figures unless `bytes` more stay within `limit_bytes`. Not atomic: of two
// servers that save into one directory at the same time, both may pass.
absl::Status CheckRoom(const std::string& directory, int64_t bytes, int64_t limit_bytes);

// A lock on a folder, against other threads and processes (flock). It tells those who would remove the folder
// that it is being written or read. Where the file system has no locks, none is given (UNIMPLEMENTED).
//
// Thread-compatible. The lock ends with the object or the process.
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

// ---- Files of a few bytes, as a whole ----

// Makes a file, and brings it to the disk.
absl::Status WriteSmallFile(Disk* disk, const std::string& path, const std::string& text);

// A file of exactly `bytes` bytes; DATA_LOSS if it has another size, else errors as OpenBelow.
absl::StatusOr<std::string> ReadSmallFile(const std::string& folder, const std::string& name, size_t bytes);

// ---- Temporary folders ----
// Their names start with a dot, as no checkpoint's does, and they are locked while they are in use.
// Interrupted work leaves such folders behind, without a lock.

// A folder that becomes a checkpoint or disappears. Thread-compatible.
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

// ---- Names and paths of clients ----

// INVALID_ARGUMENT unless `name` is 1 to 64 characters out of A-Z a-z 0-9 . _ -, not starting with a dot.
// `what` names the field in the error.
absl::Status ValidateName(absl::string_view what, absl::string_view name);

// The real path of `relative` below `directory`, without symbolic links. INVALID_ARGUMENT if it is empty
// or absolute, holds "..", or leads outside or in circles through a symbolic link, which the error names;
// NOT_FOUND if there is no such file, or a link on the way leads to none.
// A symbolic link that is made after the check is followed by those who use the path; OpenBelow follows none.
absl::StatusOr<std::string> ResolveBelow(const std::string& directory, absl::string_view relative);

// Opens a regular file for reading. Errors as ResolveBelow, whatever is changed on the way meanwhile, and
// FAILED_PRECONDITION for anything but a regular file, which is not opened at all. The file is called
// `relative` in errors.
absl::StatusOr<std::unique_ptr<formats::InputFile>> OpenBelow(const std::string& directory,
                                                              absl::string_view relative);

// A folder below a directory, held open: whatever is renamed or replaced meanwhile, path() leads to it.
class FolderBelow {
 public:
  // `names`: of the folders on the way, from the directory on. No symbolic link is followed, but on the way
  // to the directory itself. INVALID_ARGUMENT for a name that could lead elsewhere; NOT_FOUND or INTERNAL if
  // one is no folder. Errors repeat the names alone.
  static absl::StatusOr<FolderBelow> Open(const std::string& directory, absl::Span<const std::string> names);
  FolderBelow(FolderBelow&& other) noexcept;
  FolderBelow& operator=(FolderBelow&&) = delete;
  ~FolderBelow();

  std::string path() const;                          // of this process, while it is open
  const std::string& name() const { return name_; }  // for people, from the directory on

 private:
  FolderBelow(int descriptor, std::string name) : descriptor_(descriptor), name_(std::move(name)) {}

  int descriptor_;
  std::string name_;
};

// ---- Threads ----

// Calls `task` once with each number below `tasks`, in order, on this thread and on up to `threads` - 1
// others; the threads end before this returns. After an error no further task begins. Of several errors that
// of the lowest number is returned, so that it does not depend on the threads' speed.
absl::Status RunInThreads(int threads, size_t tasks, absl::FunctionRef<absl::Status(size_t)> task);

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_DISK_H_
