// SPDX-License-Identifier: Apache-2.0
// Operations on files and folders of the checkpoint directory, and the confinement of clients' paths
// (disk.h).
#include "server/head/disk.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <random>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

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
    std::error_code gone;  // a file that is gone meanwhile counts nothing
    if (!fs::is_regular_file(entry->symlink_status(gone))) continue;
    const auto size = fs::file_size(entry->path(), gone);
    if (!gone) bytes += static_cast<int64_t>(size);
  }
  if (error == std::errc::no_such_file_or_directory) return bytes;  // a folder is gone meanwhile
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

// True if `path` still leads to the open descriptor's folder.
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
  // Nothing in the folder may be removed before its new name is on the disk.
  absl::Status status = disk->SyncFolder(parent);
  if (status.ok()) return path;
  disk->Rename(path, old_path).IgnoreError();
  return status;
}

absl::Status ValidateTemporaryName(absl::string_view name) {
  constexpr size_t kMostLength = 64 + 9;  // a checkpoint's name, and what TemporaryName appends
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

// ---- Names and paths of clients ----

namespace {

constexpr size_t kMaxNameLength = 64;

bool IsNameCharacter(char c) {
  return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-';
}

// `path` with all symbolic links resolved; nullopt, with errno set, if that fails.
std::optional<std::string> RealPath(const std::string& path) {
  const std::unique_ptr<char, decltype(&free)> real(realpath(path.c_str(), nullptr), &free);
  if (real == nullptr) return std::nullopt;
  return std::string(real.get());
}

absl::Status BadPath(absl::string_view path, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("path '", absl::CHexEscape(path), "' ", what));
}

// Owns a descriptor; -1: none.
class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  ~Descriptor() {
    if (value_ >= 0) close(value_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int get() const { return value_; }
  void Reset(int value) {
    if (value_ >= 0) close(value_);
    value_ = value;
  }

 private:
  int value_;
};

// Opens the file `path` below the folder, part by part, and follows no symbolic link. `name`: the file's name
// in errors.
absl::StatusOr<int> OpenWithoutLinks(const std::string& folder, absl::string_view path,
                                     absl::string_view name) {
  constexpr int kFolder = O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
  Descriptor at(open(folder.c_str(), kFolder));
  std::vector<std::string> parts = absl::StrSplit(path, '/');
  const std::string file = std::move(parts.back());
  parts.pop_back();
  for (const std::string& part : parts) {
    if (at.get() >= 0) at.Reset(openat(at.get(), part.c_str(), kFolder));
  }
  struct stat status {};
  if (at.get() < 0 || fstatat(at.get(), file.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) {
    return formats::FileError(name, "open", errno);
  }
  // Checked before it is opened, because opening a device may have effects.
  if (!S_ISREG(status.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(name, ": not a regular file"));
  }
  // O_NONBLOCK, in case the file has become a pipe by now.
  const int descriptor =
      openat(at.get(), file.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  if (descriptor < 0) return formats::FileError(name, "open", errno);
  return descriptor;
}

// The real location of a path that a client named.
struct Resolved {
  std::string root;      // the directory
  std::string relative;  // below it, without symbolic links
};

// The reason why `relative` cannot be resolved, or leads out of `root`: the error for the first symbolic link
// on its way that does not lead to something in `root`. OK if there is no such link.
absl::Status BadLink(const std::string& root, const std::string& prefix, absl::string_view relative,
                     const std::vector<absl::string_view>& parts) {
  std::string way;
  for (const absl::string_view part : parts) {
    if (part.empty() || part == ".") continue;
    absl::StrAppend(&way, way.empty() ? "" : "/", part);
    const std::string path = absl::StrCat(root, "/", way);
    struct stat status {};
    if (lstat(path.c_str(), &status) != 0) return absl::OkStatus();
    if (!S_ISLNK(status.st_mode)) continue;
    const std::string is_link = absl::StrCat(
        way == relative ? "it" : absl::StrCat("'", absl::CHexEscape(way), "'"), " is a symbolic link");
    const std::optional<std::string> real = RealPath(path);
    if (!real.has_value() && errno == ELOOP) {
      return BadPath(relative, absl::StrCat("leads nowhere: ", is_link,
                                            " in a loop of links; put the file in its place"));
    }
    if (!real.has_value() && errno == ENOENT) {
      return absl::NotFoundError(absl::StrCat("path '", absl::CHexEscape(relative),
                                              "' leads nowhere: ", is_link,
                                              " to something that is not there; put the file in its place"));
    }
    if (real.has_value() && *real != root && !absl::StartsWith(*real, prefix)) {
      return BadPath(relative,
                     absl::StrCat("leads outside the server's directory: ", is_link,
                                  "; copy what it leads to into the directory, or start the server with a "
                                  "--checkpoint_dir that holds both"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Resolved> Resolve(const std::string& directory, absl::string_view relative) {
  if (relative.empty()) return BadPath(relative, "is empty");
  if (relative.front() == '/') return BadPath(relative, "is absolute");
  if (absl::StrContains(relative, '\0')) return BadPath(relative, "holds a zero byte");
  const std::vector<absl::string_view> parts = absl::StrSplit(relative, '/');
  if (std::find(parts.begin(), parts.end(), "..") != parts.end()) return BadPath(relative, "holds '..'");
  const std::optional<std::string> root = RealPath(directory);
  if (!root.has_value()) {  // a directory that does not exist yet has no files
    return formats::FileError(errno == ENOENT ? relative : "the server's directory", "resolve", errno);
  }
  const std::optional<std::string> real = RealPath(absl::StrCat(*root, "/", relative));
  const int error = errno;
  const std::string prefix = *root == "/" ? *root : absl::StrCat(*root, "/");
  if (!real.has_value() || !absl::StartsWith(*real, prefix))
    LOSSD_RETURN_IF_ERROR(BadLink(*root, prefix, relative, parts));
  if (!real.has_value()) return formats::FileError(relative, "resolve", error);
  if (!absl::StartsWith(*real, prefix)) return BadPath(relative, "leads outside the server's directory");
  return Resolved{*root, real->substr(prefix.size())};
}

}  // namespace

absl::Status ValidateName(absl::string_view what, absl::string_view name) {
  if (!name.empty() && name.size() <= kMaxNameLength && name[0] != '.' &&
      std::all_of(name.begin(), name.end(), IsNameCharacter)) {
    return absl::OkStatus();
  }
  constexpr absl::string_view kRule =
      "must be 1 to 64 characters out of A-Z a-z 0-9 . _ - and not start with a dot";
  return errors::WithViolation(
      absl::InvalidArgumentError(absl::StrCat(what, " ", kRule, ", got '",
                                              absl::CHexEscape(name.substr(0, 2 * kMaxNameLength)), "'")),
      {std::string(what), std::string(kRule), std::string(name)});
}

absl::StatusOr<std::string> ResolveBelow(const std::string& directory, absl::string_view relative) {
  LOSSD_TRY(const Resolved resolved, Resolve(directory, relative));
  return absl::StrCat(resolved.root == "/" ? "" : resolved.root, "/", resolved.relative);
}

absl::StatusOr<std::unique_ptr<formats::InputFile>> OpenBelow(const std::string& directory,
                                                              absl::string_view relative) {
  LOSSD_TRY(const Resolved resolved, Resolve(directory, relative));
  LOSSD_TRY(const int descriptor, OpenWithoutLinks(resolved.root, resolved.relative, relative));
  return formats::InputFile::Adopt(descriptor, std::string(relative));
}

// ---- FolderBelow ----

absl::StatusOr<FolderBelow> FolderBelow::Open(const std::string& directory,
                                              absl::Span<const std::string> names) {
  const std::string relative = absl::StrJoin(names, "/");
  const std::optional<std::string> root = RealPath(directory);
  if (!root.has_value()) return formats::FileError(relative, "resolve", errno);
  constexpr int kFolder = O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
  FolderBelow folder(open(root->c_str(), kFolder), relative);
  for (const std::string& name : names) {
    if (name.empty() || name == "." || name == ".." || absl::StrContains(name, '/') ||
        absl::StrContains(name, '\0')) {
      return BadPath(relative, "leads elsewhere");
    }
    const int parent = folder.descriptor_;
    if (parent >= 0) folder.descriptor_ = openat(parent, name.c_str(), kFolder);
    const int error = errno;
    if (parent >= 0) close(parent);
    if (folder.descriptor_ < 0) return formats::FileError(relative, "open folder", error);
  }
  return folder;
}

FolderBelow::FolderBelow(FolderBelow&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), name_(std::move(other.name_)) {}

FolderBelow::~FolderBelow() {
  if (descriptor_ >= 0) close(descriptor_);
}

// The number alone is a symbolic link, which some functions do not follow; with "/." it is a folder.
std::string FolderBelow::path() const { return absl::StrCat("/proc/self/fd/", descriptor_, "/."); }

// ---- Threads ----

absl::Status RunInThreads(int threads, size_t tasks, absl::FunctionRef<absl::Status(size_t)> task) {
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  std::vector<absl::Status> results(tasks);
  const auto work = [&] {
    while (!failed) {
      const size_t number = next++;
      if (number >= tasks) return;
      results[number] = task(number);
      if (!results[number].ok()) failed = true;
    }
  };
  std::vector<std::thread> others;
  const size_t wanted = std::min(tasks, static_cast<size_t>(std::max(threads, 1)));
  try {
    for (size_t i = 1; i < wanted; ++i) others.emplace_back(work);
  } catch (const std::system_error&) {
    // The system gives no more threads; the threads that exist do all tasks.
  }
  work();
  for (std::thread& other : others) other.join();
  for (absl::Status& result : results) {
    if (!result.ok()) return result;
  }
  return absl::OkStatus();
}

}  // namespace lossd::head
