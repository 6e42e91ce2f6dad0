// SPDX-License-Identifier: Apache-2.0
#include "server/head/temporary_folder.h"

#include <algorithm>
#include <filesystem>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace lossd::head {
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
  if (absl::Status status = disk->CreateFolder(path); !status.ok()) return status;
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
  absl::StatusOr<FolderLock> lock = FolderLock::Try(old_path, FolderLock::Kind::kExclusive);
  if (!lock.ok()) return lock.status();
  absl::StatusOr<std::string> path = TakeNameAway(disk, parent, name);
  if (!path.ok()) return path.status();
  TemporaryFolder folder(disk, *std::move(path));
  folder.lock_ = *std::move(lock);
  return folder;
}

TemporaryFolder::TemporaryFolder(TemporaryFolder&& other) noexcept
    : disk_(other.disk_), path_(std::exchange(other.path_, "")), lock_(std::move(other.lock_)) {}

TemporaryFolder::~TemporaryFolder() {
  if (!path_.empty()) RemoveTree(disk_, path_).IgnoreError();
}

std::string TemporaryFolder::File(absl::string_view name) const { return absl::StrCat(path_, "/", name); }

absl::Status TemporaryFolder::Become(const std::string& target) {
  if (absl::Status status = disk_->SyncFolder(path_); !status.ok()) return status;
  if (absl::Status status = disk_->Rename(path_, target); !status.ok()) return status;
  path_.clear();
  return absl::OkStatus();
}

absl::StatusOr<std::string> TakeNameAway(Disk* disk, const std::string& parent, absl::string_view name) {
  const std::string old_path = absl::StrCat(parent, "/", name);
  std::string path = TemporaryName(parent, name);
  if (absl::Status status = disk->Rename(old_path, path); !status.ok()) return status;
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
