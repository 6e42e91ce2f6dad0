#include "kernels/decision.h"

#include "gtest/gtest.h"

namespace lossd::kernels {
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

TEST(Decision, SaysWhichThresholdWasTaken) {
  const Choice asked = ThresholdChoice(0x1p-10f, 0x1p-10f);
  EXPECT_EQ(asked.what, "sample threshold");
  EXPECT_EQ(asked.choice, "0.000976562");
  EXPECT_EQ(asked.reason, "it was asked for");
  EXPECT_EQ(ThresholdChoice(0x1p-10f, 0x1p-8f).choice, "0.00390625");
  EXPECT_EQ(ThresholdChoice(0x1p-10f, 0x1p-8f).reason, "no room for what 0.000976562 takes");
}

}  // namespace
}  // namespace lossd::kernels
