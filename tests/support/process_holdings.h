// SPDX-License-Identifier: Apache-2.0
// What a server holds for its clients, as the system and the server itself count it: a test compares it with
// what it was before clients came.
//
// Thread-compatible.
#ifndef LOSSD_TESTS_SUPPORT_PROCESS_HOLDINGS_H_
#define LOSSD_TESTS_SUPPORT_PROCESS_HOLDINGS_H_

#include <gtest/gtest.h>
#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <ostream>
#include <string>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"

namespace lossd::test {

struct Holdings {
  uint64_t staging = 0;      // bytes, as GetServer says
  int64_t descriptors = 0;   // connections, sessions, processes and memory
  int64_t mappings = 0;      // of memory that is shared with clients
  int64_t shared_bytes = 0;  // of such memory that is there

  bool operator==(const Holdings&) const = default;
};

inline std::ostream& operator<<(std::ostream& out, const Holdings& holdings) {
  return out << holdings.staging << " bytes of staging memory, " << holdings.descriptors << " descriptors, "
             << holdings.mappings << " mappings, " << holdings.shared_bytes << " shared bytes";
}

inline int64_t DescriptorsOf(pid_t process) {
  std::error_code error;
  const std::filesystem::directory_iterator folder(absl::StrCat("/proc/", process, "/fd"), error);
  return std::distance(begin(folder), end(folder));
}

// Those of memory that has no file (memfd), as regions of the host and of a GPU that is played are.
inline int64_t SharedMappingsOf(pid_t process) {
  std::ifstream maps(absl::StrCat("/proc/", process, "/maps"));
  int64_t count = 0;
  for (std::string line; std::getline(maps, line);) count += absl::StrContains(line, "/memfd:") ? 1 : 0;
  return count;
}

inline int64_t SharedBytesOf(pid_t process) {
  std::ifstream status(absl::StrCat("/proc/", process, "/status"));
  for (std::string line; std::getline(status, line);) {
    int64_t kibibytes = 0;
    absl::string_view text = line;
    if (!absl::ConsumePrefix(&text, "RssShmem:") || !absl::ConsumeSuffix(&text, "kB")) continue;
    if (absl::SimpleAtoi(absl::StripAsciiWhitespace(text), &kibibytes)) return kibibytes << 10;
  }
  return 0;
}

// `client`: of that server, with nothing of it in shared memory.
inline Holdings HoldingsOf(pid_t process, client::Client& client) {
  const auto server = client.GetServer();
  EXPECT_TRUE(server.ok()) << server.status();
  return {.staging = server.ok() ? server->memory().staging() : 0,
          .descriptors = DescriptorsOf(process),
          .mappings = SharedMappingsOf(process),
          .shared_bytes = SharedBytesOf(process)};
}

// The same once nothing of it changes any more: clients that have ended may still be noticed.
inline Holdings SettledHoldingsOf(pid_t process, client::Client& client) {
  constexpr int kAlike = 20;
  Holdings last;
  for (int alike = 0; alike < kAlike; absl::SleepFor(absl::Milliseconds(10))) {
    const Holdings now = HoldingsOf(process, client);
    alike = now == last ? alike + 1 : 0;
    last = now;
  }
  return last;
}

// Waits until the server holds no more than `before`, but for `touched` bytes: pages of regions that were
// there, which are filled as they are used.
inline testing::AssertionResult BackTo(const Holdings& before, pid_t process, client::Client& client,
                                       int64_t touched = 0) {
  const absl::Time end = absl::Now() + absl::Seconds(120);
  while (true) {
    const Holdings now = HoldingsOf(process, client);
    if (now.staging == before.staging && now.descriptors <= before.descriptors &&
        now.mappings == before.mappings && now.shared_bytes <= before.shared_bytes + touched)
      return testing::AssertionSuccess();
    if (absl::Now() > end) return testing::AssertionFailure() << now << "; before: " << before;
    absl::SleepFor(absl::Milliseconds(5));
  }
}

}  // namespace lossd::test

#endif  // LOSSD_TESTS_SUPPORT_PROCESS_HOLDINGS_H_
