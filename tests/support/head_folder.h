// SPDX-License-Identifier: Apache-2.0
// What lies in the folder of a head's checkpoints, apart from the empty file that counts its saves.
#ifndef LOSSD_TESTS_SUPPORT_HEAD_FOLDER_H_
#define LOSSD_TESTS_SUPPORT_HEAD_FOLDER_H_

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/match.h"

namespace lossd::test {

// Whether the entry is the file that counts saves. A folder of that name, or a file with content, is not.
inline bool CountsSaves(const std::filesystem::directory_entry& entry) {
  return absl::StartsWith(entry.path().filename().string(), ".save-number-") &&
         std::filesystem::is_regular_file(entry.symlink_status()) && entry.file_size() == 0;
}

// The other names, sorted: checkpoints, and whatever else somebody left there.
inline std::vector<std::string> NamesInHeadFolder(const std::string& path) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    if (!CountsSaves(entry)) names.push_back(entry.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace lossd::test

#endif  // LOSSD_TESTS_SUPPORT_HEAD_FOLDER_H_
