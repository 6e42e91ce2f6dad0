// SPDX-License-Identifier: Apache-2.0
#include "server/head/disk.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <random>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "server/head/paths.h"

namespace lossd::head {

using formats::FileError;

Disk* Disk::Real() {
  static Disk* const disk = new Disk();
  return disk;
}

absl::StatusOr<std::unique_ptr<formats::OutputFile>> Disk::CreateFile(const std::string& path) {
  return formats::CreateOutputFile(path);
}

absl::StatusOr<std::unique_ptr<formats::OutputFile>> Disk::CreateLargeFile(const std::string& path) {
  return formats::CreateDirectFile(path);
}

absl::Status Disk::CreateFolder(const std::string& path) {
  if (mkdir(path.c_str(), 0755) == 0) return absl::OkStatus();
  return FileError(path, "create folder", errno);
}

absl::Status Disk::SyncFolder(const std::string& path) { return formats::SyncFolder(path); }

absl::Status Disk::Rename(const std::string& from, const std::string& to) {
  int result = renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE);
  // File systems without RENAME_NOREPLACE: a plain rename replaces empty folders only.
  if (result != 0 && (errno == EINVAL || errno == ENOSYS)) result = rename(from.c_str(), to.c_str());
  if (result == 0) return absl::OkStatus();
  return FileError(to, "rename to", errno == ENOTEMPTY ? EEXIST : errno);
}

absl::Status Disk::RemoveFile(const std::string& path) {
  if (unlink(path.c_str()) == 0) return absl::OkStatus();
  return FileError(path, "remove", errno);
}

absl::Status Disk::RemoveFolder(const std::string& path) {
  if (rmdir(path.c_str()) == 0) return absl::OkStatus();
  return FileError(path, "remove folder", errno);
}

absl::Status RemoveTree(Disk* disk, const std::string& folder) {
  namespace fs = std::filesystem;
  std::error_code error;
  std::vector<fs::directory_entry> entries;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    entries.push_back(*entry);
  }
  if (error) return FileError(folder, "list", error.value());
  for (const fs::directory_entry& entry : entries) {
    const std::string path = entry.path();
    const bool is_folder = fs::is_directory(entry.symlink_status(error));
    LOSSD_RETURN_IF_ERROR(is_folder ? RemoveTree(disk, path) : disk->RemoveFile(path));
  }
  return disk->RemoveFolder(folder);
}

// ---- What a directory takes ----

absl::StatusOr<int64_t> DirectoryBytes(const std::string& directory) {
  namespace fs = std::filesystem;
  std::error_code error;
  int64_t bytes = 0;
  fs::recursive_directory_iterator entry(directory, fs::directory_options::skip_permission_denied, error);
  for (const fs::recursive_directory_iterator end; !error && entry != end; entry.increment(error)) {
    std::error_code gone;  // meanwhile: it takes nothing
    if (!fs::is_regular_file(entry->symlink_status(gone))) continue;
    const auto size = fs::file_size(entry->path(), gone);
    if (!gone) bytes += static_cast<int64_t>(size);
  }
  if (error == std::errc::no_such_file_or_directory) return bytes;  // a folder that went meanwhile
  if (error) return formats::FileError(directory, "list", error.value());
  return bytes;
}

absl::Status CheckRoom(const std::string& directory, int64_t bytes, int64_t limit_bytes) {
  LOSSD_TRY(const int64_t used, DirectoryBytes(directory));
  if (bytes <= limit_bytes - used) return absl::OkStatus();
  return errors::FieldError(
      "checkpoint_limit_bytes",
      absl::StrCat("leave room for the ", errors::ExactBytes(bytes), " of the checkpoint beside the ",
                   errors::ExactBytes(used),
                   " below the checkpoint directory (remove checkpoints, or raise the limit)"),
      limit_bytes, absl::StatusCode::kResourceExhausted);
}

// ---- FolderLock ----

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

// ---- Small files ----

absl::Status WriteSmallFile(Disk* disk, const std::string& path, const std::string& text) {
  LOSSD_TRY(std::unique_ptr<formats::OutputFile> file, disk->CreateFile(path));
  absl::Status status = file->Append({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  if (status.ok()) status = file->Sync();
  if (status.ok()) status = file->Close();
  return status;
}

absl::StatusOr<std::string> ReadSmallFile(const std::string& folder, const std::string& name, size_t bytes) {
  LOSSD_TRY(const auto file, OpenBelow(folder, name));
  if (file->size() != static_cast<int64_t>(bytes)) {
    return absl::DataLossError(absl::StrCat(name, " has ", file->size(), " bytes, not ", bytes));
  }
  std::string text(bytes, '\0');
  LOSSD_RETURN_IF_ERROR(file->ReadAt(0, {reinterpret_cast<uint8_t*>(text.data()), text.size()}));
  return text;
}

// ---- Temporary folders ----

namespace {

constexpr char kPrefix[] = ".tmp-";

std::string TemporaryName(const std::string& parent, absl::string_view name) {
  std::random_device random;
  return absl::StrCat(parent, "/", kPrefix, name, "-", absl::Hex(random(), absl::kZeroPad8));
}

}  // namespace

absl::StatusOr<TemporaryFolder> TemporaryFolder::Create(Disk* disk, const std::string& parent,
                                                        absl::string_view name, FolderLock::Kind kind) {
  std::string path = TemporaryName(parent, name);
  LOSSD_RETURN_IF_ERROR(disk->CreateFolder(path));
  TemporaryFolder folder(disk, std::move(path));
  absl::StatusOr<FolderLock> lock = FolderLock::Try(folder.path_, kind);
  if (absl::IsUnimplemented(lock.status())) return absl::FailedPreconditionError(lock.status().message());
  if (!lock.ok()) return lock.status();
  folder.lock_ = *std::move(lock);
  return folder;
}

absl::StatusOr<TemporaryFolder> TemporaryFolder::Adopt(Disk* disk, const std::string& parent,
                                                       absl::string_view name) {
  const std::string old_path = absl::StrCat(parent, "/", name);
  LOSSD_TRY(FolderLock lock, FolderLock::Try(old_path, FolderLock::Kind::kExclusive));
  LOSSD_TRY(std::string path, TakeNameAway(disk, parent, name));
  TemporaryFolder folder(disk, std::move(path));
  folder.lock_ = std::move(lock);
  return folder;
}

TemporaryFolder::TemporaryFolder(TemporaryFolder&& other) noexcept
    : disk_(other.disk_), path_(std::exchange(other.path_, "")), lock_(std::move(other.lock_)) {}

TemporaryFolder::~TemporaryFolder() {
  if (!path_.empty()) RemoveTree(disk_, path_).IgnoreError();
}

std::string TemporaryFolder::File(absl::string_view name) const { return absl::StrCat(path_, "/", name); }

absl::Status TemporaryFolder::Become(const std::string& target) {
  LOSSD_RETURN_IF_ERROR(disk_->SyncFolder(path_));
  LOSSD_RETURN_IF_ERROR(disk_->Rename(path_, target));
  path_.clear();
  return absl::OkStatus();
}

absl::StatusOr<std::string> TakeNameAway(Disk* disk, const std::string& parent, absl::string_view name) {
  const std::string old_path = absl::StrCat(parent, "/", name);
  std::string path = TemporaryName(parent, name);
  LOSSD_RETURN_IF_ERROR(disk->Rename(old_path, path));
  // Not before its new name is on the disk may any of it go.
  absl::Status status = disk->SyncFolder(parent);
  if (status.ok()) return path;
  disk->Rename(path, old_path).IgnoreError();
  return status;
}

absl::Status ValidateTemporaryName(absl::string_view name) {
  constexpr size_t kMostLength = 64 + 9;  // a checkpoint's name, and what TemporaryName puts behind it
  const auto is_usual = [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-';
  };
  absl::string_view rest = name;
  if (absl::ConsumePrefix(&rest, kPrefix) && !rest.empty() && rest.size() <= kMostLength &&
      std::all_of(rest.begin(), rest.end(), is_usual)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("'", absl::CHexEscape(name.substr(0, 2 * kMostLength)),
                                                 "' is no temporary folder's name"));
}

bool RemoveIfUnused(Disk* disk, const std::string& path) {
  const absl::StatusOr<FolderLock> lock = FolderLock::Try(path, FolderLock::Kind::kExclusive);
  return absl::IsNotFound(lock.status()) || (lock.ok() && RemoveTree(disk, path).ok());
}

void RemoveLeftovers(Disk* disk, const std::string& parent) {
  namespace fs = std::filesystem;
  std::error_code error;
  std::vector<std::string> leftovers;
  for (fs::directory_iterator entry(parent, error), end; !error && entry != end; entry.increment(error)) {
    if (absl::StartsWith(entry->path().filename().string(), kPrefix)) leftovers.push_back(entry->path());
  }
  for (const std::string& leftover : leftovers) RemoveIfUnused(disk, leftover);
}

}  // namespace lossd::head
