// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/answer_tracker.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lossd::client::internal::answer_tracker_test {
namespace {

v1::RowRange Range(uint64_t begin, uint64_t end) {
  v1::RowRange rows;
  rows.set_begin(begin);
  rows.set_end(end);
  return rows;
}

TEST(AnswerTrackerTest, ExactlyTakesEachSliceOnce) {
  AnswerTracker tracker = AnswerTracker::Exactly({{0, 5}, {7, 9}});
  EXPECT_FALSE(tracker.Complete());
  EXPECT_TRUE(tracker.Take(Range(7, 9)).ok());
  for (const auto& wrong : {Range(7, 9), Range(0, 4), Range(1, 5), Range(5, 7), Range(0, 9), Range(5, 0)}) {
    EXPECT_EQ(tracker.Take(wrong).code(), absl::StatusCode::kInternal);
  }
  EXPECT_EQ(tracker.answered_rows(), 2u);
  EXPECT_TRUE(tracker.Take(Range(0, 5)).ok());
  EXPECT_TRUE(tracker.Complete());
  EXPECT_EQ(tracker.answered_rows(), 7u);
  EXPECT_THAT(std::string(tracker.Take(Range(0, 5)).message()), ::testing::HasSubstr("rows [0, 5) twice"));
}

TEST(AnswerTrackerTest, PartsOfASliceTakeItsPlace) {
  AnswerTracker tracker = AnswerTracker::Exactly({{0, 10}, {10, 20}});
  tracker.Replace({10, 20}, {{10, 15}, {15, 20}});
  EXPECT_TRUE(tracker.Take(Range(15, 20)).ok());
  EXPECT_FALSE(tracker.Take(Range(10, 20)).ok());
  EXPECT_TRUE(tracker.Take(Range(0, 10)).ok());
  EXPECT_FALSE(tracker.Complete());
  EXPECT_TRUE(tracker.Take(Range(10, 15)).ok());
  EXPECT_TRUE(tracker.Complete());
}

TEST(AnswerTrackerTest, NothingExpectedIsComplete) {
  EXPECT_TRUE(AnswerTracker::Exactly({}).Complete());
  EXPECT_FALSE(AnswerTracker::Exactly({}).Take(Range(0, 0)).ok());
}

TEST(AnswerTrackerTest, WithinTakesDisjointRows) {
  AnswerTracker tracker = AnswerTracker::Within({10, 20});
  EXPECT_TRUE(tracker.Complete());
  EXPECT_TRUE(tracker.Take(Range(14, 16)).ok());
  for (const auto& wrong : {Range(14, 16), Range(13, 15), Range(15, 16), Range(15, 18), Range(12, 18),
                            Range(9, 11), Range(19, 21), Range(12, 12), Range(13, 12), Range(0, 100)}) {
    EXPECT_EQ(tracker.Take(wrong).code(), absl::StatusCode::kInternal) << wrong.ShortDebugString();
  }
  EXPECT_TRUE(tracker.Take(Range(10, 14)).ok());
  EXPECT_TRUE(tracker.Take(Range(16, 20)).ok());
  EXPECT_EQ(tracker.answered_rows(), 10u);
}

}  // namespace
}  // namespace lossd::client::internal::answer_tracker_test
