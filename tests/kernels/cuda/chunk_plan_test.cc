#include "kernels/cuda/chunk_plan.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace lossd::kernels::cuda {
namespace {

using ::testing::_;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;

constexpr DeviceLimits kHopper = {.has_clusters = true, .fused_clusters = 66, .has_branches = true};

// A chunk of 8192 rows of (4096, 128256) in bf16, and what is done with it.
struct Case {
  LossOptions options;
  RowLossParams loss;
  FilterShape filter = {.chunk_rows = 8192, .vocab = 128256, .padded_vocab = 128256, .padded_hidden = 4096};
  DeviceLimits limits = kHopper;
  FusedLoss fused_loss = FusedLoss::kWhereFaster;

  Case() {
    loss.dtype = DType::kBFloat16;
    loss.ld = loss.vocab = 128256;
    loss.rows = loss.padded_rows = 8192;
    loss.write_gradient = true;
  }
  ChunkPlan Plan() const { return PlanChunk(options, loss, filter, limits, fused_loss); }
};

TEST(ChunkPlan, ExactLossesOfLargeChunksAreFused) {
  const ChunkPlan plan = Case().Plan();
  EXPECT_EQ(plan.algorithm, Algorithm::kExact);
  EXPECT_EQ(plan.why_exact, "exact was asked for");
  EXPECT_TRUE(plan.fused());
}

TEST(ChunkPlan, FilteredChunksNeedTheirLogits) {
  Case c;
  for (Algorithm algorithm : {Algorithm::kFiltered, Algorithm::kAuto}) {
    c.options.algorithm = algorithm;
    const ChunkPlan plan = c.Plan();
    EXPECT_EQ(plan.algorithm, algorithm);
    EXPECT_EQ(plan.why_exact, "");
    EXPECT_THAT(plan.why_not_fused, HasSubstr("logits"));
  }
}

TEST(ChunkPlan, WhatCannotBeFilteredMayBeFused) {
  Case c;
  c.options.algorithm = Algorithm::kAuto;
  c.loss.write_gradient = false;
  EXPECT_EQ(c.Plan().why_exact, "no gradient is wanted");
  EXPECT_TRUE(c.Plan().fused());
  c.loss.write_gradient = true;
  c.limits.has_branches = false;
  EXPECT_THAT(c.Plan().why_exact, HasSubstr("driver"));
  EXPECT_TRUE(c.Plan().fused());
  c.limits.has_branches = true;
  c.loss.any_coef_entropy = true;
  EXPECT_THAT(c.Plan().why_exact, HasSubstr("entropy"));
  EXPECT_THAT(c.Plan().why_not_fused, HasSubstr("entropy"));
}

TEST(ChunkPlan, TheOptionOfTheBackendDecidesWhereSizeWould) {
  Case c;
  c.fused_loss = FusedLoss::kNever;
  EXPECT_EQ(c.Plan().why_not_fused, "switched off");
  c.fused_loss = FusedLoss::kWherePossible;
  c.loss.rows = c.loss.padded_rows = 8;
  EXPECT_TRUE(c.Plan().fused());
  c.fused_loss = FusedLoss::kWhereFaster;
  EXPECT_EQ(c.Plan().why_not_fused, "few rows");
  c.limits.fused_clusters = 0;
  c.fused_loss = FusedLoss::kWherePossible;
  EXPECT_THAT(c.Plan().why_not_fused, HasSubstr("Hopper"));
}

TEST(ChunkPlan, GradientsAreOwnProductsWhereTheyAreFaster) {
  Case c;
  EXPECT_TRUE(c.Plan().own_products());
  c.loss.rows = c.loss.padded_rows = 760;
  EXPECT_FALSE(c.Plan().own_products());
  c.loss.rows = c.loss.padded_rows = 2048;
  c.limits.fused_clusters = 0;
  EXPECT_THAT(c.Plan().why_library_products, HasSubstr("Hopper"));
}

TEST(ChunkPlan, TheOptionOfTheBackendHoldsForProductsToo) {
  Case c;
  c.fused_loss = FusedLoss::kNever;
  EXPECT_EQ(c.Plan().why_library_products, "switched off");
  c.fused_loss = FusedLoss::kWherePossible;
  EXPECT_TRUE(c.Plan().own_products());
  c.loss.write_gradient = false;
  EXPECT_EQ(c.Plan().why_library_products, "no gradient is wanted");
}

TEST(ChunkPlan, DescribesWhatItChose) {
  Case c;
  EXPECT_THAT(Describe(c.Plan()),
              ElementsAre(Choice{.what = "gradients", .choice = "exact", .reason = "exact was asked for"},
                          Choice{.what = "loss", .choice = "in the logits product"},
                          Choice{.what = "hidden gradient", .choice = "own product"},
                          Choice{.what = "weight gradient", .choice = "own product"}));
  c.options.algorithm = Algorithm::kAuto;
  EXPECT_THAT(Describe(c.Plan()), ElementsAre(Field(&Choice::choice, "auto"),
                                              Field(&Choice::choice, "after the logits product"), _, _));
  for (const Choice& choice : Describe(c.Plan())) {
    EXPECT_EQ(choice.reason.empty(), choice.choice == "own product") << choice.what;
  }
}

TEST(ChunkPlan, DescribesTheNormIfThereIsOne) {
  ChunkPlan plan = Case().Plan();
  plan.norm = NormPlan{NormRows::kRegisters, ""};
  const Choice forward = {.what = "norm", .choice = "rows in registers"};
  EXPECT_THAT(Describe(plan), ElementsAre(_, _, _, _, forward));
  plan.norm_gradient = NormPlan{NormRows::kWarpCopies, "short rows"};
  EXPECT_THAT(Describe(plan), ElementsAre(_, _, _, _, forward,
                                          Choice{"norm gradient", "rows by copies of warps", "short rows"}));
}

}  // namespace
}  // namespace lossd::kernels::cuda
