// SPDX-License-Identifier: Apache-2.0
// The linked lossd program refuses heads that are larger than what the system lets it have: it is neither
// killed nor does it end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cpp/client.h"
#include "kernels/host_memory.h"
#include "tests/support/server_process.h"

namespace lossd::memory_limits_test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kGib = int64_t{1} << 30;

class MemoryLimitsTest : public ::testing::Test {
 protected:
  absl::Status CreateHead(const std::string& name, uint64_t hidden_size, uint64_t vocab_size) {
    auto client = client::Client::Connect({.target = server_.target()});
    if (!client.ok()) return client.status();
    v1::CreateHeadRequest request;
    request.mutable_spec()->set_name(name);
    request.mutable_spec()->set_hidden_size(hidden_size);
    request.mutable_spec()->set_vocab_size(vocab_size);
    return (*client)->CreateHead(request).status();
  }
  void ExpectRefused(uint64_t hidden_size, uint64_t vocab_size, const std::string& why) {
    const absl::Status status = CreateHead("large", hidden_size, vocab_size);
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
    EXPECT_THAT(std::string(status.message()), HasSubstr("memory_reserve_bytes keeps 64.0 MiB free"));
    EXPECT_TRUE(server_.Running());
    EXPECT_EQ(CreateHead("small", 8, 100), absl::OkStatus());
  }

  test::ServerProcess server_{LOSSD_BINARY, {"--memory_reserve_bytes=64MiB", "--retained_bytes=4MiB"}};
};

TEST_F(MemoryLimitsTest, LargerThanTheMachine) {
  const auto host = kernels::HostMemory().Available();
  ASSERT_TRUE(host.has_value());
  // Weight, gradient and both moments take 16 bytes an element.
  ExpectRefused(8192, static_cast<uint64_t>(host->bytes / (16 * 8192)) + 1000, " GiB available");
}

// As after ulimit -v.
TEST_F(MemoryLimitsTest, LargerThanTheProcessMayBe) {
  std::ifstream file(absl::StrCat("/proc/", server_.pid(), "/statm"));
  int64_t pages = 0;
  ASSERT_TRUE(file >> pages);
  // Threads that are still to start reserve some hundred MiB of addresses.
  const rlim_t limit = static_cast<rlim_t>(pages * 4096 + 3 * kGib);
  const rlimit limits{limit, limit};
  if (pages * 4096 > 1000 * kGib) GTEST_SKIP() << "a sanitizer reserves most addresses";
  ASSERT_EQ(prlimit(server_.pid(), RLIMIT_AS, &limits, nullptr), 0);
  ExpectRefused(1024, 262'144, "\"Max address space\" of the process is ");
}

// A control group of its own below this one, if the machine allows that.
class Group {
 public:
  Group(int64_t limit, pid_t member) {
    for (const auto& line : absl::StrSplit(test::ReadWholeFile("/proc/self/cgroup"), '\n')) {
      const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
      if (parts.size() != 3) continue;
      if (parts[1] == "memory")
        Make("/sys/fs/cgroup/memory" + parts[2], "memory.limit_in_bytes", limit, member);
      if (parts[0] == "0" && !made_) Make("/sys/fs/cgroup" + parts[2], "memory.max", limit, member);
    }
  }
  ~Group() {
    std::error_code ignored;
    if (!folder_.empty()) std::filesystem::remove(folder_, ignored);
  }
  bool made() const { return made_; }

 private:
  void Make(const std::string& parent, const std::string& file, int64_t limit, pid_t member) {
    std::error_code error;
    const std::string folder = absl::StrCat(parent, "/lossd_test_", member);
    if (!std::filesystem::create_directory(folder, error)) return;
    folder_ = folder;
    made_ = std::filesystem::exists(absl::StrCat(folder, "/", file)) &&
            (std::ofstream(absl::StrCat(folder, "/", file)) << limit).flush() &&
            (std::ofstream(folder + "/cgroup.procs") << member).flush();
  }

  std::string folder_;
  bool made_ = false;
};

TEST_F(MemoryLimitsTest, LargerThanTheControlGroupMayBe) {
  const Group group(kGib, server_.pid());
  if (!group.made()) GTEST_SKIP() << "this machine does not allow a control group";
  ExpectRefused(1024, 65'536, absl::StrCat("lossd_test_", server_.pid(), " may have 1.00 GiB"));
  server_.Kill();
}

}  // namespace
}  // namespace lossd::memory_limits_test
