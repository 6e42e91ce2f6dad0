// SPDX-License-Identifier: Apache-2.0
#include "kernels/device_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

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
