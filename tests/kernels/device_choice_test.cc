// SPDX-License-Identifier: Apache-2.0
// Tests of device_choice.h, exchange_times.h and host_memory.h: which device is chosen, how GPUs are shared,
// the clock of busy time, and what memory a process can have on systems of many kinds.
#include "kernels/device_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/exchange_times.h"
#include "kernels/host_memory.h"
#include "tests/support/fake_host.h"

namespace lossd::kernels::device_choice_test {
namespace {

using ::testing::HasSubstr;

// ---- Device choice ----

const std::vector<std::string>& Uuids() {
  static const auto* const uuids = new std::vector<std::string>{"GPU-01234567-89ab-cdef-0123-456789abcdef",
                                                                "GPU-01239999-0000-0000-0000-000000000000"};
  return *uuids;
}

TEST(DeviceChoiceTest, UuidsAreWrittenAsNvidiaSmiDoes) {
  const char bytes[] = "\x01\x23\x45\x67\x89\xab\xcd\xef\x01\x23\x45\x67\x89\xab\xcd\xef";
  EXPECT_EQ(GpuUuidText(absl::MakeConstSpan(bytes, 16)), Uuids()[0]);
}

TEST(DeviceChoiceTest, IndexesAndUuids) {
  EXPECT_EQ(*FindGpu("0", Uuids()), 0);
  EXPECT_EQ(*FindGpu("1", Uuids()), 1);
  EXPECT_EQ(*FindGpu(Uuids()[1], Uuids()), 1);
  EXPECT_EQ(*FindGpu("gpu-01234", Uuids()), 0);
  EXPECT_EQ(*FindGpu("GPU-01239", Uuids()), 1);
}

TEST(DeviceChoiceTest, Refusals) {
  for (const char* device : {"2", "-1", "99999999999", "", "GPU-", "GPU-0123", "GPU-7", "x", "0x1",
                             "GPU-01234567-89ab-cdef-0123-456789abcdef0"}) {
    const absl::Status status = FindGpu(device, Uuids()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << device;
    EXPECT_THAT(std::string(status.message()), HasSubstr("device must be"));
  }
  EXPECT_THAT(std::string(FindGpu("GPU-0123", Uuids()).status().message()), HasSubstr(Uuids()[1]));
  EXPECT_THAT(std::string(FindGpu("2", Uuids()).status().message()), HasSubstr("GPUs found: 2"));
}

TEST(DeviceChoiceTest, SeveralGpusInTheOrderGiven) {
  EXPECT_THAT(*FindGpus("all", Uuids()), ::testing::ElementsAre(0, 1));
  EXPECT_THAT(*FindGpus("1,0", Uuids()), ::testing::ElementsAre(1, 0));
  EXPECT_THAT(*FindGpus(" 1 , GPU-01234", Uuids()), ::testing::ElementsAre(1, 0));
  EXPECT_THAT(*FindGpus("1", Uuids()), ::testing::ElementsAre(1));
}

TEST(DeviceChoiceTest, RefusalsOfSeveralGpus) {
  for (const char* devices : {"", "0,", ",1", "0,2", "0,,1", "ALL", "all,0", "0;1", "0-1", "-1,0"}) {
    const absl::Status status = FindGpus(devices, Uuids()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << devices;
    EXPECT_THAT(std::string(status.message()), HasSubstr("devices must be"));
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("got ", devices)));
  }
  for (const char* devices : {"0,0", "1,0,1", "GPU-01234,0"}) {
    EXPECT_THAT(std::string(FindGpus(devices, Uuids()).status().message()), HasSubstr("name each GPU once"));
  }
}

TEST(DeviceChoiceTest, UnlikeGpusAreRefused) {
  EXPECT_TRUE(CheckAlike({"cuda:0 NVIDIA H200", "cuda:3 NVIDIA H200"}).ok());
  const absl::Status status = CheckAlike({"cuda:0 NVIDIA H200", "cuda:1 NVIDIA A100-SXM4-80GB"});
  EXPECT_EQ(status.message(),
            "devices must be alike, as cuda:0 NVIDIA H200, got cuda:1 NVIDIA A100-SXM4-80GB");
}

// ---- Sharing of GPUs ----

constexpr char kPriority[] = "CUDA_MPS_CLIENT_PRIORITY";
constexpr char kShare[] = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";

class GpuSharingTest : public ::testing::Test {
 protected:
  GpuSharingTest() { Clear(); }
  ~GpuSharingTest() override { Clear(); }
  static void Clear() {
    unsetenv(kPriority);
    unsetenv(kShare);
  }
};

TEST_F(GpuSharingTest, WithoutMpsProgramsTakeTurnsWhateverTheEnvironmentSays) {
  setenv(kPriority, "1", 1);
  EXPECT_EQ(GpuSharing(false), "time slices");
}

TEST_F(GpuSharingTest, UnderMpsItSaysPriorityAndShare) {
  EXPECT_EQ(GpuSharing(true), "MPS, client priority 0 (normal)");
  setenv(kPriority, "1", 1);
  EXPECT_EQ(GpuSharing(true), "MPS, client priority 1 (below normal)");
  setenv(kShare, "25", 1);
  EXPECT_EQ(GpuSharing(true), "MPS, client priority 1 (below normal), 25 % of the multiprocessors");
  for (const char* all : {"100", "0", "-3", "many", ""}) {
    setenv(kShare, all, 1);
    EXPECT_EQ(GpuSharing(true), "MPS, client priority 1 (below normal)") << all;
  }
}

// ---- Busy clock ----

BusyClock::Clock::time_point At(int seconds) {
  return BusyClock::Clock::time_point() + std::chrono::seconds(seconds);
}

TEST(BusyClockTest, TimesThatOverlapCountOnce) {
  BusyClock clock;
  EXPECT_EQ(clock.Total(At(5)), absl::ZeroDuration());
  clock.Begin(At(10));
  EXPECT_EQ(clock.Total(At(11)), absl::Seconds(1)) << "what is under way counts";
  clock.Begin(At(12));
  clock.End(At(14));
  EXPECT_EQ(clock.Total(At(15)), absl::Seconds(5));
  clock.End(At(16));
  EXPECT_EQ(clock.Total(At(100)), absl::Seconds(6));
  clock.Begin(At(100));
  clock.End(At(103));
  EXPECT_EQ(clock.Total(At(200)), absl::Seconds(9));
  clock.Add(std::chrono::seconds(4));
  EXPECT_EQ(clock.Total(At(200)), absl::Seconds(13));
}

// ---- Memory of the host ----
// What a process can have on systems of many kinds, described by their files.

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
}  // namespace lossd::kernels::device_choice_test
