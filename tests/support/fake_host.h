// SPDX-License-Identifier: Apache-2.0
// Files of /proc and /sys/fs/cgroup in a folder, as a system with so much memory has them.
#ifndef LOSSD_TESTS_SUPPORT_FAKE_HOST_H_
#define LOSSD_TESTS_SUPPORT_FAKE_HOST_H_

#include <cstdint>
#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "tests/support/temp_folder.h"

namespace lossd::test {

class FakeHost {
 public:
  const std::string& root() const { return folder_.path(); }

  void Write(absl::string_view file, absl::string_view content) const {
    const std::filesystem::path path = absl::StrCat(root(), file);
    std::filesystem::create_directories(path.parent_path());
    WriteWholeFile(path, content);
  }
  void SetAvailable(int64_t bytes) const {
    Write("/proc/meminfo",
          absl::StrCat("MemTotal:   1000000000 kB\nMemFree: 1 kB\nMemAvailable: ", bytes >> 10, " kB\n"));
  }
  void SetStatus(absl::string_view field, int64_t bytes) const {
    Write("/proc/self/status", absl::StrCat("Name:\tlossd\n", field, ":\t ", bytes >> 10, " kB\n"));
  }
  // A group of the second version, mounted at /sys/fs/cgroup, and what of its memory is page cache.
  void SetGroup(absl::string_view path, absl::string_view max, int64_t current, int64_t cache) const {
    const std::string folder = absl::StrCat("/sys/fs/cgroup", path, "/");
    Write(folder + "memory.max", absl::StrCat(max, "\n"));
    Write(folder + "memory.high", "max\n");
    Write(folder + "memory.current", absl::StrCat(current, "\n"));
    Write(folder + "memory.stat", absl::StrCat("anon 5\ninactive_file ", cache, "\nactive_file 0\n"));
  }

 private:
  const TempFolder folder_;
};

}  // namespace lossd::test

#endif  // LOSSD_TESTS_SUPPORT_FAKE_HOST_H_
