// SPDX-License-Identifier: Apache-2.0
// Steps through the engine: applied once, whole, and never on numbers that may be wrong.
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/engine.h"
#include "server/engine/errors.h"
#include "tests/server/engine/engine_fixture.h"

namespace lossd::engine::steps_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr double kInf = std::numeric_limits<double>::infinity();

using StepsTest = EngineTest;

TEST_F(StepsTest, StepsApplyOnceAndSeeEverythingBefore) {
  Start();
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(Whole(1, 4), collector);
  Send(*stream, 1, {0, 4});
  StepRequest request{.step = 0, .expected_microbatches = {1, 2}, .expected_rows = 5};
  const absl::Status missing = engine_->ApplyStep("head", request).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(GetMissing(missing),
              ElementsAre("microbatch 2: never opened", "rows: 4 accumulated, 5 expected"));
  EXPECT_EQ(device_.steps, 0);

  request = {.step = 0, .expected_microbatches = {1}, .expected_rows = 4};
  auto result = engine_->ApplyStep("head", request);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->state.step, 1u);
  EXPECT_EQ(result->grad_norm, 4.0);
  EXPECT_EQ(result->rows, 4);
  EXPECT_FALSE(result->repeated);

  auto repeat = engine_->ApplyStep("head", request);
  ASSERT_TRUE(repeat.ok());
  EXPECT_TRUE(repeat->repeated);
  EXPECT_EQ(repeat->grad_norm, 4.0);
  EXPECT_EQ(device_.steps, 1);
  request.optimizer.learning_rate = 0.5;
  EXPECT_EQ(engine_->ApplyStep("head", request).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(engine_->ApplyStep("head", {.step = 7}).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(engine_->GradNorm("head", 0).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(engine_->GradNorm("head", 1).ok());
  EXPECT_EQ(device_.steps, 1);
  EXPECT_TRUE(collector->Wait().ok());
}

TEST_F(StepsTest, ARepeatedStepMustBeTheOneThatWasApplied) {
  Start();
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(Whole(1, 4), collector);
  Send(*stream, 1, {0, 4});
  ASSERT_TRUE(collector->Wait().ok());
  ASSERT_TRUE(engine_->ApplyStep("head", {.step = 0, .expected_microbatches = {1}}).ok());
  const StepRequest other{.step = 0, .expected_microbatches = {1, 2}, .expected_rows = 5};
  const absl::Status refused = engine_->ApplyStep("head", other).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(GetMissing(refused),
              ElementsAre("microbatch 2: was not whole in it", "rows: 4 were in it, 5 expected"));
  const auto repeat = engine_->ApplyStep("head", {.step = 0, .expected_rows = 4});
  ASSERT_TRUE(repeat.ok()) << repeat.status();
  EXPECT_TRUE(repeat->repeated);
  EXPECT_EQ(device_.steps, 1);
}

// What a step applied says is what is in the sum.
TEST_F(StepsTest, RefusedMicrobatchesAreNotCounted) {
  Start();
  for (uint64_t id : {1, 2, 3}) {
    auto collector = std::make_shared<RowCollector>();
    auto stream = Open(Whole(id, 4), collector);
    if (id == 2) Send(*stream, id, {0, 4}, 0, NAN);
    if (id == 3) Send(*stream, id, {0, 2});
    if (id == 1) Send(*stream, id, {0, 4});
    ASSERT_TRUE(engine_->GradNorm("head", 0).ok());  // it is computed
  }
  const auto applied = engine_->ApplyStep("head", {.step = 0});
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_EQ(applied->microbatches, 2);  // all of 1, half of 3
  EXPECT_EQ(applied->rows, 6);
  const absl::Status missing =
      engine_->ApplyStep("head", {.step = 0, .expected_microbatches = {1, 2, 3}}).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(GetMissing(missing),
              ElementsAre("microbatch 2: was not whole in it", "microbatch 3: was not whole in it"));
}

// A microbatch that a trainer has begun and given up for another one.
TEST_F(StepsTest, AStepDoesNotCountHalfAMicrobatch) {
  Start();
  for (uint64_t id : {1, 2}) {
    auto collector = std::make_shared<RowCollector>();
    auto stream = Open(Whole(id, 4), collector);
    Send(*stream, id, {0, id == 1 ? 2 : 4});
    ASSERT_TRUE(engine_->GradNorm("head", 0).ok());  // it is computed
    stream->Cancel(absl::CancelledError("given up"));
    collector->Wait().IgnoreError();  // it may have ended before
  }
  const StepRequest request{.step = 0, .expected_microbatches = {2}};
  const absl::Status missing = engine_->ApplyStep("head", request).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(GetMissing(missing), ElementsAre("microbatch 1: rows [2, 4) of 4 (not expected, but begun)"));
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(Whole(1, 4), collector);
  Send(*stream, 1, {0, 4});
  ASSERT_TRUE(collector->Wait().ok());
  EXPECT_TRUE(engine_->ApplyStep("head", request).ok()) << "whole, it is welcome";
}

TEST_F(StepsTest, AHalfAppliedStepIsNotTrustedUntilWeightsAreLoaded) {
  Start();
  device_.fail_step = absl::InternalError("boom");
  EXPECT_EQ(engine_->ApplyStep("head", {.step = 0}).status().code(), absl::StatusCode::kInternal);
  device_.fail_step = absl::OkStatus();
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  EXPECT_EQ(engine_->Open(Whole(1, 2), std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kInternal);
  EXPECT_EQ(engine_->GradNorm("head", 0).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(engine_->ApplyStep("head", {.step = 0}).status().code(), absl::StatusCode::kInternal);
  ASSERT_TRUE(engine_->BeginLoad("head", {}, std::nullopt).ok());
  ASSERT_TRUE(engine_->EndLoad("head").ok());
  EXPECT_TRUE(engine_->ApplyStep("head", {.step = 0}).ok());
}

TEST_F(StepsTest, WeightsThatAreBeingReplacedServeNobody) {
  Start();
  ASSERT_TRUE(engine_->BeginLoad("head", {.step = 3, .updates = 2}, std::nullopt).ok());
  StreamSpec loss_only = Whole(1, 2);
  loss_only.accumulate_gradients = false;
  loss_only.step.reset();
  const auto expect_refused = [](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(status.message()), HasSubstr("being replaced by a checkpoint's"));
  };
  expect_refused(engine_->Open(loss_only, std::make_shared<RowCollector>()).status());
  expect_refused(engine_->Open(Whole(1, 2, 3), std::make_shared<RowCollector>()).status());
  expect_refused(engine_->ApplyStep("head", {.step = 3}).status());
  ASSERT_TRUE(engine_->EndLoad("head").ok());
  EXPECT_TRUE(engine_->Open(loss_only, std::make_shared<RowCollector>()).ok());
}

TEST_F(StepsTest, HalfZeroedGradientsAreNotTrusted) {
  Start();
  device_.fail_zero = absl::InternalError("boom");
  EXPECT_EQ(engine_->ZeroGradients("head", 0).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(engine_->ApplyStep("head", {.step = 0}).status().code(), absl::StatusCode::kInternal);
  device_.fail_zero = absl::OkStatus();
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  EXPECT_TRUE(engine_->ApplyStep("head", {.step = 0}).ok());
}

TEST_F(StepsTest, StreamsOfAClosedStepEnd) {
  Start();
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(Whole(1, 8), collector);
  Send(*stream, 1, {0, 4});
  ASSERT_TRUE(engine_->ApplyStep("head", {.step = 0}).ok());
  EXPECT_EQ(collector->Wait().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(GetCurrentStep(collector->Wait()), 1u);
  Send(*stream, 1, {4, 8});  // too late: dropped, and the buffer comes back
  EXPECT_TRUE(engine_->OnDevice("head", [](head::Head&) { return absl::OkStatus(); }).ok());
  EXPECT_THAT(device_.accumulated(), IsEmpty());
  EXPECT_EQ(engine_->stats().staging_used_bytes, 0);
}

TEST_F(StepsTest, ZeroGradientsForgetsTheStep) {
  Start();
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(Whole(1, 2), collector);
  Send(*stream, 1, {0, 2});
  ASSERT_TRUE(collector->Wait().ok());
  EXPECT_EQ(engine_->ZeroGradients("head", 3).status().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  auto again = std::make_shared<RowCollector>();
  StreamSpec spec = Whole(1, 2);
  spec.targets = {3, 4};  // other contents are fine now
  auto second = Open(spec, again);
  Send(*second, 1, {0, 2});
  ASSERT_TRUE(again->Wait().ok());
  EXPECT_EQ(again->summary().accumulated_rows, 2);
}

// It has none, and goes on computing losses.
TEST_F(StepsTest, ZeroGradientsOfAFrozenHeadIsRefusedAndChangesNothing) {
  Start();
  AddHead("frozen", /*trainable=*/false);
  const absl::Status refused = engine_->ZeroGradients("frozen", 0).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("frozen"));
  const auto norm = engine_->GradNorm("frozen", std::nullopt);
  EXPECT_EQ(norm.status().code(), absl::StatusCode::kFailedPrecondition) << norm.status();

  StreamSpec spec = Whole(1, 2);
  spec.head = "frozen";
  spec.accumulate_gradients = false;
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(spec, collector);
  ASSERT_NE(stream, nullptr);
  Send(*stream, 1, {0, 2});
  EXPECT_TRUE(collector->Wait().ok()) << collector->Wait();
}

TEST_F(StepsTest, AFailedChunkAccumulatesNothing) {
  Start();
  device_.fail_results = [](int64_t chunk) {
    return chunk == 0 ? absl::InternalError("boom") : absl::OkStatus();
  };
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(Whole(1, 2), collector);
  Send(*stream, 1, {0, 2});
  EXPECT_EQ(collector->Wait().code(), absl::StatusCode::kInternal);
  auto again = std::make_shared<RowCollector>();
  auto second = Open(Whole(1, 2), again);
  Send(*second, 1, {0, 2});
  ASSERT_TRUE(again->Wait().ok());
  EXPECT_EQ(again->summary().accumulated_rows, 2);
}

TEST_F(StepsTest, AHalfAccumulatedChunkIsNotTrusted) {
  Start();
  device_.fail_done = [](int64_t chunk) {
    return chunk == 0 ? absl::InternalError("boom") : absl::OkStatus();
  };
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(Whole(1, 2), collector);
  Send(*stream, 1, {0, 2});
  EXPECT_TRUE(collector->Wait().ok()) << "it does not wait for the gradient";
  EXPECT_EQ(engine_->ApplyStep("head", {.step = 0}).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(engine_->Open(Whole(2, 2), std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kInternal);
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  EXPECT_TRUE(engine_->ApplyStep("head", {.step = 0}).ok());
}

// ---- Gradients that are not finite ----

TEST_F(StepsTest, ANonFiniteNormIsRefusedAndChangesNothing) {
  Start();
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(Whole(1, 8), collector);
  Send(*stream, 1, {0, 5});
  for (const double norm : {kInf, std::nan("")}) {
    device_.grad_norm = norm;
    const absl::Status refused = engine_->ApplyStep("head", {.step = 0}).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(refused.message()), HasSubstr("skip_non_finite must be set"));
  }
  EXPECT_EQ(engine_->Describe("head")->state.step, 0u);
  EXPECT_EQ(device_.accumulated().size(), 5u);
  EXPECT_EQ(device_.steps, 0);
  Send(*stream, 1, {5, 8});
  EXPECT_TRUE(collector->Wait().ok()) << "the step is as open as before";
  device_.grad_norm.reset();
  EXPECT_TRUE(engine_->ApplyStep("head", {.step = 0, .expected_rows = 8}).ok());
}

TEST_F(StepsTest, SkippedStepsCloseWithoutAnUpdate) {
  Start();
  ASSERT_TRUE(engine_->ApplyStep("head", {.step = 0, .skip_non_finite = true}).ok());
  EXPECT_EQ(device_.last_update, 1);
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(Whole(1, 4, 1), collector);
  Send(*stream, 1, {0, 4});
  ASSERT_TRUE(collector->Wait().ok());
  device_.grad_norm = kInf;
  const StepRequest request{.step = 1, .expected_microbatches = {1}, .skip_non_finite = true};
  const auto skipped = engine_->ApplyStep("head", request);
  ASSERT_TRUE(skipped.ok()) << skipped.status();
  EXPECT_TRUE(skipped->skipped);
  EXPECT_FALSE(skipped->repeated);
  EXPECT_EQ(skipped->grad_norm, kInf);
  EXPECT_EQ(skipped->state.step, 2u);
  EXPECT_EQ(skipped->microbatches, 1);
  EXPECT_EQ(device_.steps, 1) << "no update";
  EXPECT_THAT(device_.accumulated(), IsEmpty());
  EXPECT_EQ(engine_->Describe("head")->updates, 1u);

  device_.grad_norm.reset();  // a repeat answers what happened, whatever is on the device now
  const auto repeat = engine_->ApplyStep("head", request);
  ASSERT_TRUE(repeat.ok()) << repeat.status();
  EXPECT_TRUE(repeat->skipped);
  EXPECT_TRUE(repeat->repeated);
  EXPECT_EQ(repeat->state.step, 2u);

  ASSERT_TRUE(engine_->ApplyStep("head", {.step = 2, .skip_non_finite = true}).ok());
  EXPECT_EQ(device_.last_update, 2) << "the skipped step does not count";
  EXPECT_EQ(engine_->Describe("head")->updates, 2u);
  EXPECT_EQ(engine_->Describe("head")->state.step, 3u);
}

TEST_F(StepsTest, ASkippedStepNeedsWhatAnyStepNeeds) {
  Start();
  device_.grad_norm = kInf;
  const StepRequest request{.step = 0, .expected_microbatches = {9}, .skip_non_finite = true};
  const absl::Status missing = engine_->ApplyStep("head", request).status();
  EXPECT_FALSE(missing.ok());
  EXPECT_THAT(GetMissing(missing), ElementsAre("microbatch 9: never opened"));
  EXPECT_FALSE(engine_->ApplyStep("head", {.step = 1, .skip_non_finite = true}).ok());
  EXPECT_EQ(engine_->Describe("head")->state.step, 0u);
}

TEST_F(StepsTest, LoadedProgressCountsUpdates) {
  Start();
  ASSERT_TRUE(engine_->BeginLoad("head", {.step = 7, .updates = 4}, std::nullopt).ok());
  ASSERT_TRUE(engine_->EndLoad("head").ok());
  ASSERT_TRUE(engine_->ApplyStep("head", {.step = 7}).ok());
  EXPECT_EQ(device_.last_update, 5);
}

}  // namespace
}  // namespace lossd::engine::steps_test
