#include "kernels/decision.h"

#include "gtest/gtest.h"

namespace lossd::kernels {
namespace {

TEST(Decision, IsFilteredOrExactWithAReason) {
  for (const Gradients asked : {Gradients::kFiltered, Gradients::kAuto}) {
    for (const Decision decision :
         {Decision::kFiltered, Decision::kTooManyCandidates, Decision::kTooMuchMass}) {
      const Gradients gradients = GradientsOf(decision);
      EXPECT_EQ(gradients, decision == Decision::kFiltered ? Gradients::kFiltered : Gradients::kExact);
      const Choice choice = GradientsChoice(asked, decision);
      EXPECT_EQ(choice.what, "gradients");
      EXPECT_EQ(choice.choice, Name(gradients));
      EXPECT_NE(choice.reason, "");
    }
  }
  EXPECT_NE(GradientsChoice(Gradients::kAuto, Decision::kFiltered).reason,
            GradientsChoice(Gradients::kFiltered, Decision::kFiltered).reason);
}

}  // namespace
}  // namespace lossd::kernels
