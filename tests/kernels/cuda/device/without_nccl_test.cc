// SPDX-License-Identifier: Apache-2.0
// A build without NCCL's header says so, wherever NCCL is asked for.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/device/collectives.h"

namespace lossd::kernels::cuda::without_nccl_test {
namespace {

using ::testing::HasSubstr;

void ExpectMissing(const absl::Status& status) {
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("built without it (libnccl-dev)"));
}

TEST(WithoutNcclTest, ItIsMissing) {
  ExpectMissing(Nccl::CheckLoads());
  ExpectMissing(Nccl::Version().status());
  ExpectMissing(Nccl::NewId().status());
  ExpectMissing(Nccl::Connect({0, 1}).status());
  ExpectMissing(Nccl::Join(0, {1, 2}, "", absl::Seconds(1)).status());
}

}  // namespace
}  // namespace lossd::kernels::cuda::without_nccl_test
