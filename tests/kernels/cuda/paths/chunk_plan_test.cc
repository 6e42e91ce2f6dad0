// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/chunk_plan.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace lossd::kernels::cuda::chunk_plan_test {
namespace {

using ::testing::_;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;

constexpr DeviceLimits kHopper = {.has_clusters = true, .fused_clusters = 66, .has_branches = true};

// A chunk of 8192 rows of (4096, 128256) in bf16, and what is done with it.
struct Case {
  LossOptions options;
  ChunkFacts chunk = {{.vocab = 128256}, 8192, 8192, true};
  PlanLimits limits = {
      .filter = {.chunk_rows = 8192, .vocab = 128256, .padded_vocab = 128256, .padded_hidden = 4096},
      .device = kHopper};

  ChunkPlan Plan() const { return PlanChunk(options, chunk, limits); }
  void SetRows(int64_t rows) { chunk.rows = chunk.padded_rows = rows; }
};

TEST(ChunkPlan, ExactLossesOfLargeChunksAreFused) {
  const ChunkPlan plan = Case().Plan();
  EXPECT_EQ(plan.gradients, Gradients::kExact);
  EXPECT_EQ(plan.why_exact, "exact was asked for");
  EXPECT_TRUE(plan.fused());
}

TEST(ChunkPlan, FilteredChunksNeedTheirLogits) {
  Case c;
  c.options.gradients = Gradients::kFiltered;
  const ChunkPlan plan = c.Plan();
  EXPECT_EQ(plan.gradients, Gradients::kFiltered);
  EXPECT_EQ(plan.why_exact, "");
  EXPECT_THAT(plan.why_not_fused, HasSubstr("logits"));
}

TEST(ChunkPlan, SampledChunksAreFusedAsExactOnesAre) {
  Case c;
  for (Gradients gradients : {Gradients::kSampled, Gradients::kAuto}) {
    c.options.gradients = gradients;
    EXPECT_EQ(c.Plan().gradients, gradients);
    EXPECT_TRUE(c.Plan().sampled());
    EXPECT_FALSE(c.Plan().filtered());
    EXPECT_TRUE(c.Plan().fused());
    EXPECT_TRUE(c.Plan().own_gemms());
  }
}

TEST(ChunkPlan, TheUniformPartIsApartWhereItHasAClosedForm) {
  Case c;
  c.options.label_smoothing = 0.1f;
  for (Gradients gradients :
       {Gradients::kExact, Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
    c.options.gradients = gradients;
    EXPECT_EQ(c.Plan().uniform_apart, gradients == Gradients::kSampled);
  }
  c.options.gradients = Gradients::kSampled;
  c.options.softcap = 5.0f;
  EXPECT_FALSE(c.Plan().uniform_apart);
  EXPECT_TRUE(c.Plan().sampled());
}

// Candidates are listed by the pass that computes the loss.
TEST(ChunkPlan, FilteredChunksOfRecomputedLogitsAreFused) {
  Case c;
  c.limits.logits = Logits::kRecomputed;
  for (Gradients gradients : {Gradients::kExact, Gradients::kFiltered}) {
    c.options.gradients = gradients;
    const ChunkPlan plan = c.Plan();
    EXPECT_EQ(plan.gradients, gradients);
    EXPECT_EQ(plan.filtered(), gradients == Gradients::kFiltered);
    EXPECT_TRUE(plan.fused()) << plan.why_not_fused;
    EXPECT_FALSE(plan.own_gemms());
    EXPECT_EQ(Describe(plan).front().choice, Name(gradients));
  }
}

// All parts of a head that is split plan alike, whatever classes they have.
TEST(ChunkPlan, PartsOfAHeadPlanAlike) {
  Case c;
  c.limits.split = true;
  for (const Logits logits : {Logits::kStored, Logits::kRecomputed}) {
    c.limits.logits = logits;
    for (Gradients gradients :
         {Gradients::kExact, Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
      c.options.gradients = gradients;
      const ChunkPlan plan = c.Plan();
      EXPECT_EQ(plan.gradients, gradients) << plan.why_exact;
      EXPECT_EQ(plan.filters_elements, gradients == Gradients::kFiltered);
      EXPECT_EQ(plan.fused(), gradients != Gradients::kFiltered) << "elements are filtered unfused";
    }
  }
  c.options = {.label_smoothing = 0.1f, .gradients = Gradients::kFiltered};
  c.limits.logits = Logits::kStored;
  EXPECT_FALSE(c.Plan().uniform_apart) << "the matrix may have to be multiplied";
  c.limits.logits = Logits::kRecomputed;
  EXPECT_TRUE(c.Plan().uniform_apart);
  // Of two classes each of two devices has one.
  c.chunk.terms.vocab = c.chunk.terms.elsewhere = 1;
  c.options.gradients = Gradients::kSampled;
  EXPECT_EQ(c.Plan().gradients, Gradients::kSampled);
  c.chunk.terms.elsewhere = 0;
  EXPECT_EQ(c.Plan().why_exact, "one class has no gradient");
}

TEST(ChunkPlan, WhatCannotBeFilteredMayBeFused) {
  Case c;
  c.options.gradients = Gradients::kFiltered;
  c.chunk.wants_gradient = false;
  EXPECT_EQ(c.Plan().why_exact, "no gradient is wanted");
  EXPECT_TRUE(c.Plan().fused());
  c.chunk.wants_gradient = true;
  c.limits.device.has_branches = false;
  EXPECT_THAT(c.Plan().why_exact, HasSubstr("driver"));
  EXPECT_TRUE(c.Plan().fused());
  c.limits.device.has_branches = true;
  c.chunk.terms.any_coef_entropy = true;
  EXPECT_THAT(c.Plan().why_exact, HasSubstr("entropy"));
  EXPECT_TRUE(c.Plan().fused());
}

TEST(ChunkPlan, GradientsOfEntropiesAreFused) {
  Case c;
  c.chunk.terms.any_coef_entropy = true;
  for (const Logits logits : {Logits::kStored, Logits::kRecomputed}) {
    for (const Gradients gradients :
         {Gradients::kExact, Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
      c.limits.logits = logits;
      c.options.gradients = gradients;
      EXPECT_TRUE(c.Plan().fused()) << c.Plan().why_not_fused;
      EXPECT_EQ(c.Plan().own_gemms(), logits == Logits::kStored);
    }
  }
  c.limits.logits = Logits::kStored;
  c.limits.filter.dtype = DType::kFloat16;
  EXPECT_THAT(c.Plan().why_not_fused, HasSubstr("fp16"));
}

TEST(ChunkPlan, TheOptionOfTheBackendDecidesWhereSizeWould) {
  Case c;
  c.limits.fused_loss = FusedLoss::kNever;
  EXPECT_EQ(c.Plan().why_not_fused, "switched off");
  c.limits.fused_loss = FusedLoss::kWherePossible;
  c.SetRows(8);
  EXPECT_TRUE(c.Plan().fused());
  c.limits.fused_loss = FusedLoss::kWhereFaster;
  EXPECT_EQ(c.Plan().why_not_fused, "few rows");
  c.limits.device.fused_clusters = 0;
  c.limits.fused_loss = FusedLoss::kWherePossible;
  EXPECT_THAT(c.Plan().why_not_fused, HasSubstr("Hopper"));
}

TEST(ChunkPlan, GradientsAreOwnProductsWhereTheyAreFaster) {
  Case c;
  EXPECT_TRUE(c.Plan().own_gemms());
  c.SetRows(760);
  EXPECT_FALSE(c.Plan().own_gemms());
  c.SetRows(2048);
  c.limits.device.fused_clusters = 0;
  EXPECT_THAT(c.Plan().why_library_gemms, HasSubstr("Hopper"));
}

TEST(ChunkPlan, TheOptionOfTheBackendHoldsForProductsToo) {
  Case c;
  c.limits.fused_loss = FusedLoss::kNever;
  EXPECT_EQ(c.Plan().why_library_gemms, "switched off");
  c.limits.fused_loss = FusedLoss::kWherePossible;
  EXPECT_TRUE(c.Plan().own_gemms());
  c.chunk.wants_gradient = false;
  EXPECT_EQ(c.Plan().why_library_gemms, "no gradient is wanted");
}

TEST(ChunkPlan, DescribesWhatItChose) {
  Case c;
  EXPECT_THAT(Describe(c.Plan()),
              ElementsAre(Choice{.what = "gradients", .choice = "exact", .reason = "exact was asked for"},
                          Choice{.what = "loss", .choice = "in the logits product"},
                          Choice{.what = "hidden gradient", .choice = "own product"},
                          Choice{.what = "weight gradient", .choice = "own product"}));
  c.options.gradients = Gradients::kFiltered;
  EXPECT_THAT(Describe(c.Plan()), ElementsAre(Field(&Choice::choice, "filtered"),
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
}  // namespace lossd::kernels::cuda::chunk_plan_test
