// SPDX-License-Identifier: Apache-2.0
// TempFolder: a folder for one test, which is removed when the test ends. Also functions to read and write
// whole files, to list the folder of a head's checkpoints, and TestPki, which makes certificates.
#ifndef LOSSD_TESTS_SUPPORT_TEMP_FOLDER_H_
#define LOSSD_TESTS_SUPPORT_TEMP_FOLDER_H_

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
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

// Replaces the file by a new one, because some file systems flush a truncated and rewritten file to the disk
// at once.
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

// ---- The folder of a head's checkpoints, without the empty file that counts its saves ----

// Whether the entry is the empty file that counts saves. A folder with such a name, or a file with content,
// is not.
inline bool CountsSaves(const std::filesystem::directory_entry& entry) {
  return absl::StartsWith(entry.path().filename().string(), ".save-number-") &&
         std::filesystem::is_regular_file(entry.symlink_status()) && entry.file_size() == 0;
}

// The other names in the folder, sorted: checkpoints, and any other files.
inline std::vector<std::string> NamesInHeadFolder(const std::string& path) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    if (!CountsSaves(entry)) names.push_back(entry.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// Certificate authorities and certificates for one test, made with the openssl program. Thread-compatible.
class TestPki {
 public:
  // Makes the authority "ca" and the certificate "server", for localhost and 127.0.0.1.
  TestPki() {
    MakeAuthority("ca");
    Issue("server", "DNS:localhost,IP:127.0.0.1");
  }

  std::string File(absl::string_view name) const { return folder_.File(name); }
  std::string Certificate(absl::string_view name) const { return File(absl::StrCat(name, ".pem")); }
  std::string Key(absl::string_view name) const { return File(absl::StrCat(name, ".key")); }

  void MakeAuthority(const std::string& name, int days = kDays) {
    Request(name, absl::StrCat("-subj /CN=", name), days);
  }
  // `names`: alternative names in the form of openssl: "DNS:trainer-1,URI:spiffe://a/b".
  void Issue(const std::string& name, const std::string& names, const std::string& authority = "ca") {
    Request(name,
            absl::StrCat("-CA ", Certificate(authority), " -CAkey ", Key(authority), " -subj /CN=", name,
                         " -addext subjectAltName=", names, " -addext basicConstraints=critical,CA:FALSE"));
  }

  // A file that only this user can read.
  std::string Secret(absl::string_view name, absl::string_view content) const {
    WriteWholeFile(File(name), content);
    std::filesystem::permissions(File(name),
                                 std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
    return File(name);
  }

 private:
  static constexpr int kDays = 2;

  void Request(const std::string& name, const std::string& options, int days = kDays) {
    const std::string command = absl::StrCat(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days ", days, " ",
        options, " -keyout ", Key(name), " -out ", Certificate(name), " 2>", File("openssl.log"));
    EXPECT_EQ(std::system(command.c_str()), 0) << command << "\n" << ReadWholeFile(File("openssl.log"));
  }

  TempFolder folder_;
};

}  // namespace lossd::test

#endif  // LOSSD_TESTS_SUPPORT_TEMP_FOLDER_H_
