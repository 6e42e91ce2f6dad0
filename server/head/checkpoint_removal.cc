// SPDX-License-Identifier: Apache-2.0
#include "server/head/checkpoint_removal.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/errors/field_error.h"
#include "server/head/checkpoint_layout.h"
#include "server/head/manifest.h"
#include "server/head/paths.h"
#include "server/head/temporary_folder.h"

namespace lossd::head {
namespace {

namespace fs = std::filesystem;

constexpr char kRemovedField[] = "checkpoint";

// An error that names the checkpoint as the request does.
absl::Status NoRemoval(absl::StatusCode code, absl::string_view checkpoint, absl::string_view why) {
  return errors::WithViolation(
      absl::Status(code, absl::StrCat("checkpoint ", checkpoint, ": ", why)),
      {kRemovedField, "must name a checkpoint of this server", std::string(checkpoint)});
}

absl::Status CheckFolder(const std::string& path, absl::string_view checkpoint, absl::string_view what) {
  std::error_code error;
  const fs::file_status status = fs::symlink_status(path, error);
  if (status.type() == fs::file_type::symlink) {
    return NoRemoval(absl::StatusCode::kInvalidArgument, checkpoint,
                     absl::StrCat(what, " is a symbolic link; lossd removes only folders that it has made"));
  }
  if (status.type() == fs::file_type::directory) return absl::OkStatus();
  if (status.type() == fs::file_type::none) return formats::FileError(checkpoint, "look at", error.value());
  return NoRemoval(absl::StatusCode::kNotFound, checkpoint, "there is none of this name");
}

// A name as ShardFile makes them, or the manifest's.
bool IsFileOfCheckpoint(const std::string& name) {
  return name == kManifestFile || name == kTensorFile ||
         (absl::StartsWith(name, "tensors-") && absl::EndsWith(name, ".safetensors"));
}

// Whether the folder is a checkpoint, and how many bytes its files have.
absl::StatusOr<int64_t> CheckRemovable(const std::string& directory, const std::string& folder,
                                       absl::string_view checkpoint) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(absl::StrCat(folder, "/", kManifestFile), error))) {
    return NoRemoval(absl::StatusCode::kNotFound, checkpoint,
                     absl::StrCat("the folder of this name has no ", kManifestFile, ", so it is none"));
  }
  const bool is_whole = ReadManifest(directory, checkpoint).ok();
  int64_t bytes = 0;
  error.clear();
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename();
    if (!is_whole && !IsFileOfCheckpoint(name)) {
      return NoRemoval(
          absl::StatusCode::kFailedPrecondition, checkpoint,
          absl::StrCat("its manifest cannot be read, and '", name,
                       "' lies there, which is no file of a checkpoint; remove the folder by hand"));
    }
    std::error_code gone;
    const auto size = fs::is_regular_file(entry->symlink_status(gone)) ? entry->file_size(gone) : 0;
    if (!gone) bytes += static_cast<int64_t>(size);
  }
  if (error) return formats::FileError(checkpoint, "list", error.value());
  return bytes;
}

}  // namespace

absl::StatusOr<ReadLocks> LockForReading(const std::string& folder) {
  ReadLocks locks;
  absl::StatusOr<FolderLock> name =
      FolderLock::Wait(folder.substr(0, folder.rfind('/')), FolderLock::Kind::kShared);
  if (absl::IsUnimplemented(name.status())) return locks;
  if (!name.ok()) return name.status();
  locks.name = *std::move(name);
  absl::StatusOr<FolderLock> files = FolderLock::Wait(folder, FolderLock::Kind::kShared);
  if (!files.ok()) return files.status();
  locks.files = *std::move(files);
  return locks;
}

absl::StatusOr<RemovedCheckpoint> RemoveCheckpoint(const std::string& directory, absl::string_view checkpoint,
                                                   Disk* disk) {
  const std::pair<absl::string_view, absl::string_view> names =
      absl::StrSplit(checkpoint, absl::MaxSplits('/', 1));
  absl::Status status = ValidateName("checkpoint's head", names.first);
  status.Update(ValidateName("checkpoint's name", names.second));
  if (!status.ok()) {
    return errors::WithViolation(std::move(status),
                                 {kRemovedField, "must be <head>/<name>", std::string(checkpoint)});
  }
  const std::string head_folder = absl::StrCat(directory, "/", names.first);
  const std::string folder = absl::StrCat(head_folder, "/", names.second);
  status = CheckFolder(head_folder, checkpoint, "its head's folder");
  if (!status.ok()) return status;
  absl::StatusOr<FolderLock> name = FolderLock::Wait(head_folder, FolderLock::Kind::kExclusive);
  if (absl::IsUnimplemented(name.status())) return absl::FailedPreconditionError(name.status().message());
  if (!name.ok()) return name.status();
  status = CheckFolder(folder, checkpoint, "it");
  if (!status.ok()) return status;
  const absl::StatusOr<int64_t> bytes = CheckRemovable(directory, folder, checkpoint);
  if (!bytes.ok()) return bytes.status();
  const absl::StatusOr<std::string> nameless = TakeNameAway(disk, head_folder, names.second);
  if (!nameless.ok()) return nameless.status();
  *name = FolderLock();
  const bool is_gone = RemoveIfUnused(disk, *nameless);
  return RemovedCheckpoint{.bytes = *bytes, .unremoved = is_gone ? "" : *nameless};
}

}  // namespace lossd::head
