#include "kernels/decision.h"

#include "gtest/gtest.h"

namespace lossd::kernels {
namespace {

TEST(Decision, IsFilteredOrExactWithAReason) {
  for (const Algorithm asked : {Algorithm::kFiltered, Algorithm::kAuto, Algorithm::kCut}) {
    for (const Decision decision :
         {Decision::kFiltered, Decision::kTooManyCandidates, Decision::kTooMuchMass}) {
      const Algorithm algorithm = AlgorithmOf(decision);
      EXPECT_EQ(algorithm, decision == Decision::kFiltered ? Algorithm::kFiltered : Algorithm::kExact);
      const Choice choice = GradientsChoice(asked, decision);
      EXPECT_EQ(choice.what, "gradients");
      EXPECT_EQ(choice.choice, Name(algorithm));
      EXPECT_NE(choice.reason, "");
    }
  }
  EXPECT_NE(GradientsChoice(Algorithm::kAuto, Decision::kFiltered).reason,
            GradientsChoice(Algorithm::kFiltered, Decision::kFiltered).reason);
}

}  // namespace
}  // namespace lossd::kernels
