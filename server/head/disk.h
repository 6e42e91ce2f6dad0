// SPDX-License-Identifier: Apache-2.0
// Files and folders of the checkpoint directory. Disk has the operations that change files. CheckRoom checks
// a limit on the directory's size. FolderLock protects a folder from removal. A TemporaryFolder becomes a
// checkpoint or disappears. ValidateName, ResolveBelow, OpenBelow and FolderBelow check, resolve and open
// names and paths that clients send, and confine them to the directory. RunInThreads divides work on files
// among threads.
//
// All functions are thread-safe; objects are thread-compatible unless their class says otherwise. Errors as
// in proto/tensorfile/file.h. Errors about a client's path repeat what the client sent and reveal nothing of
// the server's own paths.
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

// The operations on files by which checkpoints are saved and removed. Tests override them, to let any single
// operation fail or be the last one before a crash. Thread-safe.
class Disk {
 public:
  // The disk of the operating system.
  static Disk* Real();
  virtual ~Disk() = default;

  // ALREADY_EXISTS if the path exists.
  virtual absl::StatusOr<std::unique_ptr<formats::OutputFile>> CreateFile(const std::string& path);
  // As CreateFile, for a large file: bypasses the page cache if the file system allows it.
  virtual absl::StatusOr<std::unique_ptr<formats::OutputFile>> CreateLargeFile(const std::string& path);
  virtual absl::Status CreateFolder(const std::string& path);
  // Syncs the names in a folder to the disk.
  virtual absl::Status SyncFolder(const std::string& path);
  // ALREADY_EXISTS if `to` exists; nothing is ever replaced.
  virtual absl::Status Rename(const std::string& from, const std::string& to);
  virtual absl::Status RemoveFile(const std::string& path);
  // INTERNAL if the folder is not empty.
  virtual absl::Status RemoveFolder(const std::string& path);
};

// Removes a folder with everything in it, without following links. Stops at the first error.
absl::Status RemoveTree(Disk* disk, const std::string& folder);

// ---- The size of a directory, and a limit on it ----

// The bytes of all regular files below `directory`, at any depth; links are not followed.
absl::StatusOr<int64_t> DirectoryBytes(const std::string& directory);

// RESOURCE_EXHAUSTED if `bytes` more would exceed `limit_bytes`; the message has all figures. Not atomic: two
// servers that save into one directory at the same time may both pass.
absl::Status CheckRoom(const std::string& directory, int64_t bytes, int64_t limit_bytes);

// A lock on a folder (flock), which other threads and processes respect. It protects a folder that is being
// written or read from removal. UNIMPLEMENTED if the file system has no locks.
//
// Thread-compatible. The lock ends with the object or the process.
class FolderLock {
 public:
  enum class Kind { kShared, kExclusive };

  // Never waits: FAILED_PRECONDITION if another lock on the folder conflicts.
  static absl::StatusOr<FolderLock> Try(const std::string& path, Kind kind);
  // Waits until no other lock on the folder conflicts. NOT_FOUND if the folder was removed or renamed
  // meanwhile.
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

// ---- Small files, written and read as a whole ----

// Creates a file with `text` and syncs it to the disk.
absl::Status WriteSmallFile(Disk* disk, const std::string& path, const std::string& text);

// Reads a file of exactly `bytes` bytes. DATA_LOSS if it has another size; other errors as OpenBelow.
absl::StatusOr<std::string> ReadSmallFile(const std::string& folder, const std::string& name, size_t bytes);

// ---- Temporary folders ----
// The names of temporary folders start with a dot, which no checkpoint's name does. They are locked while
// they are in use. Interrupted work leaves such folders behind, without a lock.

// A folder that becomes a checkpoint or disappears. Thread-compatible.
class TemporaryFolder {
 public:
  // Creates an empty temporary folder in `parent` for a checkpoint that will be called `name`. `disk`
  // outlives it. FAILED_PRECONDITION if the file system has no locks. `kind`: shared if other processes,
  // which lock the folder, too, write into it.
  static absl::StatusOr<TemporaryFolder> Create(Disk* disk, const std::string& parent, absl::string_view name,
                                                FolderLock::Kind kind = FolderLock::Kind::kExclusive);
  // Turns the folder `name` in `parent` into a temporary folder, so that it will be removed. After a crash it
  // is either as it was or a leftover. FAILED_PRECONDITION if it is locked, because it is being read.
  static absl::StatusOr<TemporaryFolder> Adopt(Disk* disk, const std::string& parent, absl::string_view name);

  TemporaryFolder(TemporaryFolder&& other) noexcept;
  TemporaryFolder& operator=(TemporaryFolder&&) = delete;
  // Removes the folder unless Become succeeded. Errors are ignored: what stays is a leftover.
  ~TemporaryFolder();

  const std::string& path() const { return path_; }
  std::string File(absl::string_view name) const;
  // Syncs the folder to the disk and renames it to `target`. ALREADY_EXISTS if `target` exists.
  absl::Status Become(const std::string& target);

 private:
  TemporaryFolder(Disk* disk, std::string path) : disk_(disk), path_(std::move(path)) {}

  Disk* const disk_;
  std::string path_;  // empty: nothing to remove
  FolderLock lock_;
};

// Gives the folder `name` in `parent` a temporary name and returns its new path. After a crash the folder is
// as it was, or a leftover. Readers of its files are not disturbed. After an error the folder has its old
// name, unless the disk refuses that as well.
absl::StatusOr<std::string> TakeNameAway(Disk* disk, const std::string& parent, absl::string_view name);

// INVALID_ARGUMENT unless `name` is a possible name of a temporary folder.
absl::Status ValidateTemporaryName(absl::string_view name);

// Removes a temporary folder unless it is in use. True if the folder is gone. False if it is in use or could
// not be removed completely.
bool RemoveIfUnused(Disk* disk, const std::string& path);

// Removes the temporary folders in `parent` that no process uses. What cannot be removed stays.
void RemoveLeftovers(Disk* disk, const std::string& parent);

// ---- Names and paths of clients ----

// INVALID_ARGUMENT unless `name` has 1 to 64 characters out of A-Z a-z 0-9 . _ - and does not start with a
// dot. `what` names the field in the error.
absl::Status ValidateName(absl::string_view what, absl::string_view name);

// Returns the real path of `relative` below `directory`, without symbolic links. INVALID_ARGUMENT if
// `relative` is empty or absolute, contains "..", or leads outside or in a loop through a symbolic link,
// which the error names. NOT_FOUND if there is no such file, or if a link leads to no file. A symbolic link
// that is created after this check would be followed when the path is used; OpenBelow follows none.
absl::StatusOr<std::string> ResolveBelow(const std::string& directory, absl::string_view relative);

// Opens a regular file for reading. Errors as ResolveBelow, even if folders or links are changed meanwhile.
// FAILED_PRECONDITION if the path is not a regular file; it is then not opened at all. Errors call the file
// `relative`.
absl::StatusOr<std::unique_ptr<formats::InputFile>> OpenBelow(const std::string& directory,
                                                              absl::string_view relative);

// A folder below a directory, held open: path() leads to this folder even if it or its parents are renamed or
// replaced.
class FolderBelow {
 public:
  // `names`: the folders from `directory` down to this one. Symbolic links are followed only in the path of
  // `directory` itself. INVALID_ARGUMENT for a name that could lead elsewhere; NOT_FOUND or INTERNAL if one
  // is not a folder. Errors have only these names.
  static absl::StatusOr<FolderBelow> Open(const std::string& directory, absl::Span<const std::string> names);
  FolderBelow(FolderBelow&& other) noexcept;
  FolderBelow& operator=(FolderBelow&&) = delete;
  ~FolderBelow();

  std::string path() const;                          // valid in this process while the object lives
  const std::string& name() const { return name_; }  // for messages: `names` with slashes

 private:
  FolderBelow(int descriptor, std::string name) : descriptor_(descriptor), name_(std::move(name)) {}

  int descriptor_;
  std::string name_;
};

// ---- Threads ----

// Calls `task` once with each number below `tasks`, starting them in order, on this thread and on up to
// `threads` - 1 others, which end before this returns. After an error no further task begins. Of several
// errors, returns the one with the lowest number.
absl::Status RunInThreads(int threads, size_t tasks, absl::FunctionRef<absl::Status(size_t)> task);

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_DISK_H_
