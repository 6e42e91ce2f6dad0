// SPDX-License-Identifier: Apache-2.0
#include "server/head/disk_limit.h"

#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "kernels/errors/bytes.h"
#include "kernels/errors/field_error.h"
#include "proto/tensorfile/file.h"

namespace lossd::head {

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
  const absl::StatusOr<int64_t> used = DirectoryBytes(directory);
  if (!used.ok()) return used.status();
  if (bytes <= limit_bytes - *used) return absl::OkStatus();
  return errors::FieldError(
      "checkpoint_limit_bytes",
      absl::StrCat("leave room for the ", errors::ExactBytes(bytes), " of the checkpoint beside the ",
                   errors::ExactBytes(*used),
                   " below the checkpoint directory (remove checkpoints, or raise the limit)"),
      limit_bytes, absl::StatusCode::kResourceExhausted);
}

}  // namespace lossd::head
