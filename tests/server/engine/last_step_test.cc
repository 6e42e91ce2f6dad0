// SPDX-License-Identifier: Apache-2.0
#include "server/engine/last_step.h"

#include "gtest/gtest.h"

namespace lossd::engine::last_step_test {
namespace {

StepRequest Naming(uint64_t generation) {
  StepRequest request{.step = 4};
  request.generation = generation;
  return request;
}

TEST(LastStepTest, ARepeatNamesTheGradientsOfTheStep) {
  LastStep last;
  EXPECT_FALSE(last.IsRepeat({.step = 0})) << "there was none";
  last.Set(4, {.generation = 7}, {});
  EXPECT_TRUE(last.IsRepeat({.step = 4}));
  EXPECT_FALSE(last.IsRepeat({.step = 5}));
  EXPECT_TRUE(last.CheckRepeat({.step = 4}).ok());
  EXPECT_TRUE(last.CheckRepeat(Naming(7)).ok());
  EXPECT_EQ(last.CheckRepeat(Naming(8)).code(), absl::StatusCode::kAborted);
}

// A checkpoint need not say with which gradients its step was applied.
TEST(LastStepTest, AnyGradientsAreRightIfItIsNotKnownWhichTheyWere) {
  LastStep last;
  last.SetLoaded(4, head::AppliedStep{.generation = 0});
  EXPECT_TRUE(last.CheckRepeat({.step = 4}).ok());
  EXPECT_TRUE(last.CheckRepeat(Naming(7)).ok());
}

}  // namespace
}  // namespace lossd::engine::last_step_test
