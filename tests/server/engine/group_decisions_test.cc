// SPDX-License-Identifier: Apache-2.0
#include "server/engine/group_decisions.h"

#include "gtest/gtest.h"

namespace lossd::engine::group_decisions_test {
namespace {

using kernels::Gradients;

kernels::Chunk Computed(Gradients asked, Gradients gradients, float threshold = 0x1p-10f) {
  kernels::Chunk chunk;
  chunk.options.gradients = asked;
  chunk.gradients = gradients;
  chunk.sample_threshold = threshold;
  return chunk;
}

kernels::LossOptions Asked(Gradients gradients) {
  kernels::LossOptions options;
  options.gradients = gradients;
  return options;
}

TEST(GroupDecisionsTest, APartIsComputedAsItsGroupWas) {
  GroupDecisions decisions;
  const kernels::LossOptions asked = Asked(Gradients::kAuto);
  EXPECT_EQ(decisions.For({3, 1}, asked), asked) << "nothing is known";
  decisions.Note({3, 1}, Computed(Gradients::kAuto, Gradients::kExact));
  decisions.Note({3, 2}, Computed(Gradients::kAuto, Gradients::kSampled, 0x1p-8f));
  EXPECT_EQ(decisions.For({3, 1}, asked).gradients, Gradients::kExact);
  EXPECT_EQ(decisions.For({3, 2}, asked).gradients, Gradients::kAuto);
  EXPECT_EQ(decisions.For({3, 2}, asked).sample_threshold, 0x1p-8f);
  EXPECT_GT(decisions.For({3, 2}, asked).max_gradient_error, 1e30f);
  EXPECT_EQ(decisions.For({4, 1}, asked), asked);
  decisions.Note({3, 1}, Computed(Gradients::kFiltered, Gradients::kFiltered));  // another attempt
  EXPECT_EQ(decisions.For({3, 1}, Asked(Gradients::kFiltered)), Asked(Gradients::kFiltered));
  decisions.Clear();
  EXPECT_EQ(decisions.For({3, 2}, asked), asked);
}

TEST(GroupDecisionsTest, ManyGroupsAreRememberedButNotAll) {
  GroupDecisions decisions;
  const auto groups = static_cast<int64_t>(GroupDecisions::kMostGroups);
  for (int64_t i = 0; i <= groups; ++i) decisions.Note({0, i}, Computed(Gradients::kAuto, Gradients::kExact));
  for (int64_t i = 0; i < groups; ++i) {
    ASSERT_EQ(decisions.For({0, i}, Asked(Gradients::kAuto)).gradients, Gradients::kExact) << i;
  }
  EXPECT_EQ(decisions.For({0, groups}, Asked(Gradients::kAuto)), Asked(Gradients::kAuto));
}

}  // namespace
}  // namespace lossd::engine::group_decisions_test
