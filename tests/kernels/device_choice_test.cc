// SPDX-License-Identifier: Apache-2.0
// Tests of device_choice.h and exchange_times.h: which device is chosen, how GPUs are shared, heartbeats, and
// the clock of busy time.
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

// ---- Device choice ----

namespace lossd::kernels::device_choice_test {
namespace {

using ::testing::HasSubstr;

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

}  // namespace
}  // namespace lossd::kernels::device_choice_test

// ---- Sharing of GPUs ----

namespace lossd::kernels::gpu_sharing_test {
namespace {

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

}  // namespace
}  // namespace lossd::kernels::gpu_sharing_test

// ---- Heartbeat ----

namespace lossd::kernels::heartbeat_test {
namespace {

TEST(HeartbeatTest, SilenceIsTheTimeSinceTheLastBeat) {
  Heartbeat beating;
  Heartbeat silent;
  absl::SleepFor(absl::Milliseconds(50));
  beating.Beat();
  const absl::Duration since_the_beat = beating.Silence();
  EXPECT_GE(since_the_beat, absl::ZeroDuration());
  EXPECT_GE(silent.Silence(), since_the_beat + absl::Milliseconds(50));
}

}  // namespace
}  // namespace lossd::kernels::heartbeat_test

// ---- Busy clock ----

namespace lossd::kernels::busy_clock_test {
namespace {

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

}  // namespace
}  // namespace lossd::kernels::busy_clock_test
