// SPDX-License-Identifier: Apache-2.0
#include "server/head/small_files.h"

#include <cstdint>
#include <memory>

#include "absl/strings/str_cat.h"
#include "server/head/paths.h"

namespace lossd::head {

absl::Status WriteSmallFile(Disk* disk, const std::string& path, const std::string& text) {
  absl::StatusOr<std::unique_ptr<formats::OutputFile>> file = disk->CreateFile(path);
  if (!file.ok()) return file.status();
  absl::Status status = (*file)->Append({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  if (status.ok()) status = (*file)->Sync();
  if (status.ok()) status = (*file)->Close();
  return status;
}

absl::StatusOr<std::string> ReadSmallFile(const std::string& folder, const std::string& name, size_t bytes) {
  const auto file = OpenBelow(folder, name);
  if (!file.ok()) return file.status();
  if ((*file)->size() != static_cast<int64_t>(bytes)) {
    return absl::DataLossError(absl::StrCat(name, " has ", (*file)->size(), " bytes, not ", bytes));
  }
  std::string text(bytes, '\0');
  absl::Status status = (*file)->ReadAt(0, {reinterpret_cast<uint8_t*>(text.data()), text.size()});
  if (!status.ok()) return status;
  return text;
}

}  // namespace lossd::head
