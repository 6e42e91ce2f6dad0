// SPDX-License-Identifier: Apache-2.0
// A simulated host for a server: its memory (FakeHost) and its service manager (FakeServiceManager).
#ifndef LOSSD_TESTS_SUPPORT_FAKE_HOST_H_
#define LOSSD_TESTS_SUPPORT_FAKE_HOST_H_

#include <gtest/gtest.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "tests/support/temp_folder.h"

namespace lossd::test {

// A folder with files of /proc and /sys/fs/cgroup, as on a system with the given memory.
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
  // Adds a cgroup of version 2, mounted at /sys/fs/cgroup. `cache` is the part of its memory that is page
  // cache.
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

// A service manager for tests: a socket whose path is in NOTIFY_SOCKET. The object sets this variable, and
// the variables of a watchdog, for programs that are started while it exists. Thread-compatible.
class FakeServiceManager {
 public:
  enum class Kind { kPath, kAbstract };

  // An infinite `watchdog` means: no watchdog.
  explicit FakeServiceManager(Kind kind = Kind::kPath, absl::Duration watchdog = absl::InfiniteDuration()) {
    const std::string path = folder_.File("notify");
    const std::string address = kind == Kind::kPath ? path : "@" + path;
    descriptor_ = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    sockaddr_un local = {};
    local.sun_family = AF_UNIX;
    EXPECT_LT(address.size(), sizeof(local.sun_path));
    std::copy(address.begin(), address.end(), local.sun_path);
    if (kind == Kind::kAbstract) local.sun_path[0] = '\0';
    const size_t bytes = offsetof(sockaddr_un, sun_path) + address.size() + (kind == Kind::kPath ? 1 : 0);
    EXPECT_EQ(bind(descriptor_, reinterpret_cast<sockaddr*>(&local), static_cast<socklen_t>(bytes)), 0);
    setenv("NOTIFY_SOCKET", address.c_str(), 1);
    if (watchdog != absl::InfiniteDuration())
      setenv("WATCHDOG_USEC", absl::StrCat(absl::ToInt64Microseconds(watchdog)).c_str(), 1);
  }
  ~FakeServiceManager() {
    for (const char* name : {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}) unsetenv(name);
    close(descriptor_);
  }
  FakeServiceManager(const FakeServiceManager&) = delete;
  FakeServiceManager& operator=(const FakeServiceManager&) = delete;

  // The next message; nullopt if none comes within `limit`.
  std::optional<std::string> Next(absl::Duration limit) const {
    pollfd ready = {.fd = descriptor_, .events = POLLIN, .revents = 0};
    if (poll(&ready, 1, static_cast<int>(absl::ToInt64Milliseconds(limit))) != 1) return std::nullopt;
    char text[4096];
    const ssize_t bytes = recv(descriptor_, text, sizeof(text), 0);
    return bytes < 0 ? std::nullopt : std::make_optional<std::string>(text, static_cast<size_t>(bytes));
  }

  // The next message that contains `text`; messages before it are dropped. "" if none comes for a long time.
  std::string NextWith(absl::string_view text) const {
    while (const std::optional<std::string> message = Next(absl::Minutes(2))) {
      if (absl::StrContains(*message, text)) return *message;
    }
    ADD_FAILURE() << "nothing with \"" << text << "\" came";
    return "";
  }

 private:
  TempFolder folder_;
  int descriptor_ = -1;
};

}  // namespace lossd::test

#endif  // LOSSD_TESTS_SUPPORT_FAKE_HOST_H_
