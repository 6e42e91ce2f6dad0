// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/path_claims.h"

#include <cstdint>

#include "gtest/gtest.h"
#include "kernels/cuda/heads/head_memory.h"

namespace lossd::kernels::cuda::path_claims_test {
namespace {

constexpr int kMultiprocessors = 132;

HeadConfig Config(Logits logits, DType compute) {
  return {.hidden_size = 2304, .vocab_size = 256'000, .compute_dtype = compute, .logits = logits};
}

PathClaims Claims(const HeadConfig& config, bool fused = true) {
  return ClaimsOf(config, SizesFor(config, int64_t{2} << 30, 16384, kMultiprocessors, fused));
}

TEST(PathClaims, TheLogitsOfAChunkAreClaimedOnlyWhereTheyAreStored) {
  const HeadConfig stored = Config(Logits::kStored, DType::kBFloat16);
  const HeadSizes sizes = SizesFor(stored, int64_t{2} << 30, 16384, kMultiprocessors, true);
  EXPECT_EQ(ClaimsOf(stored, sizes)[Region::kLogits], sizes.chunk_rows * 256'000 * 2);
  EXPECT_EQ(ClaimsOf(stored, sizes)[Region::kRules], 0);
  EXPECT_EQ(ClaimsOf(stored, sizes)[Region::kRunningRows], 0);
  const PathClaims recomputed = Claims(Config(Logits::kRecomputed, DType::kBFloat16));
  EXPECT_LE(recomputed[Region::kLogits], int64_t{64} << 20);
  EXPECT_GT(recomputed[Region::kRules], 0);
}

TEST(PathClaims, FusedRowsAreClaimedWhereLossesCanBeFused) {
  for (const Logits logits : {Logits::kStored, Logits::kRecomputed}) {
    EXPECT_GT(Claims(Config(logits, DType::kBFloat16))[Region::kFusedRows], 0);
    EXPECT_EQ(Claims(Config(logits, DType::kBFloat16), false)[Region::kFusedRows], 0);
  }
}

// The row loss kernel reads the target's logit from stored fp32 logits.
TEST(PathClaims, TargetDotsAreClaimedUnlessLogitsAreStoredInFp32) {
  EXPECT_EQ(Claims(Config(Logits::kStored, DType::kFloat32))[Region::kTargetDots], 0);
  EXPECT_GT(Claims(Config(Logits::kStored, DType::kFloat16))[Region::kTargetDots], 0);
  EXPECT_GT(Claims(Config(Logits::kRecomputed, DType::kFloat32))[Region::kTargetDots], 0);
}

TEST(PathClaims, TheBiasOfStoredLogitsNeedsColumnSums) {
  HeadConfig config = Config(Logits::kStored, DType::kBFloat16);
  EXPECT_EQ(Claims(config)[Region::kColumnSums], 0);
  config.has_bias = true;
  EXPECT_GT(Claims(config)[Region::kColumnSums], 0);
  config.trainable = false;
  EXPECT_EQ(Claims(config)[Region::kColumnSums], 0);
}

}  // namespace
}  // namespace lossd::kernels::cuda::path_claims_test
