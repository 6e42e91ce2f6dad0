// SPDX-License-Identifier: Apache-2.0
// Tests of loss_plan.h: the plan of a call, and the record of its answers.
#include "client/cpp/loss_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

// ---- Loss plan ----

namespace lossd::client::internal::loss_plan_test {
namespace {

constexpr int32_t kIgnore = -100;

std::vector<int32_t> RandomTargets(std::mt19937& random, size_t rows, double ignored) {
  std::vector<int32_t> targets(rows);
  for (int32_t& target : targets) {
    target = std::uniform_real_distribution<>()(random) < ignored ? kIgnore
                                                                  : static_cast<int32_t>(random() % 1000);
  }
  return targets;
}

TEST(LossPlanTest, RangesCoverEveryRowOnce) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 300; ++round) {
    const auto targets = RandomTargets(random, random() % 2000, (round % 11) / 10.0);
    const int streams = 1 + static_cast<int>(random() % 9);
    const uint64_t max_rows = round % 3 == 0 ? 1 + random() % 300 : 1 << 20;
    const std::vector<Rows> ranges = SplitRanges(targets, kIgnore, streams, max_rows);
    ASSERT_GE(ranges.size(), 1u);
    uint64_t next = 0;
    for (const Rows& range : ranges) {
      ASSERT_EQ(range.begin, next);
      ASSERT_LE(range.size(), max_rows);
      ASSERT_TRUE(targets.empty() || range.size() > 0);
      next = range.end;
    }
    ASSERT_EQ(next, targets.size());
    ASSERT_TRUE(max_rows <= targets.size() || ranges.size() <= static_cast<size_t>(streams));
  }
}

TEST(LossPlanTest, RangesHoldAboutTheSameNumberOfValidRows) {
  std::vector<int32_t> targets(4000, kIgnore);
  std::fill(targets.begin() + 3000, targets.end(), 5);  // a long ignored prompt
  const std::vector<Rows> ranges = SplitRanges(targets, kIgnore, 4, 1 << 20);
  ASSERT_EQ(ranges.size(), 4u);
  for (const Rows& range : ranges) {
    const auto part = absl::MakeConstSpan(targets).subspan(range.begin, range.size());
    EXPECT_NEAR(CountValid(part, kIgnore), 250, 1);
  }
}

TEST(LossPlanTest, FewRowsUseFewStreams) {
  EXPECT_EQ(SplitRanges(std::vector<int32_t>(kMinRowsPerStream * 2, 1), kIgnore, 8, 1 << 20).size(), 2u);
  EXPECT_EQ(SplitRanges(std::vector<int32_t>(1, 1), kIgnore, 8, 1 << 20).size(), 1u);
  EXPECT_EQ(SplitRanges({}, kIgnore, 8, 1 << 20), std::vector<Rows>{Rows{}});
}

TEST(LossPlanTest, SlicesHoldEveryValidRowOnceAndStartAndEndWithOne) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 300; ++round) {
    const auto targets = RandomTargets(random, 1 + random() % 500, (round % 11) / 10.0);
    Rows range;
    range.begin = random() % targets.size();
    range.end = range.begin + random() % (targets.size() - range.begin + 1);
    const SliceRule rule{.max_rows = 1 + random() % 60, .row_grid = round % 2 == 0 ? 0 : 1 + random() % 100};
    std::vector<int> covered(targets.size(), 0);
    uint64_t previous_end = range.begin;
    for (const Rows& slice : DivideIntoSlices(targets, kIgnore, range, rule)) {
      ASSERT_GE(slice.begin, previous_end);
      ASSERT_LE(slice.end, range.end);
      ASSERT_GT(slice.size(), 0u);
      ASSERT_LE(slice.size(), rule.max_rows);
      if (rule.row_grid > 0) {
        ASSERT_EQ(slice.begin / rule.row_grid, (slice.end - 1) / rule.row_grid);
      }
      ASSERT_NE(targets[slice.begin], kIgnore);
      ASSERT_NE(targets[slice.end - 1], kIgnore);
      previous_end = slice.end;
      for (uint64_t row = slice.begin; row < slice.end; ++row) ++covered[row];
    }
    for (uint64_t row = 0; row < targets.size(); ++row) {
      const bool must = row >= range.begin && row < range.end && targets[row] != kIgnore;
      ASSERT_TRUE(!must || covered[row] == 1) << "row " << row;
      ASSERT_LE(covered[row], 1);
    }
  }
}

TEST(LossPlanTest, LargeMicrobatchesAreCopiedByMoreStreamsThanSmallOnes) {
  constexpr uint64_t kMiB = 1 << 20;
  EXPECT_EQ(StreamsInRegion(0, 16), 1);
  EXPECT_EQ(StreamsInRegion(15 * kMiB, 16), 1);
  EXPECT_EQ(StreamsInRegion(16 * kMiB, 16), 2);
  EXPECT_EQ(StreamsInRegion(48 * kMiB, 16), 4);
  EXPECT_EQ(StreamsInRegion(uint64_t{1} << 50, 1024), 4);
  EXPECT_EQ(StreamsInRegion(48 * kMiB, 6), 3);
  for (const unsigned cores : {0, 1, 2, 3}) EXPECT_EQ(StreamsInRegion(48 * kMiB, cores), 1) << cores;
}

TEST(LossPlanTest, LongIgnoredRunsAreNotSent) {
  std::vector<int32_t> targets(1000, kIgnore);
  targets[10] = targets[11] = targets[900] = 3;
  EXPECT_THAT(DivideIntoSlices(targets, kIgnore, {0, 1000}, {.max_rows = 1000}),
              ::testing::ElementsAre(Rows{10, 12}, Rows{900, 901}));
}

TEST(LossPlanTest, SliceRowsKeepToEveryLimit) {
  v1::SliceLimits limits;
  limits.set_max_rows(100);
  limits.set_max_bytes(5000);
  EXPECT_EQ(MakeSliceRule(64, 1 << 20, limits)->max_rows, 78u);
  EXPECT_EQ(MakeSliceRule(8, 1 << 20, limits)->max_rows, 100u);
  EXPECT_EQ(MakeSliceRule(8, 80, limits)->max_rows, 10u);
  EXPECT_EQ(MakeSliceRule(4000, 80, limits)->max_rows, 1u);
  EXPECT_EQ(MakeSliceRule(8, 80, limits)->row_grid, 0u);
  limits.set_row_grid(7);
  EXPECT_EQ(MakeSliceRule(8, 80, limits)->row_grid, 7u);
  EXPECT_EQ(MakeSliceRule(8, std::nullopt, limits)->max_rows_in_region, 0u);
  limits.set_max_bytes_in_region(720);
  EXPECT_EQ(*MakeSliceRule(8, std::nullopt, limits), (SliceRule{100, 7, 90}));
  EXPECT_EQ(*MakeSliceRule(4, std::nullopt, limits), (SliceRule{100, 7, 100}));
  EXPECT_EQ(*MakeSliceRule(8, 80, limits), (SliceRule{10, 7, 0}));
  EXPECT_EQ(MakeSliceRule(5001, 1 << 20, limits).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(LossPlanTest, UnsentRowsAreWhatNoSliceCovers) {
  const std::vector<Rows> slices{{2, 3}, {3, 5}, {6, 8}};
  EXPECT_THAT(UnsentRows({1, 9}, slices), ::testing::ElementsAre(Rows{1, 2}, Rows{5, 6}, Rows{8, 9}));
  EXPECT_THAT(UnsentRows({2, 8}, slices), ::testing::ElementsAre(Rows{5, 6}));
  EXPECT_THAT(UnsentRows({4, 9}, {}), ::testing::ElementsAre(Rows{4, 9}));
  EXPECT_THAT(UnsentRows({4, 4}, {}), ::testing::IsEmpty());
}

TEST(LossPlanTest, SlicesInARegionAreEqualAndAsLargeAsWanted) {
  const SliceRule rule{100, 0, 400};
  EXPECT_EQ(InRegion(rule, 1000, uint64_t{1} << 40).max_rows, 334u);
  EXPECT_EQ(InRegion(rule, 800, uint64_t{1} << 40).max_rows, 400u);
  EXPECT_EQ(InRegion(rule, 300, 200).max_rows, 150u);
  EXPECT_EQ(InRegion(rule, 300, 7).max_rows, 100u) << "no smaller than those in messages";
  EXPECT_EQ(InRegion(rule, 0, 200).max_rows, 200u);
  EXPECT_EQ(InRegion(rule, 300, uint64_t{1} << 40).max_rows, 400u)
      << "ignored rows between valid ones do not cut it";
  EXPECT_EQ(InRegion({100}, 250, 200).max_rows, 84u);
}

TEST(LossPlanTest, ASliceWithoutRoomIsCutForMessages) {
  EXPECT_THAT(CutForMessages({5, 255}, {100}),
              ::testing::ElementsAre(Rows{5, 105}, Rows{105, 205}, Rows{205, 255}));
  EXPECT_THAT(CutForMessages({5, 85}, {100, 40}),
              ::testing::ElementsAre(Rows{5, 40}, Rows{40, 80}, Rows{80, 85}));
}

TEST(LossPlanTest, UnsentRowsAreFilled) {
  std::vector<float> dx(6 * 2, 9), loss(6, 9);
  std::vector<int32_t> argmax(6, 9);
  LossOutputs outputs{
      .grad_hidden = dx.data(), .row_loss = absl::MakeSpan(loss), .row_argmax = absl::MakeSpan(argmax)};
  FillUnsentRows(outputs, 2 * sizeof(float), {1, 6}, std::vector<Rows>{{2, 3}, {4, 5}});
  EXPECT_THAT(dx, ::testing::ElementsAre(9, 9, 0, 0, 9, 9, 0, 0, 9, 9, 0, 0));
  EXPECT_THAT(loss, ::testing::ElementsAre(9, 0, 9, 0, 9, 0));
  EXPECT_THAT(argmax, ::testing::ElementsAre(9, -1, 9, -1, 9, -1));
}

TEST(LossPlanTest, WrongCallsAreNamed) {
  const std::vector<int32_t> targets(4, 1);
  const std::vector<float> hidden(4 * 3), weights(3);
  std::vector<float> loss(5);
  const Microbatch good{.head = "h",
                        .step = 1,
                        .hidden_size = 3,
                        .hidden_dtype = v1::DTYPE_FP32,
                        .hidden = hidden.data(),
                        .targets = targets};
  ASSERT_TRUE(ValidateCall(good, {}, {}).ok());
  const auto message = [](const Microbatch& m, const LossOutputs& outputs, const ComputeOptions& options) {
    const absl::Status status = ValidateCall(m, outputs, options);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  Microbatch bad = good;
  bad.head = "";
  EXPECT_THAT(message(bad, {}, {}), ::testing::HasSubstr("microbatch.head"));
  bad = good;
  bad.hidden = nullptr;
  EXPECT_THAT(message(bad, {}, {}), ::testing::HasSubstr("microbatch.hidden"));
  bad = good;
  bad.hidden_size = 0;
  EXPECT_THAT(message(bad, {}, {}), ::testing::HasSubstr("hidden_size is 0"));
  bad = good;
  bad.hidden_size = ~uint64_t{0} / 8;
  EXPECT_THAT(message(bad, {}, {}), ::testing::HasSubstr("too large"));
  bad = good;
  bad.row_weights = weights;
  EXPECT_THAT(message(bad, {}, {}), ::testing::HasSubstr("row_weights has 3 entries for 4 rows"));
  bad = good;
  bad.step = std::nullopt;
  EXPECT_THAT(message(bad, {}, {.accumulate_gradients = true}), ::testing::HasSubstr("microbatch.step"));
  EXPECT_THAT(message(good, {.row_loss = absl::MakeSpan(loss)}, {}),
              ::testing::HasSubstr("row_loss has 5 entries"));
  EXPECT_THAT(message(good, {}, {.normalizer = -1.0}), ::testing::HasSubstr("normalizer is -1"));
  EXPECT_THAT(message(good, {}, {.reduction = v1::REDUCTION_SUM, .normalizer = 2.0}),
              ::testing::HasSubstr("normalizer"));
  EXPECT_THAT(message(good, {}, {.grad_output = INFINITY}), ::testing::HasSubstr("grad_output is inf"));
  EXPECT_THAT(message(good, {}, {.retain = true}), ::testing::HasSubstr("options.retain"));
  EXPECT_THAT(message(good, {}, {.reduction = v1::REDUCTION_NONE, .accumulate_gradients = true}),
              ::testing::HasSubstr("accumulate_gradients"));
  EXPECT_THAT(message(good, {.grad_hidden = loss.data()}, {.reduction = v1::REDUCTION_NONE}),
              ::testing::HasSubstr("grad_hidden"));
  RetainedGradients gradients{.head = "h", .hidden_size = 3, .grad_loss = weights, .grad_lse = loss};
  EXPECT_EQ(ValidateBackward(gradients).message(), "gradients.grad_lse has 5 entries for 3 rows");
  gradients = {.head = "h", .hidden_size = 3, .grad_loss = weights, .grad_entropy = loss};
  EXPECT_EQ(ValidateBackward(gradients).message(), "gradients.grad_entropy has 5 entries for 3 rows");
  ComputeOptions weighted;
  weighted.loss.set_use_class_weights(true);
  EXPECT_THAT(message(good, {}, weighted), ::testing::HasSubstr("normalizer is absent"));
}

}  // namespace
}  // namespace lossd::client::internal::loss_plan_test

// ---- Answer tracker ----

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
