// SPDX-License-Identifier: Apache-2.0
// A service manager for tests: the socket that NOTIFY_SOCKET names, which it sets with the variables of a
// watchdog for programs that are started while the object is there. Thread-compatible.
#ifndef LOSSD_TESTS_SUPPORT_FAKE_SERVICE_MANAGER_H_
#define LOSSD_TESTS_SUPPORT_FAKE_SERVICE_MANAGER_H_

#include <gtest/gtest.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "tests/support/temp_folder.h"

namespace lossd::test {

class FakeServiceManager {
 public:
  enum class Kind { kPath, kAbstract };

  // `watchdog` infinite: none.
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

  // The next message that has `text`; others before it are dropped. "" if none comes for a long time.
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

#endif  // LOSSD_TESTS_SUPPORT_FAKE_SERVICE_MANAGER_H_
