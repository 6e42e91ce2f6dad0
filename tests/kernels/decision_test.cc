// SPDX-License-Identifier: Apache-2.0
#include "kernels/decision.h"

#include "gtest/gtest.h"

namespace lossd::kernels::decision_test {
namespace {

TEST(Decision, IsAsPlannedOrExactWithAReason) {
  for (const Gradients asked : {Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
    const Gradients planned = asked == Gradients::kAuto ? Gradients::kSampled : asked;
    for (const Decision decision :
         {Decision::kAsPlanned, Decision::kTooManyCandidates, Decision::kTooMuchError}) {
      const Gradients gradients = GradientsOf(asked, decision);
      EXPECT_EQ(gradients, decision == Decision::kAsPlanned ? planned : Gradients::kExact);
      const Choice choice = GradientsChoice(asked, decision);
      EXPECT_EQ(choice.what, "gradients");
      EXPECT_EQ(choice.choice, Name(gradients));
      EXPECT_NE(choice.reason, "");
    }
  }
  EXPECT_NE(GradientsChoice(Gradients::kAuto, Decision::kAsPlanned).reason,
            GradientsChoice(Gradients::kSampled, Decision::kAsPlanned).reason);
}

TEST(Decision, APartIsComputedAsTheWholeWas) {
  for (const Gradients asked : {Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
    const LossOptions options = {.gradients = asked, .sample_threshold = 0x1p-9f};
    LossOptions exact = options;
    exact.gradients = Gradients::kExact;
    EXPECT_EQ(AsDecided(options, Gradients::kExact, 0.0f), exact);
  }
  const LossOptions filtered = {.gradients = Gradients::kFiltered};
  EXPECT_EQ(AsDecided(filtered, Gradients::kFiltered, 0.0f), filtered);
  LossOptions sampled = {.gradients = Gradients::kSampled, .sample_threshold = 0x1p-9f};
  EXPECT_EQ(AsDecided(sampled, Gradients::kSampled, 0x1p-9f), sampled);
  sampled.sample_threshold = 0x1p-7f;
  EXPECT_EQ(AsDecided({.gradients = Gradients::kSampled}, Gradients::kSampled, 0x1p-7f), sampled);
  sampled.sample_threshold = 1.0f;
  EXPECT_EQ(AsDecided({.gradients = Gradients::kSampled}, Gradients::kSampled, 8.0f), sampled)
      << "options know no more";
  const LossOptions both = AsDecided({.gradients = Gradients::kAuto}, Gradients::kSampled, 0x1p-7f);
  EXPECT_EQ(both.gradients, Gradients::kAuto);
  EXPECT_EQ(both.sample_threshold, 0x1p-7f);
  EXPECT_GE(both.max_gradient_error, 1e30f);
  EXPECT_TRUE(Validate(both).ok());
}

TEST(Decision, SaysWhichThresholdWasTaken) {
  const Choice asked = ThresholdChoice(0x1p-10f, 0x1p-10f);
  EXPECT_EQ(asked.what, "sample threshold");
  EXPECT_EQ(asked.choice, "0.000976562");
  EXPECT_EQ(asked.reason, "it was asked for");
  EXPECT_EQ(ThresholdChoice(0x1p-10f, 0x1p-8f).choice, "0.00390625");
  EXPECT_EQ(ThresholdChoice(0x1p-10f, 0x1p-8f).reason, "no room for what 0.000976562 takes");
}

}  // namespace
}  // namespace lossd::kernels::decision_test
