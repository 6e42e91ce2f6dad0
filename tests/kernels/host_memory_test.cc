// SPDX-License-Identifier: Apache-2.0
// What a process can have on systems of many kinds, described by their files.
#include "kernels/host_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/fake_host.h"

namespace lossd::kernels::host_memory_test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kGib = int64_t{1} << 30;
constexpr char kMountV2[] =
    "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
constexpr char kMountV1[] =
    "31 23 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "36 23 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n";

class HostMemoryTest : public ::testing::Test {
 protected:
  HostMemoryTest() { host_.SetAvailable(20 * kGib); }

  void ExpectAvailable(int64_t bytes, const std::string& what) {
    const auto bound = HostMemory(host_.root()).Available();
    ASSERT_TRUE(bound.has_value());
    EXPECT_EQ(bound->bytes, bytes) << bound->what;
    EXPECT_THAT(bound->what, HasSubstr(what));
  }
  // A group of the first version.
  void SetGroupV1(const std::string& path, int64_t limit, int64_t usage, int64_t cache) {
    const std::string folder = "/sys/fs/cgroup/memory" + path + "/memory.";
    host_.Write(folder + "limit_in_bytes", absl::StrCat(limit, "\n"));
    host_.Write(folder + "usage_in_bytes", absl::StrCat(usage, "\n"));
    host_.Write(folder + "stat",
                absl::StrCat("cache 7\ntotal_inactive_file ", cache, "\ntotal_active_file 0\n"));
  }

  const test::FakeHost host_;
};

TEST_F(HostMemoryTest, WithoutFilesNothingIsKnown) {
  EXPECT_FALSE(HostMemory(host_.root() + "/none").Available().has_value());
  EXPECT_EQ(HostMemory(host_.root() + "/none").ResidentBytes(), 0);
}

TEST_F(HostMemoryTest, ThisSystemTells) {
  ASSERT_TRUE(HostMemory().Available().has_value());
  EXPECT_GT(HostMemory().Available()->bytes, 0);
  EXPECT_GT(HostMemory().ResidentBytes(), 0);
}

TEST_F(HostMemoryTest, Available) { ExpectAvailable(20 * kGib, "the system has 20.0 GiB available"); }

TEST_F(HostMemoryTest, GroupsOfTheSecondVersion) {
  host_.Write("/proc/self/mountinfo", kMountV2);
  host_.Write("/proc/self/cgroup", "0::/a/b/c\n");
  host_.SetGroup("/a/b/c", "max", kGib, 0);
  ExpectAvailable(20 * kGib, "available");
  host_.SetGroup("/a/b", "8589934592", 3 * kGib, kGib);
  ExpectAvailable(6 * kGib, "the control group /a/b may have 8.00 GiB and uses 2.00 GiB");
  host_.SetGroup("/a", "5368709120", 6 * kGib, kGib / 2);
  ExpectAvailable(-kGib / 2, "group /a may");
  host_.SetGroup("/a/b/c", "1073741824", kGib / 4, 2 * kGib);
  host_.SetGroup("/a", "max", 6 * kGib, 0);
  ExpectAvailable(kGib, "group /a/b/c");
  host_.Write("/sys/fs/cgroup/a/b/c/memory.high", "536870912\n");
  ExpectAvailable(kGib / 2, "group /a/b/c may have 512 MiB");
}

TEST_F(HostMemoryTest, GroupsOfTheFirstVersion) {
  host_.Write("/proc/self/mountinfo", kMountV1);
  host_.Write("/proc/self/cgroup", "12:cpu,cpuacct:/other\n9:hugetlb,memory:/docker/x\n0::/\n");
  SetGroupV1("/docker/x", 9223372036854771712, kGib, 0);
  ExpectAvailable(20 * kGib, "available");
  SetGroupV1("/docker", 4 * kGib, 2 * kGib, kGib);
  ExpectAvailable(3 * kGib, "group /docker may have 4.00 GiB and uses 1.00 GiB");
}

// The mount shows the container's group as its root, while the path is that of the host, or is "/".
TEST_F(HostMemoryTest, InAContainer) {
  host_.Write("/proc/self/mountinfo",
              "36 23 0:32 /docker/x /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n");
  SetGroupV1("", 2 * kGib, kGib, 0);
  for (const char* path : {"/docker/x", "/", "/docker/x/../y", "/elsewhere"}) {
    host_.Write("/proc/self/cgroup", absl::StrCat("9:memory:", path, "\n"));
    ExpectAvailable(kGib, "may have 2.00 GiB");
  }
  SetGroupV1("/inner", kGib, kGib / 2, 0);
  host_.Write("/proc/self/cgroup", "9:memory:/docker/x/inner\n");
  ExpectAvailable(kGib / 2, "group /inner");
}

TEST_F(HostMemoryTest, LimitsOfTheProcess) {
  host_.SetStatus("VmSize", 3 * kGib);
  host_.Write("/proc/self/limits",
              "Limit                     Soft Limit           Hard Limit           Units     \n"
              "Max data size             unlimited            unlimited            bytes     \n"
              "Max address space         5368709120           unlimited            bytes     \n");
  ExpectAvailable(2 * kGib, "Max address space");
}

TEST_F(HostMemoryTest, FilesThatMakeNoSense) {
  host_.Write("/proc/meminfo", std::string(100'000, 'x') + "\nMemAvailable:\nMemAvailable: -\n");
  host_.Write("/proc/self/cgroup", ":::\n0::\n0::relative\n0::/\n9:memory\n");
  host_.Write("/proc/self/mountinfo",
              "a b\n- - -\n1 2 3 / /sys/fs/cgroup rw - cgroup2\n" + std::string(kMountV2));
  host_.SetGroup("", "many", 1, 1);
  EXPECT_FALSE(HostMemory(host_.root()).Available().has_value());
}

}  // namespace
}  // namespace lossd::kernels::host_memory_test
