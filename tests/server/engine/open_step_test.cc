// SPDX-License-Identifier: Apache-2.0
// Tests of open_step.h: the last step, the open step, and the history of a head's steps.
#include "server/engine/open_step.h"

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/errors/field_error.h"
#include "server/engine/errors.h"

// ---- Last step ----

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

// ---- Open step ----

namespace lossd::engine::open_step_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class OpenStepTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kIncarnation = 42;

  // Declares a microbatch of so many rows, and accumulates the first `done` of them.
  void Accumulate(uint64_t id, int64_t rows, int64_t done) {
    const std::vector<int32_t> targets(static_cast<size_t>(rows), 1);
    ASSERT_TRUE(step_.ledger().Declare(id, {.microbatch_rows = rows}, {0, rows}, {.targets = targets}).ok());
    std::vector<uint8_t> mask(static_cast<size_t>(done));
    step_.ledger().Reserve(id, {0, done}, absl::MakeSpan(mask));
    step_.ledger().Commit(id, {0, done});
  }
  void Contribute(uint64_t id, int64_t rows, int64_t done) {
    ASSERT_TRUE(step_.contributions().Declare(id, {.rows = {0, rows}}).ok());
    const std::vector<uint64_t> checksums(static_cast<size_t>(done), 7);
    step_.contributions().Commit(id, {0, done}, checksums);
  }
  absl::Status CheckComplete(const StepRequest& request, absl::string_view waits_for = "") {
    const absl::Status status = step_.CheckComplete(request, waits_for, absl::UnixEpoch());
    missing_ = GetMissing(status);
    return status;
  }
  absl::Status CheckRepeat(const StepRequest& request) {
    const absl::Status status = step_.last().CheckRepeat(request);
    missing_ = GetMissing(status);
    return status;
  }

  StepResult LastResult() const { return step_.last().Result(step_.state()); }

  static std::string FieldOf(const absl::Status& status) {
    return errors::GetFieldViolation(status).value_or(errors::FieldViolation()).field;
  }

  void Close(const kernels::OptimizerOptions& optimizer, double norm, bool skipped) {
    step_.BeginClose();
    step_.Close({.optimizer = optimizer}, norm, skipped, absl::UnixEpoch());
    step_.ForgetRows();
  }

  VersionCounter counter_;
  OpenStep step_{kIncarnation, &counter_, /*max_rows=*/1000, /*max_microbatches=*/100};
  std::vector<std::string> missing_;
};

TEST_F(OpenStepTest, BeginsWithNothing) {
  EXPECT_EQ(step_.number(), 0u);
  EXPECT_EQ(step_.updates(), 0u);
  EXPECT_NE(step_.state().generation, 0u);
  EXPECT_NE(step_.state().weights_version, 0u);
  EXPECT_NE(step_.state().generation, step_.state().weights_version);
  EXPECT_EQ(step_.state().incarnation, kIncarnation);
  EXPECT_FALSE(step_.last().applied().has_value());
  EXPECT_FALSE(step_.last().IsRepeat({.step = 0}));
  EXPECT_TRUE(CheckComplete({.step = 0}).ok());
}

TEST_F(OpenStepTest, KnowsWhatIsMissing) {
  Accumulate(1, 4, 4);
  Accumulate(2, 4, 3);
  Accumulate(3, 4, 1);
  Contribute(5, 4, 2);
  EXPECT_TRUE(CheckComplete({.expected_microbatches = {}}).ok()) << "nothing was expected";
  const absl::Status status =
      CheckComplete({.expected_microbatches = {1, 2, 5, 9}, .expected_rows = 7}, "microbatch 2");
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(GetCurrentStep(status), 0u);
  EXPECT_THAT(std::string(status.message()), HasSubstr("(and 5 more)"));
  EXPECT_THAT(missing_,
              ElementsAre(HasSubstr("contribution 5: rows [2, 4)"), "microbatch 2: rows [3, 4) of 4",
                          "microbatch 9: never opened", HasSubstr("microbatch 3"),
                          "rows: 8 accumulated, 7 expected", "in order: slices wait for microbatch 2"));
  EXPECT_TRUE(step_.CheckComplete({.expected_rows = 8}, "", absl::UnixEpoch()).ok());
}

TEST_F(OpenStepTest, RequestsForOtherStepsAndProcessesAreRefused) {
  EXPECT_EQ(GetCurrentStep(CheckComplete({.step = 1})), 0u);
  EXPECT_EQ(FieldOf(CheckComplete({.incarnation = 41})), "incarnation");
  EXPECT_TRUE(CheckComplete({.incarnation = kIncarnation}).ok());
}

TEST_F(OpenStepTest, AClosedStepAnswersItsRepeats) {
  Accumulate(1, 4, 4);
  Accumulate(2, 4, 2);
  Contribute(5, 3, 3);
  const kernels::OptimizerOptions optimizer{.learning_rate = 0.5};
  const HeadState before = step_.state();
  Close(optimizer, 1.5, /*skipped=*/false);
  EXPECT_EQ(step_.number(), 1u);
  EXPECT_EQ(step_.updates(), 1u);
  EXPECT_GT(step_.state().generation, before.generation);
  EXPECT_GT(step_.state().weights_version, before.weights_version);
  EXPECT_EQ(step_.ledger().microbatches(), 0);
  EXPECT_EQ(step_.contributions().contributions(), 0);
  EXPECT_EQ(LastResult().state.step, 1u);
  EXPECT_EQ(LastResult().grad_norm, 1.5);
  EXPECT_EQ(LastResult().microbatches, 2);
  EXPECT_EQ(LastResult().rows, 6);
  EXPECT_EQ(LastResult().contributions, 1);

  StepRequest repeat{.step = 0, .optimizer = optimizer, .expected_microbatches = {1, 5}, .expected_rows = 6};
  EXPECT_TRUE(step_.last().IsRepeat(repeat));
  EXPECT_TRUE(CheckRepeat(repeat).ok()) << CheckRepeat(repeat);
  EXPECT_FALSE(step_.last().IsRepeat({.step = 1}));
  repeat.expected_microbatches = {1, 2};
  repeat.expected_rows = 8;
  EXPECT_EQ(CheckRepeat(repeat).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(missing_, ElementsAre("microbatch 2: was not whole in it", "rows: 6 were in it, 8 expected"));
  repeat.optimizer.learning_rate = 0.25;
  EXPECT_EQ(FieldOf(CheckRepeat(repeat)), "optimizer");
}

TEST_F(OpenStepTest, ASkippedStepIsNoUpdate) {
  const HeadState before = step_.state();
  Close({}, std::numeric_limits<double>::infinity(), /*skipped=*/true);
  EXPECT_GT(step_.state().generation, before.generation);
  EXPECT_EQ(step_.state().weights_version, before.weights_version);
  EXPECT_EQ(step_.number(), 1u);
  EXPECT_EQ(step_.updates(), 0u);
  EXPECT_TRUE(LastResult().skipped);
}

TEST_F(OpenStepTest, InvalidGradientsEndWithARestartAndInvalidWeightsWithAReset) {
  step_.MarkGradientsInvalid(absl::InternalError("gradients"));
  EXPECT_EQ(step_.CheckValid().message(), "gradients");
  EXPECT_EQ(CheckComplete({}).message(), "gradients");
  step_.MarkWeightsInvalid(absl::InternalError("weights"));
  EXPECT_EQ(step_.CheckValid().message(), "weights");
  const HeadState before = step_.state();
  step_.Restart();
  EXPECT_TRUE(step_.gradients_status().ok());
  EXPECT_EQ(step_.CheckValid().message(), "weights");
  EXPECT_EQ(step_.number(), 0u);
  EXPECT_GT(step_.state().generation, before.generation);
  EXPECT_EQ(step_.state().weights_version, before.weights_version);
  const HeadState restarted = step_.state();
  step_.BeginLoad({.step = 3, .updates = 2}, std::nullopt, head::History(), absl::UnavailableError("loading"),
                  absl::UnixEpoch());
  EXPECT_EQ(step_.CheckValid().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(step_.CheckWeights().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(step_.CheckGradients().code(), absl::StatusCode::kUnavailable);
  step_.EndLoad();
  EXPECT_TRUE(step_.CheckValid().ok());
  EXPECT_EQ(step_.number(), 3u);
  EXPECT_EQ(step_.updates(), 2u);
  EXPECT_GT(step_.state().generation, restarted.generation);
  EXPECT_GT(step_.state().weights_version, restarted.weights_version);
  EXPECT_FALSE(step_.last().IsRepeat({.step = 2})) << "how step 2 was applied is not known";
}

TEST_F(OpenStepTest, ALoadedStepIsRepeatedWithoutItsMicrobatches) {
  step_.BeginLoad({.step = 3, .updates = 3}, head::AppliedStep{.incarnation = 7, .generation = 4, .rows = 6},
                  head::History(), {}, absl::UnixEpoch());
  EXPECT_TRUE(step_.last().IsRepeat({.step = 2}));
  EXPECT_TRUE(
      CheckRepeat({.step = 2, .expected_microbatches = {1, 2}, .expected_rows = 6, .incarnation = 7}).ok());
  EXPECT_EQ(FieldOf(CheckRepeat({.step = 2, .incarnation = kIncarnation})), "incarnation");
  EXPECT_TRUE(CheckRepeat({.step = 2, .incarnation = 7, .generation = 4}).ok());
  EXPECT_EQ(CheckRepeat({.step = 2, .incarnation = 7, .generation = 5}).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(LastResult().applied_incarnation, 7u);
}

TEST_F(OpenStepTest, ANamedGenerationHasToBeTheHeads) {
  const uint64_t generation = step_.state().generation;
  EXPECT_TRUE(step_.CheckGeneration("open.generation", std::nullopt).ok());
  EXPECT_TRUE(step_.CheckGeneration("open.generation", generation).ok());
  EXPECT_TRUE(CheckComplete({.generation = generation}).ok());
  step_.Restart();
  const absl::Status other = step_.CheckGeneration("open.generation", generation);
  EXPECT_EQ(other.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(FieldOf(other), "open.generation");
  EXPECT_EQ(errors::GetFieldViolation(other)->value, std::to_string(generation));
  EXPECT_EQ(CheckComplete({.generation = generation}).code(), absl::StatusCode::kAborted);
}

TEST_F(OpenStepTest, ARepeatNamesTheGenerationThatWasApplied) {
  const uint64_t zeroed = step_.state().generation;
  step_.Restart();
  const uint64_t applied = step_.state().generation;
  Close({}, 1.0, /*skipped=*/false);
  EXPECT_TRUE(CheckRepeat({.step = 0}).ok());
  EXPECT_TRUE(CheckRepeat({.step = 0, .generation = applied}).ok());
  EXPECT_EQ(CheckRepeat({.step = 0, .generation = zeroed}).code(), absl::StatusCode::kAborted)
      << "the rows of that trainer were not in it";
}

TEST_F(OpenStepTest, AStepIsClosedWithWhatWasInItBefore) {
  Accumulate(1, 4, 4);
  step_.BeginClose();
  EXPECT_EQ(step_.CheckValid().code(), absl::StatusCode::kUnavailable) << "nothing may join it";
  Accumulate(2, 4, 4);
  step_.Close({}, 1.0, /*skipped=*/false, absl::UnixEpoch());
  EXPECT_EQ(LastResult().microbatches, 1);
  EXPECT_EQ(LastResult().rows, 4);
  step_.ForgetRows();
  EXPECT_TRUE(step_.CheckValid().ok());
  step_.BeginClose();
  step_.CancelClose();
  EXPECT_TRUE(step_.CheckValid().ok());
}

TEST_F(OpenStepTest, ACallEndsWhenWhatItIsBoundToChanges) {
  const HeadVersions& versions = step_.versions();
  const Binding step{.step = versions.step()}, generation{.generation = versions.generation()},
      weights{.weights = versions.weights()}, accumulation{.accumulation = versions.accumulation()};
  const auto aborted = [&](const Binding& binding) {
    const absl::Status status = step_.CheckBound(binding);
    EXPECT_TRUE(status.ok() || absl::IsAborted(status)) << status;
    return !status.ok();
  };
  EXPECT_FALSE(aborted(step) || aborted(generation) || aborted(weights) || aborted(accumulation));
  step_.versions().NewAccumulation();
  EXPECT_TRUE(aborted(accumulation));
  EXPECT_FALSE(aborted(step) || aborted(generation) || aborted(weights));
  step_.Restart();
  EXPECT_TRUE(aborted(generation));
  EXPECT_FALSE(aborted(step) || aborted(weights));
  Close({}, std::numeric_limits<double>::infinity(), /*skipped=*/true);
  EXPECT_TRUE(aborted(step));
  EXPECT_FALSE(aborted(weights)) << "a skipped step changes no weights";
  Close({}, 1.0, /*skipped=*/false);
  EXPECT_TRUE(aborted(weights));
  EXPECT_THAT(std::string(step_.CheckBound(weights).message()), HasSubstr("step 1 was applied"));
  EXPECT_EQ(GetCurrentStep(step_.CheckBound(weights)), 2u);
}

TEST_F(OpenStepTest, ALoadEndsEverything) {
  const HeadVersions& versions = step_.versions();
  const Binding generation{.generation = versions.generation()}, weights{.weights = versions.weights()},
      accumulation{.accumulation = versions.accumulation()};
  const uint64_t write = step_.versions().BeginWrite(Written::kMoment);
  step_.BeginLoad({.step = 3}, std::nullopt, head::History(), absl::UnavailableError("loading"),
                  absl::UnixEpoch());
  for (const Binding& binding : {generation, weights, accumulation})
    EXPECT_EQ(step_.CheckBound(binding).code(), absl::StatusCode::kAborted);
  EXPECT_FALSE(versions.IsWriting(write));
  const HeadState loading = step_.state();
  step_.EndLoad();
  EXPECT_EQ(step_.state(), loading) << "it took effect when it began";
}

TEST_F(OpenStepTest, BrokenWeightsEndWhatUsesThem) {
  step_.MarkWeightsInvalid(absl::InternalError("broken"));
  EXPECT_EQ(step_.CheckBound({.weights = step_.versions().weights()}).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(step_.CheckTensors().code(), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace lossd::engine::open_step_test

// ---- Step history ----

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
