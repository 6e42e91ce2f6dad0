// SPDX-License-Identifier: Apache-2.0
#include "server/engine/step_history.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace lossd::engine::step_history_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr absl::Time kStart = absl::FromUnixSeconds(1'800'000'000);

class StepHistoryTest : public ::testing::Test {
 protected:
  std::string Why(uint64_t step, uint64_t open, absl::Duration later, absl::string_view run = "me") {
    return history_.WhyNotOpen({.step = step, .run = run}, open, kStart + later);
  }

  StepHistory history_{7};
};

TEST_F(StepHistoryTest, WhoAppliedTheLastStep) {
  EXPECT_EQ(Why(3, 0, absl::ZeroDuration()), "no step was applied to this head since it was created");
  history_.OnApplied("other", kStart);
  EXPECT_EQ(Why(0, 1, absl::Seconds(1)),
            "another program trains this head: run other applied step 0 1 second ago");
  EXPECT_THAT(Why(0, 1, absl::Seconds(119)), HasSubstr("119 seconds ago"));
  EXPECT_THAT(Why(0, 1, absl::Seconds(121)), HasSubstr("2 minutes ago"));
  EXPECT_THAT(Why(0, 1, absl::Hours(3)), HasSubstr("3 hours ago"));
  EXPECT_THAT(Why(0, 1, absl::Hours(72)), HasSubstr("3 days ago"));
  EXPECT_THAT(Why(0, 1, -absl::Hours(1)), HasSubstr("0 seconds ago")) << "the clock went back";
  EXPECT_EQ(Why(0, 1, absl::Seconds(5), "other"), "this run, other, applied step 0 5 seconds ago");
  history_.OnApplied("", kStart);
  EXPECT_EQ(Why(0, 2, absl::Seconds(5)), "a program that names no run applied step 1 5 seconds ago");
}

TEST_F(StepHistoryTest, WhoHasRowsInTheOpenStep) {
  history_.OnRows("other");
  EXPECT_EQ(Why(3, 0, absl::ZeroDuration()),
            "another program trains this head: run other has rows in the open step");
  EXPECT_EQ(Why(3, 0, absl::ZeroDuration(), "other"),
            "no step was applied to this head since it was created");
  history_.OnDiscarded();
  EXPECT_EQ(history_.open_run(), "");
  history_.OnRows("third");
  history_.OnApplied("other", kStart);
  EXPECT_EQ(history_.open_run(), "");
  history_.OnRows("third");
  EXPECT_EQ(Why(0, 1, absl::Seconds(2)),
            "another program trains this head: run other applied step 0 2 seconds ago; run third has rows in "
            "the open step");
}

TEST_F(StepHistoryTest, WhatWasLoaded) {
  history_.OnApplied("other", kStart);
  history_.OnLoaded(8, {.run = "me",
                        .applied_unix_seconds = 1'799'999'000,
                        .checkpoint = "lm/two",
                        .checkpoint_step = 2,
                        .checkpoint_unix_seconds = 1'800'000'000,
                        .loaded = true});
  const std::string came_back =
      "this head came back from a checkpoint: the server loaded lm/two of step 2, saved 4 seconds ago";
  EXPECT_EQ(Why(5, 2, absl::Seconds(4)), came_back + ", trained by run me");
  history_.OnApplied("other", kStart);
  EXPECT_THAT(Why(5, 3, absl::Seconds(4)),
              AllOf(HasSubstr("run other applied step 2"), HasSubstr(came_back)));
  EXPECT_THAT(Why(2, 3, absl::Seconds(4)), Not(HasSubstr("checkpoint"))) << "steps from there on are known";
  history_.OnLoaded(9, {.checkpoint = "lm/old", .checkpoint_step = 1, .loaded = true});
  EXPECT_EQ(Why(5, 1, absl::Seconds(4)),
            "this head came back from a checkpoint: the server loaded lm/old of step 1");
}

TEST_F(StepHistoryTest, WhatWasReset) {
  history_.OnApplied("other", kStart);
  history_.OnSaved(7, "lm/one", 1, kStart);
  history_.OnReset(8, kStart);
  EXPECT_EQ(history_.history(), head::History());
  EXPECT_EQ(Why(1, 0, absl::Seconds(9)), "the head was reset 9 seconds ago");
}

TEST_F(StepHistoryTest, ASaveIsOfTheValuesThatTheHeadHas) {
  history_.OnSaved(7, "lm/one", 1, kStart);
  EXPECT_EQ(history_.history().checkpoint, "lm/one");
  EXPECT_EQ(history_.history().checkpoint_unix_seconds, 1'800'000'000);
  EXPECT_FALSE(history_.history().loaded);
  history_.OnLoaded(8, {.checkpoint = "lm/two", .loaded = true});
  history_.OnSaved(7, "lm/late", 3, kStart);
  EXPECT_EQ(history_.history().checkpoint, "lm/two");
  EXPECT_TRUE(history_.history().loaded);
}

}  // namespace
}  // namespace lossd::engine::step_history_test
