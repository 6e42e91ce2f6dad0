// SPDX-License-Identifier: Apache-2.0
#include "server/head/disk.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/tensorfile/direct_file.h"

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
    absl::Status removed = is_folder ? RemoveTree(disk, path) : disk->RemoveFile(path);
    if (!removed.ok()) return removed;
  }
  return disk->RemoveFolder(folder);
}

}  // namespace lossd::head
