// SPDX-License-Identifier: Apache-2.0
// A folder of a test's own, removed with all its content when the test ends; and whole files as strings.
#ifndef LOSSD_TESTS_SUPPORT_TEMP_FOLDER_H_
#define LOSSD_TESTS_SUPPORT_TEMP_FOLDER_H_

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "absl/strings/string_view.h"

namespace lossd::test {

// Thread-compatible.
class TempFolder {
 public:
  TempFolder() : path_(testing::TempDir() + "/lossd_test_XXXXXX") {
    EXPECT_NE(mkdtemp(path_.data()), nullptr) << path_;
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string File(absl::string_view name) const { return path_ + "/" + std::string(name); }

 private:
  std::string path_;
};

// Replaces the file. (A new one: some file systems bring a truncated and rewritten one to the disk at once.)
inline void WriteWholeFile(const std::string& path, absl::string_view content) {
  std::filesystem::remove(path);
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(content.data(), static_cast<std::streamsize>(content.size()));
  file.close();
  EXPECT_TRUE(file.good()) << path;
}

inline std::string ReadWholeFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

}  // namespace lossd::test

#endif  // LOSSD_TESTS_SUPPORT_TEMP_FOLDER_H_
