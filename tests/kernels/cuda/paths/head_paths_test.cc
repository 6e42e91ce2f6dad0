#include "kernels/cuda/paths/head_paths.h"

#include <cstdint>

#include "gtest/gtest.h"
#include "kernels/cuda/heads/head_memory.h"
#include "kernels/cuda/paths/filtered_recomputed_path.h"
#include "kernels/cuda/paths/filtered_stored_path.h"
#include "kernels/cuda/paths/fused_stored_path.h"
#include "kernels/cuda/paths/recomputed_path.h"
#include "kernels/cuda/paths/sampled_recomputed_path.h"
#include "kernels/cuda/paths/sampled_stored_path.h"
#include "kernels/cuda/paths/stored_path.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int kMultiprocessors = 132;

ChunkPlan PlanOf(Gradients gradients, bool fused) {
  ChunkPlan plan;
  plan.gradients = gradients;
  plan.why_not_fused = fused ? "" : "few rows";
  return plan;
}

// So the order in which the planner asks makes no difference.
TEST(HeadPaths, EveryPlanIsTakenByOnePath) {
  for (const Gradients gradients :
       {Gradients::kExact, Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
    for (const bool fused : {false, true}) {
      const ChunkPlan plan = PlanOf(gradients, fused);
      EXPECT_EQ(StoredPath::Takes(plan) + FusedStoredPath::Takes(plan) + FilteredStoredPath::Takes(plan) +
                    SampledStoredPath::Takes(plan),
                1);
      EXPECT_EQ(RecomputedPath::Takes(plan) + FilteredRecomputedPath::Takes(plan) +
                    SampledRecomputedPath::Takes(plan),
                1);
    }
  }
}

HeadConfig Config(Logits logits, DType compute) {
  return {.hidden_size = 2304, .vocab_size = 256'000, .compute_dtype = compute, .logits = logits};
}

PathClaims Claims(const HeadConfig& config, bool fused = true) {
  return ClaimsOf(config, SizesFor(config, int64_t{2} << 30, 16384, kMultiprocessors, fused));
}

TEST(HeadPaths, TheLogitsOfAChunkAreClaimedOnlyWhereTheyAreStored) {
  const HeadConfig stored = Config(Logits::kStored, DType::kBFloat16);
  const HeadSizes sizes = SizesFor(stored, int64_t{2} << 30, 16384, kMultiprocessors, true);
  EXPECT_EQ(ClaimsOf(stored, sizes)[Region::kLogits], sizes.chunk_rows * 256'000 * 2);
  EXPECT_EQ(ClaimsOf(stored, sizes)[Region::kRules], 0);
  EXPECT_EQ(ClaimsOf(stored, sizes)[Region::kRunningRows], 0);
  const PathClaims recomputed = Claims(Config(Logits::kRecomputed, DType::kBFloat16));
  EXPECT_LE(recomputed[Region::kLogits], int64_t{64} << 20);
  EXPECT_GT(recomputed[Region::kRules], 0);
}

TEST(HeadPaths, FusedRowsAreClaimedWhereLossesCanBeFused) {
  for (const Logits logits : {Logits::kStored, Logits::kRecomputed}) {
    EXPECT_GT(Claims(Config(logits, DType::kBFloat16))[Region::kFusedRows], 0);
    EXPECT_EQ(Claims(Config(logits, DType::kBFloat16), false)[Region::kFusedRows], 0);
  }
}

// The row loss kernel reads the target's logit from stored fp32 logits.
TEST(HeadPaths, TargetDotsAreClaimedUnlessLogitsAreStoredInFp32) {
  EXPECT_EQ(Claims(Config(Logits::kStored, DType::kFloat32))[Region::kTargetDots], 0);
  EXPECT_GT(Claims(Config(Logits::kStored, DType::kFloat16))[Region::kTargetDots], 0);
  EXPECT_GT(Claims(Config(Logits::kRecomputed, DType::kFloat32))[Region::kTargetDots], 0);
}

TEST(HeadPaths, TheBiasOfStoredLogitsNeedsColumnSums) {
  HeadConfig config = Config(Logits::kStored, DType::kBFloat16);
  EXPECT_EQ(Claims(config)[Region::kColumnSums], 0);
  config.has_bias = true;
  EXPECT_GT(Claims(config)[Region::kColumnSums], 0);
  config.trainable = false;
  EXPECT_EQ(Claims(config)[Region::kColumnSums], 0);
}

}  // namespace
}  // namespace lossd::kernels::cuda
