// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/path_memory.h"

#include "gtest/gtest.h"

namespace lossd::kernels::cuda::path_memory_test {
namespace {

TEST(PathClaims, ARegionIsAsLargeAsTheLargestClaim) {
  PathClaims claims;
  EXPECT_EQ(claims[Region::kLogits], 0);
  claims.Claim(Region::kLogits, 300);
  claims.Claim(Region::kLogits, 200);
  claims.Claim(Region::kFilter, 7);
  EXPECT_EQ(claims[Region::kLogits], 300);
  EXPECT_EQ(claims[Region::kFilter], 7);
  EXPECT_EQ(claims[Region::kRules], 0);
}

TEST(PathMemory, WhatIsNotClaimedIsNull) {
  PathMemory memory;
  uint8_t bytes[8];
  memory[Region::kTargetDots] = bytes;
  EXPECT_EQ(static_cast<void*>(memory.At<float>(Region::kTargetDots)), bytes);
  EXPECT_EQ(memory.At<float>(Region::kRules), nullptr);
}

}  // namespace
}  // namespace lossd::kernels::cuda::path_memory_test
