// SPDX-License-Identifier: Apache-2.0
// Tests of open_step.h: the last step, the open step, the history of a head's steps, and gradients that come
// from outside (AddGradient) through an engine.
#include "server/engine/open_step.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/errors/field_error.h"
#include "server/engine/engine.h"
#include "server/engine/errors.h"
#include "tests/server/engine/engine_fixture.h"

namespace lossd::engine::open_step_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// ---- Last step ----

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

// ---- Open step ----

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

// ---- Step history ----

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

// ---- Gradients from outside, in arrival order ----

constexpr float kInf = std::numeric_limits<float>::infinity();

TEST_F(ContributionsTest, RowsAreAddedOnceWhateverTheSlices) {
  const auto first = engine_->OpenContribution(Spec(1));
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->rows, RowRange({0, kVocab}));
  EXPECT_EQ(first->cols, kHidden);
  EXPECT_EQ(engine_->AwaitTurn(*first, [] { FAIL() << "by arrival it has its turn"; }), 0u);
  EXPECT_FALSE(ForgetTurn(*first, 1));
  EXPECT_EQ(*Add(*first, {0, 4}), 4);
  const auto again = engine_->OpenContribution(Spec(1));  // after a broken call
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(*Add(*again, {0, 3}), 0);
  EXPECT_EQ(*Add(*again, {3, 7}), 3);
  EXPECT_EQ(*Add(*again, {7, 10}), 3);
  EXPECT_EQ(*Add(*first, {4, 8}), 0) << "the call that seemed dead";
  EXPECT_THAT(Added(), ElementsAre(100, 101, 102, 103, 104, 105, 106, 107, 108, 109));
  EXPECT_EQ(engine_->Describe("head")->step_contributions, 1);
  EXPECT_EQ(engine_->Describe("head")->step_microbatches, 0);
}

TEST_F(ContributionsTest, ScaleMultipliesAndRangesAreKept) {
  ContributionSpec spec = Spec(1);
  spec.scale = -0.5f;
  spec.contribution_rows = RowRange{4, 8};
  spec.rows = RowRange{5, 7};
  const auto part = engine_->OpenContribution(spec);
  ASSERT_TRUE(part.ok()) << part.status();
  EXPECT_EQ(*Add(*part, {5, 7}), 2);
  EXPECT_THAT(Added(), ElementsAre(-52.5f, -53.0f));
  EXPECT_EQ(Add(*part, {4, 6}).status().code(), absl::StatusCode::kInvalidArgument) << "another call's row";
  const auto applied = Apply({.step = 0, .expected_microbatches = {1}});
  EXPECT_FALSE(applied.ok());
  EXPECT_THAT(GetMissing(applied.status()), ElementsAre("contribution 1: rows [4, 5), [7, 8) of [4, 8)"));
}

TEST_F(ContributionsTest, AStepExpectsContributionsAsMicrobatches) {
  const auto contribution = engine_->OpenContribution(Spec(3));
  ASSERT_TRUE(contribution.ok());
  ASSERT_TRUE(Add(*contribution, {0, 6}).ok());
  const absl::Status incomplete = Apply({.step = 0, .expected_microbatches = {3, 4}}).status();
  EXPECT_EQ(incomplete.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(GetMissing(incomplete),
              ElementsAre("contribution 3: rows [6, 10) of [0, 10)", "microbatch 4: never opened"));
  ASSERT_TRUE(Add(*contribution, {6, 10}).ok());
  const auto applied = Apply({.step = 0, .expected_microbatches = {3}, .expected_rows = 0});
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_EQ(applied->contributions, 1);
  EXPECT_EQ(applied->microbatches, 0);
  EXPECT_EQ(Add(*contribution, {0, 1}).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(engine_->Describe("head")->step_contributions, 0);
}

TEST_F(ContributionsTest, RefusedContributionsAreNotCounted) {
  const auto refused = engine_->OpenContribution(Spec(3));
  ASSERT_TRUE(refused.ok());
  const std::vector<float> bad(2, kInf);
  EXPECT_EQ(engine_->AddRows(*refused, {0, 1}, Bytes(bad)).status().code(), absl::StatusCode::kOutOfRange);
  ASSERT_TRUE(Add(*engine_->OpenContribution(Spec(4)), {0, 10}).ok());
  EXPECT_EQ(engine_->Describe("head")->step_contributions, 1);
  const auto applied = Apply({.step = 0});
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_EQ(applied->contributions, 1);
  const absl::Status refused_step = Apply({.step = 0, .expected_microbatches = {3, 4}}).status();
  EXPECT_THAT(GetMissing(refused_step), ElementsAre("microbatch 3: was not whole in it"));
}

TEST_F(ContributionsTest, OtherContentsUnderTheSameIdAreRefused) {
  const auto contribution = engine_->OpenContribution(Spec(1));
  ASSERT_TRUE(Add(*contribution, {0, 5}).ok());
  ContributionSpec other = Spec(1);
  other.scale = 2.0f;
  EXPECT_EQ(engine_->OpenContribution(other).status().code(), absl::StatusCode::kFailedPrecondition);
  std::vector<float> values = Values(1, {3, 8});
  values[1 * kHidden + 1] = 0.25f;  // row 4
  const absl::Status changed = engine_->AddRows(*contribution, {3, 8}, Bytes(values)).status();
  EXPECT_EQ(changed.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(changed.message()), HasSubstr("payload row 4"));
  EXPECT_EQ(Added().size(), 5u) << "not even the new rows of the slice";
}

TEST_F(ContributionsTest, AnIdNamesEitherAMicrobatchOrAContribution) {
  ASSERT_TRUE(Add(*engine_->OpenContribution(Spec(1)), {0, 1}).ok());
  const absl::Status taken = engine_->Open(Stream(1), std::make_shared<RowCollector>()).status();
  EXPECT_EQ(taken.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(taken.message()), HasSubstr("names a contribution of this step"));
  auto stream = engine_->Open(Stream(2), std::make_shared<RowCollector>());
  ASSERT_TRUE(stream.ok()) << stream.status();
  const absl::Status used = engine_->OpenContribution(Spec(2)).status();
  EXPECT_EQ(used.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(used.message()), HasSubstr("names a microbatch of this step"));
  StreamSpec loss_only = Stream(1);
  loss_only.accumulate_gradients = false;
  EXPECT_TRUE(engine_->Open(loss_only, std::make_shared<RowCollector>()).ok()) << "its id means nothing";
}

TEST_F(ContributionsTest, BadSpecsAndValuesChangeNothing) {
  const auto refused = [&](ContributionSpec spec) { return engine_->OpenContribution(spec).status(); };
  ContributionSpec spec = Spec(1);
  spec.head = "missing";
  EXPECT_EQ(refused(spec).code(), absl::StatusCode::kNotFound);
  spec = Spec(1, 5);
  const absl::Status future = refused(spec);
  EXPECT_EQ(future.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(GetCurrentStep(future), 0u);
  spec = Spec(1);
  spec.param = kernels::Param::kBias;
  EXPECT_EQ(refused(spec).code(), absl::StatusCode::kFailedPrecondition);
  spec.param = kernels::Param::kClassWeights;
  EXPECT_EQ(refused(spec).code(), absl::StatusCode::kFailedPrecondition);
  spec = Spec(1);
  spec.scale = kInf;
  EXPECT_EQ(refused(spec).code(), absl::StatusCode::kInvalidArgument);
  spec = Spec(1);
  spec.contribution_rows = RowRange{0, 11};
  EXPECT_EQ(refused(spec).code(), absl::StatusCode::kInvalidArgument);
  spec.contribution_rows = RowRange{2, 8};
  spec.rows = RowRange{1, 4};
  EXPECT_EQ(refused(spec).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(engine_->Describe("head")->step_contributions, 0);

  const auto contribution = engine_->OpenContribution(Spec(1));
  std::vector<float> values = Values(1, {2, 6});
  EXPECT_EQ(engine_->AddRows(*contribution, {2, 5}, Bytes(values)).status().code(),
            absl::StatusCode::kInvalidArgument);
  values[3 * kHidden + 1] = -kInf;
  const absl::Status infinite = engine_->AddRows(*contribution, {2, 6}, Bytes(values)).status();
  EXPECT_EQ(infinite.code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(std::string(infinite.message()), HasSubstr("payload row 5 column 1 must be finite"));
  EXPECT_THAT(Added(), IsEmpty());
  ASSERT_TRUE(Add(*engine_->OpenContribution(Spec(2)), {0, 1}).ok());
  ASSERT_TRUE(Add(*engine_->OpenContribution(Spec(4)), {0, 1}).ok());
  EXPECT_EQ(refused(Spec(3)).code(), absl::StatusCode::kResourceExhausted) << "25 rows are remembered";
}

// A finite element that a finite scale makes infinite in fp32 is refused; the largest that fits is added.
TEST_F(ContributionsTest, ProductsThatOverflow) {
  const struct {
    kernels::DType dtype;
    uint32_t fits;  // the largest element that fits, times the scale
    float scale;
  } cases[] = {{kernels::DType::kFloat32, 0x7effffffu, 2.0f},
               {kernels::DType::kFloat32, 0x7effffffu, -2.0f},
               {kernels::DType::kFloat32, 0x3f800000u, 3.4028235e38f},
               {kernels::DType::kFloat32, 0x7f7fffffu, 1.0f},
               {kernels::DType::kFloat32, 0x7f7fffffu, 0.0f},
               {kernels::DType::kBFloat16, 0x7effu, 2.0f},
               {kernels::DType::kFloat16, 0x3c00u, 3.4028235e38f},
               {kernels::DType::kFloat16, 0x7bffu, 5.1936e33f},
               {kernels::DType::kFloat16, 0x7bffu, 1e30f}};
  for (const auto& [dtype, fits, scale] : cases) {
    const size_t size = kernels::SizeOf(dtype);
    Contribution contribution{.terms = {.rows = {0, kVocab}, .dtype = dtype, .scale = scale},
                              .cols = kHidden};
    for (const uint32_t bits :
         {fits, fits + 1, fits | 1u << (8 * size - 1), (fits + 1) | 1u << (8 * size - 1)}) {
      std::vector<uint8_t> bytes(kVocab * kHidden * size);
      std::memcpy(&bytes[7 * size], &bits, size);
      const absl::Status status = CheckFinite(contribution, {0, kVocab}, bytes);
      const uint32_t magnitude = bits & (size == 2 ? 0x7fffu : 0x7fffffffu);
      EXPECT_EQ(status.ok(), magnitude == fits) << bits << " times " << scale;
      if (status.ok()) continue;
      EXPECT_THAT(std::string(status.message()), HasSubstr("open.scale"));
    }
  }
}

TEST_F(ContributionsTest, NonFiniteElementsOfEveryTypeAreFound) {
  const uint16_t halves[] = {0x7c00, 0xfc00, 0x7e01, 0x7bff};
  const uint16_t bfloats[] = {0x7f80, 0xff80, 0x7fc1, 0x7f7f};
  for (const kernels::DType dtype : {kernels::DType::kFloat16, kernels::DType::kBFloat16}) {
    ContributionSpec spec = Spec(dtype == kernels::DType::kFloat16 ? 1 : 2);
    spec.dtype = dtype;
    const auto contribution = engine_->OpenContribution(spec);
    ASSERT_TRUE(contribution.ok());
    for (int i = 0; i < 4; ++i) {
      std::vector<uint8_t> bytes(kVocab * kHidden * 2);
      std::memcpy(&bytes[14], dtype == kernels::DType::kFloat16 ? &halves[i] : &bfloats[i], 2);
      const absl::Status status = CheckFinite(*contribution, {0, kVocab}, bytes);
      EXPECT_EQ(status.ok(), i == 3) << "the largest finite number is one";
      if (i == 3) continue;
      EXPECT_THAT(std::string(status.message()), HasSubstr("row 3 column 1"));
    }
  }
}

TEST_F(ContributionsTest, ZeroedGradientsEndOpenCalls) {
  const auto contribution = engine_->OpenContribution(Spec(1));
  ASSERT_TRUE(Add(*contribution, {0, 5}).ok());
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  EXPECT_EQ(Add(*contribution, {5, 10}).status().code(), absl::StatusCode::kAborted);
  const auto next = engine_->OpenContribution(Spec(1));
  ASSERT_TRUE(next.ok());
  EXPECT_EQ(Add(*contribution, {5, 10}).status().code(), absl::StatusCode::kAborted)
      << "though the id is back";
  EXPECT_EQ(*Add(*next, {0, 10}), 10);
  ASSERT_TRUE(engine_->DeleteHead("head").ok());
  EXPECT_EQ(Add(*next, {0, 10}).status().code(), absl::StatusCode::kNotFound);
  AddHead();
  EXPECT_EQ(Add(*next, {0, 10}).status().code(), absl::StatusCode::kNotFound) << "another head of that name";
}

TEST_F(ContributionsTest, AFailingDeviceIsNotTrusted) {
  const auto contribution = engine_->OpenContribution(Spec(1));
  device_.fail_add = [] { return absl::UnavailableError("gone"); };
  EXPECT_EQ(Add(*contribution, {0, 5}).status().code(), absl::StatusCode::kInternal);
  device_.fail_add = [] { return absl::OkStatus(); };
  EXPECT_EQ(Add(*contribution, {0, 5}).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(Apply({.step = 0}).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(engine_->OpenContribution(Spec(2)).status().code(), absl::StatusCode::kInternal);
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  EXPECT_TRUE(engine_->OpenContribution(Spec(1)).ok());
}

// Calls that break anywhere and are sent again: whatever happens, each row arrives once.
TEST_F(ContributionsTest, RandomHistoriesAddEachRowOnce) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (uint64_t step = 0; step < 50; ++step) {
    std::vector<float> expected;
    for (uint64_t id : {1, 2}) {
      for (bool done = false; !done;) {
        const auto call = engine_->OpenContribution(Spec(id, step));
        ASSERT_TRUE(call.ok()) << call.status();
        int64_t row = 0;
        while (row < kVocab && random() % 4 != 0) {  // else the call breaks here
          const int64_t end = row + 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(kVocab - row));
          ASSERT_TRUE(Add(*call, {row, end}).ok());
          row = end;
        }
        done = row == kVocab;
      }
      for (int64_t row = 0; row < kVocab; ++row) expected.push_back(Values(id, {row, row + 1})[0]);
    }
    ASSERT_THAT(Added(), ::testing::UnorderedElementsAreArray(expected));
    ASSERT_TRUE(Apply({.step = step, .expected_microbatches = {1, 2}}).ok());
  }
}

// ---- Gradients from outside, in deterministic order ----
// They wait for their turn among the microbatches.

class DeterministicContributionsTest : public ContributionsTest {
 protected:
  DeterministicContributionsTest() { Start({.deterministic = true}); }

  // Notified when the contribution may be added.
  struct Turn {
    explicit Turn(Engine& engine, const Contribution& contribution)
        : ticket(engine.AwaitTurn(contribution, [called = called] { called->Notify(); })) {
      if (ticket == 0) called->Notify();
    }
    std::shared_ptr<absl::Notification> called = std::make_shared<absl::Notification>();
    uint64_t ticket;
  };
  // Sends a microbatch of two rows, {100 id + row, 0}, and waits for its end.
  void SendMicrobatch(uint64_t id) {
    StreamSpec spec = Stream(id);
    spec.hidden_dtype = kernels::DType::kFloat32;
    spec.microbatch_rows = 2;
    spec.rows = {0, 2};
    spec.targets = {1, 1};
    const auto collector = std::make_shared<RowCollector>();
    auto stream = engine_->Open(std::move(spec), collector);
    ASSERT_TRUE(stream.ok()) << stream.status();
    (*stream)->Start();
    SendSlice(**stream, {0, 2}, Values(id, {0, 2}));
    EXPECT_TRUE(collector->Wait().ok()) << collector->Wait();
  }
  void AddContribution(uint64_t id) {
    const auto contribution = engine_->OpenContribution(Spec(id));
    ASSERT_TRUE(contribution.ok()) << contribution.status();
    const Turn turn(*engine_, *contribution);
    turn.called->WaitForNotification();
    for (int64_t row = 0; row < kVocab; row += 5) {
      const auto added = Add(*contribution, {row, row + 5});
      EXPECT_TRUE(added.ok()) << added.status();
    }
  }
  // What the device saw of contributions: {100 id + row, 0} each, of microbatches: 100 id + row.
  std::vector<float> InOrder(uint64_t ids) {
    std::vector<float> order;
    for (uint64_t id = 0; id < ids; ++id) {
      if (id % 2 == 0) {
        order.insert(order.end(), {static_cast<float>(100 * id), static_cast<float>(100 * id + 1)});
      } else {
        const std::vector<float> values = Values(id, {0, kVocab});
        order.insert(order.end(), values.begin(), values.end());
      }
    }
    return order;
  }
};

TEST_F(DeterministicContributionsTest, AContributionWaitsForWhatIsBeforeIt) {
  const auto contribution = engine_->OpenContribution(Spec(1));
  ASSERT_TRUE(contribution.ok());
  const Turn turn(*engine_, *contribution);
  EXPECT_NE(turn.ticket, 0u);
  EXPECT_EQ(Add(*contribution, {0, 10}).status().code(), absl::StatusCode::kUnavailable) << "it did not wait";
  std::thread later([this] { SendMicrobatch(2); });
  EXPECT_FALSE(turn.called->WaitForNotificationWithTimeout(absl::Milliseconds(20)));
  SendMicrobatch(0);
  turn.called->WaitForNotification();
  EXPECT_FALSE(ForgetTurn(*contribution, turn.ticket)) << "called already";
  EXPECT_EQ(*Add(*contribution, {0, 4}), 4);
  EXPECT_EQ(*Add(*contribution, {4, 10}), 6);
  later.join();
  EXPECT_EQ(device_.accumulated(), InOrder(3));
  EXPECT_EQ(*Add(*contribution, {0, 10}), 0) << "repeats need no turn";
  EXPECT_EQ(engine_->Describe("head")->waits_for, "");
}

TEST_F(DeterministicContributionsTest, WaitsEndWithTheCallOrTheStep) {
  const auto contribution = engine_->OpenContribution(Spec(1));
  const Turn forgotten(*engine_, *contribution);
  EXPECT_TRUE(ForgetTurn(*contribution, forgotten.ticket));
  EXPECT_FALSE(ForgetTurn(*contribution, forgotten.ticket));
  const Turn waiting(*engine_, *contribution);
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  waiting.called->WaitForNotification();
  EXPECT_EQ(Add(*contribution, {0, 10}).status().code(), absl::StatusCode::kAborted);
  const auto again = engine_->OpenContribution(Spec(1));
  const Turn deleted(*engine_, *again);
  ASSERT_TRUE(engine_->DeleteHead("head").ok());
  deleted.called->WaitForNotification();
  EXPECT_EQ(Add(*again, {0, 10}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(forgotten.called->HasBeenNotified());
}

TEST_F(DeterministicContributionsTest, NobodyWaitsOnAHeadThatIsGoneNorKeepsIt) {
  const auto contribution = engine_->OpenContribution(Spec(1));
  ASSERT_TRUE(contribution.ok());
  ASSERT_TRUE(engine_->DeleteHead("head").ok());
  EXPECT_EQ(Turn(*engine_, *contribution).ticket, 0u);
  EXPECT_EQ(device_.heads, 0) << "its memory is free";
}

TEST_F(DeterministicContributionsTest, AContributionOfNoRowsHasNoTurnToTake) {
  ContributionSpec nothing = Spec(0);
  nothing.contribution_rows = RowRange{3, 3};
  ASSERT_TRUE(engine_->OpenContribution(nothing).ok());
  AddContribution(1);
  EXPECT_EQ(Added().size(), 10u);
}

TEST_F(DeterministicContributionsTest, AnyOrderOfArrivalGivesTheSameSums) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 20; ++round) {
    std::vector<uint64_t> ids = {0, 1, 2, 3, 4};
    std::shuffle(ids.begin(), ids.end(), random);
    std::vector<std::thread> senders;
    for (uint64_t id : ids) {
      senders.emplace_back([this, id] {
        if (id % 2 == 0) {
          SendMicrobatch(id);
        } else {
          AddContribution(id);
        }
      });
      if (random() % 2 == 0) absl::SleepFor(absl::Milliseconds(1));
    }
    for (std::thread& sender : senders) sender.join();
    ASSERT_EQ(device_.accumulated(), InOrder(5));
    ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  }
}

}  // namespace
}  // namespace lossd::engine::open_step_test
