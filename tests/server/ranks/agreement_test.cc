// SPDX-License-Identifier: Apache-2.0
#include "server/ranks/agreement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"

namespace lossd::ranks::agreement_test {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;

v1::Hello Worker(const Settings& settings) {
  v1::Hello hello;
  hello.set_rank(2);
  for (const auto& [name, value] : settings) {
    v1::Setting* const setting = hello.add_settings();
    setting->set_name(name);
    setting->set_value(value);
  }
  return hello;
}

v1::Hello WorkerOf(const std::string& device) {
  return Worker(SettingsOf({}, {.name = "cuda", .device = device}));
}

void ExpectRefused(const absl::Status& status, const std::string& message) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr(message));
}

TEST(AgreementTest, EverySettingHasToBeTheSame) {
  const Settings leader = {{"version", "1.2"}, {"split", "any"}};
  EXPECT_TRUE(CheckAgreement(leader, {}, Worker(leader)).ok());
  ExpectRefused(CheckAgreement(leader, {}, Worker({{"version", "1.2"}, {"split", "rows"}})),
                "rank 2: split must be what rank 0 has, any, got rows");
  ExpectRefused(CheckAgreement(leader, {}, Worker({{"split", "any"}})),
                "rank 2: version must be what rank 0 has, 1.2, got nothing");
}

TEST(AgreementTest, WhoeverSaysThatItIsAWorkerHearsItsOwnValueAlone) {
  const absl::Status refusal =
      CheckAgreement({{"split", "any"}}, {.device_bytes = 7}, Worker({{"split", "rows"}}), Listener::kWorker);
  EXPECT_EQ(refusal.message(), "rank 2: split must be what rank 0 has (its log says what that is), got rows");
  const absl::Status device = CheckAgreement({}, {.device_bytes = 777}, Worker({}), Listener::kWorker);
  EXPECT_THAT(std::string(device.message()), ::testing::Not(HasSubstr("777")));
}

// Whose settings they are: those of rank 2 of processes with two devices are of process 1.
TEST(AgreementTest, ProcessesOfSeveralDevicesAreNamed) {
  const Settings leader = {{"version", "1.2"}, {kDevices, "2"}, {"split", "any"}};
  const auto worker = [](const std::string& devices, const std::string& split) {
    return Worker({{"version", "1.2"}, {kDevices, devices}, {"split", split}});
  };
  EXPECT_TRUE(CheckAgreement(leader, {}, worker("2", "any")).ok());
  ExpectRefused(CheckAgreement(leader, {}, worker("2", "rows")),
                "process 1: split must be what process 0 has, any, got rows");
  ExpectRefused(CheckAgreement(leader, {}, worker("1", "any")),
                "process 2: number of devices must be what process 0 has, 2, got 1");
  ExpectRefused(CheckAgreement({{kDevices, "1"}}, {}, worker("2", "any")), "process 1: number of devices");
  // Another version may not know of them, and says what it likes.
  ExpectRefused(CheckAgreement(leader, {}, Worker({{"version", "1.1"}})), "process 2: version must be");
  for (const char* const devices : {"0", "-1", "many", "99999999999"}) {
    ExpectRefused(CheckAgreement(leader, {}, worker(devices, "any")), "process 2: number of devices must be");
  }
}

TEST(AgreementTest, AWorkerHasARankBesideTheLeaders) {
  v1::Hello worker;
  for (const uint32_t rank : {0u, 4u, UINT32_MAX}) {
    worker.set_rank(rank);
    ExpectRefused(CheckRank(worker, 4), absl::StrCat("rank must be in [1, 4) for a worker, got ", rank));
  }
  worker.set_rank(3);
  EXPECT_TRUE(CheckRank(worker, 4).ok());
}

TEST(AgreementTest, TheHashOfTheMessagesIsOfTheFileAlone) {
  EXPECT_THAT(ProtocolHash(), MatchesRegex("[0-9a-f]+"));
  EXPECT_EQ(ProtocolHash().size(), 16u);
  EXPECT_EQ(ProtocolHash(), ProtocolHash());
}

TEST(AgreementTest, GpusHaveToBeOfTheSameKindWhateverTheirNumber) {
  const Settings leader = SettingsOf({}, {.name = "cuda", .device = "cuda:0 NVIDIA H200"});
  EXPECT_TRUE(CheckAgreement(leader, {}, WorkerOf("cuda:7 NVIDIA H200")).ok());
  ExpectRefused(CheckAgreement(leader, {}, WorkerOf("cuda:0 NVIDIA H100 PCIe")),
                "rank 2: kind of device must be what rank 0 has, NVIDIA H200, got NVIDIA H100 PCIe");
}

// The same product may have memory of several sizes; drivers keep a little of it.
TEST(AgreementTest, GpusHaveToHaveTheSameMemory) {
  constexpr int64_t kGiB = int64_t{1} << 30;
  v1::Hello worker = WorkerOf("cuda:0 NVIDIA A100");
  const auto check = [&](int64_t leader_bytes, int64_t worker_bytes) {
    worker.set_device_bytes(worker_bytes);
    return CheckAgreement({}, {.device_bytes = leader_bytes}, worker);
  };
  EXPECT_TRUE(check(80 * kGiB, 80 * kGiB).ok());
  EXPECT_TRUE(check(80 * kGiB, 80 * kGiB - kGiB / 2).ok());
  EXPECT_TRUE(check(80 * kGiB - kGiB / 2, 80 * kGiB).ok());
  ExpectRefused(check(80 * kGiB, 40 * kGiB),
                "rank 2: memory of the device must be what rank 0 has, 85899345920 bytes (give or take a "
                "hundredth), got 42949672960");
  ExpectRefused(check(40 * kGiB, 80 * kGiB), "got 85899345920");
  ExpectRefused(check(80 * kGiB, 0), "got 0");
  EXPECT_TRUE(check(0, 0).ok()) << "CPUs";
}

// A rank computes its rows or its classes by itself: threads do not decide who exchanges what.
TEST(AgreementTest, CpusMayHaveOtherNumbersOfThreads) {
  const Settings leader = SettingsOf({}, {.name = "cpu", .device = "1 thread, OpenBLAS"});
  const auto worker = [](const std::string& device) {
    return Worker(SettingsOf({}, {.name = "cpu", .device = device}));
  };
  EXPECT_TRUE(CheckAgreement(leader, {}, worker("16 threads, OpenBLAS")).ok());
  ExpectRefused(CheckAgreement(leader, {}, worker("1 thread, BLIS")), "rank 2: kind of device");
}

TEST(AgreementTest, ThoseThatHaveNotComeAreNamed) {
  EXPECT_EQ(NotCome({2}, 4, absl::Seconds(5)).message(),
            "rank 2 of 4 has not come within 5s (--rank_timeout)");
  EXPECT_EQ(NotCome({1, 3}, 4, absl::Minutes(1)).message(),
            "ranks 1, 3 of 4 have not come within 1m (--rank_timeout)");
  EXPECT_EQ(NotCome({1}, 2, absl::Minutes(1), absl::InvalidArgumentError("why")).message(),
            "rank 1 of 2 has not come within 1m (--rank_timeout); the last that was refused: why");
}

}  // namespace
}  // namespace lossd::ranks::agreement_test
