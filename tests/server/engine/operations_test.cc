// SPDX-License-Identifier: Apache-2.0
// Tests of operations.h through an engine: steps, bounds on updates, access to tensors, resets and deletions.
#include "server/engine/operations.h"

#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/engine.h"
#include "server/engine/errors.h"
#include "tests/server/engine/engine_fixture.h"

namespace lossd::engine::operations_test {
namespace {

using kernels::OptimizerOptions;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// ---- Steps ----
// Steps are applied once, whole, and never on numbers that may be wrong.

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

// ---- Update bounds ----

using Kind = OptimizerOptions::Kind;

// Of weights of which nothing is known, unless said otherwise.
UpdateReach ReachOf(const OptimizerOptions& options, int64_t update = 1, double norm = 1.0,
                    const Magnitudes& before = {}) {
  EXPECT_TRUE(CheckOptionsFit(options, update).ok());
  const absl::StatusOr<Reach> reach = CheckReach(options, update, norm, before);
  EXPECT_TRUE(reach.ok()) << reach.status();
  return reach.ok() ? reach->reach : UpdateReach::kUnknown;
}

bool IsRefused(const OptimizerOptions& options, double norm) {
  return !CheckReach(options, 1, norm, {}).ok();
}

constexpr Magnitudes kMeasured{.matrix = 10.0, .vectors = 10.0, .moment1 = 100.0, .moment2 = 1e4};

// These take no look at the weights, so they cost nothing.
TEST(UpdateBoundsTest, OptionsOfTrainingAreBounded) {
  for (const int64_t update : {1, 2, 1000, 1 << 30}) {
    EXPECT_EQ(ReachOf({}, update), UpdateReach::kBounded);
    EXPECT_EQ(ReachOf({.learning_rate = 0.0}, update), UpdateReach::kBounded);
    EXPECT_EQ(ReachOf({.learning_rate = 0.1, .weight_decay = 0.1, .beta1 = 0.9, .beta2 = 0.95}, update, 1e6),
              UpdateReach::kBounded);
    EXPECT_EQ(ReachOf({.learning_rate = 1.0, .grad_multiplier = 1.0 / 65536, .epsilon = 1e-15}, update, 1e9),
              UpdateReach::kBounded);
    EXPECT_EQ(ReachOf({.kind = Kind::kSgd,
                       .learning_rate = 0.5,
                       .weight_decay = 1e-4,
                       .momentum = 0.9,
                       .nesterov = true},
                      update, 1e6, kMeasured),
              UpdateReach::kBounded);
  }
}

TEST(UpdateBoundsTest, UnusualOptionsAreLookedAt) {
  EXPECT_EQ(ReachOf({.epsilon = 0.0}), UpdateReach::kUnknown) << "a moment of 0 whose square was too small";
  EXPECT_EQ(ReachOf({.epsilon = 1e-60}), UpdateReach::kUnknown) << "0 in fp32";
  EXPECT_EQ(ReachOf({.epsilon = 1e-40}), UpdateReach::kUnknown) << "subnormal";
  EXPECT_EQ(ReachOf({.learning_rate = 3.0, .weight_decay = 1.0}), UpdateReach::kUnknown);
  EXPECT_EQ(ReachOf({.learning_rate = 1e20, .epsilon = 1e-15}), UpdateReach::kUnknown);
  EXPECT_EQ(ReachOf({.kind = Kind::kSgd, .learning_rate = 0.1, .momentum = 1e36}, 2, 1e8, kMeasured),
            UpdateReach::kUnknown);
  EXPECT_EQ(ReachOf({.kind = Kind::kSgd, .learning_rate = 1.0, .momentum = 0.9, .dampening = 1e30}, 2, 1e8),
            UpdateReach::kUnknown);
}

// What a head holds decides where the options alone do not.
TEST(UpdateBoundsTest, MagnitudesAreCounted) {
  const OptimizerOptions grows{.learning_rate = 3.0, .weight_decay = 1.0};
  EXPECT_EQ(ReachOf(grows, 1, 1.0, kMeasured), UpdateReach::kBounded);
  EXPECT_EQ(ReachOf(grows, 1, 1.0, {.matrix = 3e37, .vectors = 0.0}), UpdateReach::kUnknown);
  const OptimizerOptions decays{.kind = Kind::kSgd, .learning_rate = 0.1, .weight_decay = 0.1};
  EXPECT_EQ(ReachOf(decays), UpdateReach::kUnknown) << "a weight may be infinite";
  EXPECT_EQ(ReachOf(decays, 1, 1.0, kMeasured), UpdateReach::kBounded);
  // A buffer that was filled by large gradients, and a learning rate that small ones invite.
  const OptimizerOptions steep{.kind = Kind::kSgd, .learning_rate = 1e38, .momentum = 0.9};
  EXPECT_EQ(ReachOf(steep, 2, 1e-18, {.moment1 = 1e18}), UpdateReach::kUnknown);
  EXPECT_EQ(ReachOf(steep, 2, 1e-18), UpdateReach::kBounded) << "an empty one";
  EXPECT_EQ(ReachOf({}, 2, 1.0, {.moment1 = 1e37}), UpdateReach::kUnknown);
  EXPECT_EQ(ReachOf({}, 2, 1.0, {.moment2 = 3.3e38}), UpdateReach::kUnknown);
}

TEST(UpdateBoundsTest, WhatIsBoundedSaysHowLargeItIs) {
  const OptimizerOptions options{.kind = Kind::kSgd, .learning_rate = 0.5, .momentum = 0.5};
  const auto reach = CheckReach(options, 2, 8.0, kMeasured);
  ASSERT_TRUE(reach.ok()) << reach.status();
  EXPECT_NEAR(reach->after.moment1, 58.0, 1e-3);
  EXPECT_NEAR(reach->after.matrix, 39.0, 1e-3);
  EXPECT_EQ(reach->after.moment2, 1e4);
}

// Idle rows stay as large as they are, while the bound of the others falls.
TEST(UpdateBoundsTest, LazyRowsMayStayAsTheyAre) {
  for (OptimizerOptions options :
       {OptimizerOptions{.learning_rate = 1.9, .weight_decay = 1.0, .beta1 = 0.5, .beta2 = 0.5},
        OptimizerOptions{.kind = Kind::kSgd, .learning_rate = 0.0, .momentum = 0.5}}) {
    const auto dense = CheckReach(options, 2, 1e-3, kMeasured);
    options.lazy_rows = true;
    const auto lazy = CheckReach(options, 2, 1e-3, kMeasured);
    ASSERT_TRUE(dense.ok() && lazy.ok());
    EXPECT_LT(dense->after.moment1, kMeasured.moment1);
    EXPECT_GE(lazy->after.matrix, kMeasured.matrix);
    EXPECT_EQ(lazy->after.moment1, kMeasured.moment1);
    EXPECT_EQ(lazy->after.moment2, kMeasured.moment2);
    EXPECT_EQ(lazy->after.vectors, dense->after.vectors);
    EXPECT_EQ(lazy->reach, dense->reach);
  }
}

// -infinity in a bias keeps a class out; decay by SGD makes it NaN, as does a factor of 0.
TEST(UpdateBoundsTest, DecayOfInfiniteValuesIsRefused) {
  const Magnitudes masked{.matrix = 1.0};
  OptimizerOptions sgd{.kind = Kind::kSgd, .learning_rate = 0.1, .weight_decay = 0.1};
  EXPECT_TRUE(CheckDecay(sgd, masked).ok());
  sgd.decay_vectors = true;
  EXPECT_TRUE(CheckDecay(sgd, kMeasured).ok());
  EXPECT_THAT(std::string(CheckDecay(sgd, masked).message()), HasSubstr("optimizer.decay_vectors"));
  EXPECT_THAT(std::string(CheckDecay(sgd, {.vectors = 1.0}).message()),
              HasSubstr("optimizer.sgd.weight_decay"));
  OptimizerOptions adamw{.learning_rate = 0.1, .weight_decay = 0.1, .decay_vectors = true};
  EXPECT_TRUE(CheckDecay(adamw, masked).ok());
  adamw.weight_decay = 10.0;
  EXPECT_FALSE(CheckDecay(adamw, masked).ok());
  EXPECT_THAT(std::string(CheckDecay(adamw, {.vectors = 1.0}).message()),
              HasSubstr("optimizer.adamw.weight_decay"));
}

TEST(UpdateBoundsTest, WhatMustOverflowIsRefused) {
  EXPECT_TRUE(IsRefused({.learning_rate = 1e31}, 1.0));
  EXPECT_TRUE(IsRefused({.grad_multiplier = 1e15}, 1e5));
  EXPECT_FALSE(IsRefused({.grad_multiplier = 1e15}, 1e3));
  EXPECT_TRUE(IsRefused({.kind = Kind::kSgd, .learning_rate = 1e20}, 1e11));
  EXPECT_TRUE(IsRefused({.kind = Kind::kSgd, .learning_rate = 1e-30, .grad_multiplier = 1e30}, 1e9));
  EXPECT_FALSE(CheckOptionsFit({.learning_rate = 3e38, .beta1 = 0.9999}, 1).ok());
  EXPECT_FALSE(CheckOptionsFit({.learning_rate = 1e20, .weight_decay = 1e20}, 1).ok());
}

// ---- Access to tensors ----
// Reading and writing tensors row by row, while other calls change the head or want to use it.

constexpr kernels::TensorId kValue{kernels::Param::kWeight, kernels::Role::kValue};
constexpr kernels::TensorId kGradient{kernels::Param::kWeight, kernels::Role::kGradient};
constexpr kernels::TensorId kMoment{kernels::Param::kWeight, kernels::Role::kMoment1};

class TensorAccessTest : public EngineTest {
 protected:
  static constexpr int64_t kVocab = 10;

  TensorAccessTest() { Start({.retained_bytes = 1024}); }

  std::unique_ptr<TensorReader> Reader() {
    auto reader = engine_->OpenReader("head");
    EXPECT_TRUE(reader.ok()) << reader.status();
    return *std::move(reader);
  }
  std::unique_ptr<TensorWriter> Writer(kernels::TensorId id = kValue) {
    auto writer = engine_->OpenWriter("head");
    EXPECT_TRUE(writer.ok()) << writer.status();
    (*writer)->SetRows(id, {0, kVocab});
    return *std::move(writer);
  }
  static absl::StatusOr<HeadState> Read(TensorReader& reader, kernels::TensorId id,
                                        RowRange rows = {0, kVocab}) {
    std::vector<uint8_t> out(static_cast<size_t>(rows.size() * kHidden) * sizeof(float));
    return reader.Read(id, rows, kernels::DType::kFloat32, absl::MakeSpan(out));
  }
  static absl::StatusOr<HeadState> Write(TensorWriter& writer, RowRange rows) {
    const std::vector<uint8_t> in(static_cast<size_t>(rows.size() * kHidden) * sizeof(float));
    return writer.Write(rows, kernels::DType::kFloat32, in);
  }
  absl::StatusCode ReadCode(kernels::TensorId id) { return Read(*Reader(), id).status().code(); }
  absl::StatusCode OpenCode(StreamSpec spec) {
    return engine_->Open(std::move(spec), std::make_shared<RowCollector>()).status().code();
  }
  static StreamSpec LossOnly(uint64_t id) {
    StreamSpec spec = Whole(id, 4);
    spec.accumulate_gradients = spec.want_grad_hidden = false;
    spec.step.reset();
    return spec;
  }
  static StreamSpec Retaining(uint64_t id) {
    StreamSpec spec = LossOnly(id);
    spec.reduction = Reduction::kNone;
    spec.retain = true;
    return spec;
  }
  HeadState State() { return engine_->Describe("head")->state; }
  void Contribute(uint64_t id) {
    const auto contribution = engine_->OpenContribution({.head = "head", .contribution_id = id});
    ASSERT_TRUE(contribution.ok()) << contribution.status();
    const std::vector<uint8_t> values(kVocab * kHidden * sizeof(float));
    ASSERT_TRUE(engine_->AddRows(*contribution, {0, kVocab}, values).ok());
  }
};

TEST_F(TensorAccessTest, AReadIsOfOneVersionOfTheWeights) {
  const auto value = Reader(), moment = Reader();
  const auto first = Read(*value, kValue, {0, 5});
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(*first, State());
  ASSERT_TRUE(Read(*moment, kMoment, {0, 5}).ok());
  Contribute(1);
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  EXPECT_TRUE(Read(*value, kValue, {5, 10}).ok()) << "the gradients do not matter";
  ASSERT_TRUE(engine_->ApplyStep("head", {.step = 0}).ok());
  EXPECT_EQ(Read(*value, kValue, {5, 10}).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(Read(*moment, kMoment, {5, 10}).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ReadCode(kValue), absl::StatusCode::kOk);
}

TEST_F(TensorAccessTest, AReadOfAGradientIsOfOneStateOfIt) {
  const auto expect_aborted = [&](const char* what, auto change) {
    const auto reader = Reader();
    ASSERT_TRUE(Read(*reader, kGradient, {0, 5}).ok());
    change();
    EXPECT_EQ(Read(*reader, kGradient, {5, 10}).status().code(), absl::StatusCode::kAborted) << what;
  };
  expect_aborted("a contribution", [&] { Contribute(1); });
  expect_aborted("zeros", [&] { ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok()); });
  expect_aborted("rows", [&] {
    auto collector = std::make_shared<RowCollector>();
    auto stream = Open(Whole(2, 4), collector);
    Send(*stream, 2, {0, 4});
    ASSERT_TRUE(collector->Wait().ok());
  });
  const auto reader = Reader();
  ASSERT_TRUE(Read(*reader, kGradient, {0, 5}).ok());
  ASSERT_TRUE(Write(*Writer(), {0, kVocab}).ok());
  EXPECT_TRUE(Read(*reader, kGradient, {5, 10}).ok()) << "the weights do not matter";
}

TEST_F(TensorAccessTest, AnotherHeadOfTheNameIsNotTheHead) {
  const auto reader = Reader(), unused = Reader();
  auto writer = Writer();
  ASSERT_TRUE(Read(*reader, kValue, {0, 5}).ok());
  ASSERT_TRUE(Write(*writer, {0, 5}).ok());
  const HeadState old = State();
  ASSERT_TRUE(engine_->DeleteHead("head").ok());
  EXPECT_EQ(Read(*reader, kValue, {5, 10}).status().code(), absl::StatusCode::kNotFound);
  AddHead("head");
  EXPECT_GT(State().generation, old.generation);
  EXPECT_GT(State().weights_version, old.weights_version);
  EXPECT_EQ(Read(*reader, kValue, {5, 10}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Read(*unused, kValue).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Write(*writer, {5, 10}).status().code(), absl::StatusCode::kNotFound);
  const HeadState fresh = State();
  writer.reset();
  EXPECT_EQ(State(), fresh) << "it was a write of the other one";
  EXPECT_EQ(ReadCode(kValue), absl::StatusCode::kOk);
}

TEST_F(TensorAccessTest, NothingBeginsWithAHalfWrittenValue) {
  const HeadState before = State();
  auto writer = Writer();
  const auto begun = Write(*writer, {0, 4});
  ASSERT_TRUE(begun.ok()) << begun.status();
  EXPECT_GT(begun->weights_version, before.weights_version);
  EXPECT_EQ(begun->generation, before.generation);
  EXPECT_EQ(OpenCode(LossOnly(1)), absl::StatusCode::kUnavailable);
  EXPECT_EQ(OpenCode(Whole(1, 4)), absl::StatusCode::kUnavailable);
  EXPECT_EQ(OpenCode(Retaining(1)), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReadCode(kValue), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReadCode(kMoment), absl::StatusCode::kUnavailable);
  EXPECT_EQ(engine_->ApplyStep("head", {.step = 0}).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(engine_->Describe("head")->tensors_status.code(), absl::StatusCode::kUnavailable) << "for saves";
  EXPECT_EQ(engine_->Describe("head")->step_microbatches, 0);
  EXPECT_EQ(engine_->stats().retained_bytes_used, 0);

  EXPECT_EQ(ReadCode(kGradient), absl::StatusCode::kOk);
  Contribute(1);
  EXPECT_TRUE(engine_->GradNorm("head", 0).ok());
  EXPECT_TRUE(engine_->ZeroGradients("head", 0).ok());

  ASSERT_TRUE(Write(*writer, {4, 8}).ok());
  EXPECT_EQ(ReadCode(kValue), absl::StatusCode::kUnavailable);
  const auto ended = Write(*writer, {8, 10});
  ASSERT_TRUE(ended.ok()) << ended.status();
  EXPECT_GT(ended->weights_version, begun->weights_version);
  EXPECT_EQ(ReadCode(kValue), absl::StatusCode::kOk);
  EXPECT_EQ(OpenCode(LossOnly(1)), absl::StatusCode::kOk);
  EXPECT_TRUE(engine_->ApplyStep("head", {.step = 0}).ok());
  writer.reset();
  EXPECT_TRUE(engine_->Describe("head")->tensors_status.ok());
}

TEST_F(TensorAccessTest, ARepeatOfAStepIsAnsweredMeanwhile) {
  ASSERT_TRUE(engine_->ApplyStep("head", {.step = 0}).ok());
  const auto writer = Writer();
  ASSERT_TRUE(Write(*writer, {0, 4}).ok());
  const auto repeat = engine_->ApplyStep("head", {.step = 0});
  ASSERT_TRUE(repeat.ok()) << repeat.status();
  EXPECT_TRUE(repeat->repeated);
}

TEST_F(TensorAccessTest, AWriteEndsWhatRestsOnTheWeights) {
  auto kept = std::make_shared<RowCollector>();
  auto retaining = Open(Retaining(7), kept);
  Send(*retaining, 7, {0, 4});
  ASSERT_TRUE(kept->Wait().ok());
  EXPECT_EQ(engine_->Describe("head")->retained_microbatches, 1);

  auto loss = std::make_shared<RowCollector>(), accumulates = std::make_shared<RowCollector>(),
       retains = std::make_shared<RowCollector>(), backward = std::make_shared<RowCollector>();
  const auto loss_stream = Open(LossOnly(1), loss);
  const auto accumulating = Open(Whole(2, 4), accumulates);
  const auto other = Open(Retaining(3), retains);
  Send(*loss_stream, 1, {0, 2});
  Send(*accumulating, 2, {0, 2});
  Send(*other, 3, {0, 2});
  const auto back = engine_->OpenBackward({.head = "head",
                                           .microbatch_id = 7,
                                           .rows = {0, 4},
                                           .want_grad_hidden = true,
                                           .grad_loss = {1, 1, 1, 1}},
                                          backward);
  ASSERT_TRUE(back.ok()) << back.status();
  (*back)->Start();
  const auto value = Reader();
  ASSERT_TRUE(Read(*value, kValue, {0, 5}).ok());

  ASSERT_TRUE(Write(*Writer(), {0, kVocab}).ok());
  for (const auto& collector : {loss, accumulates, retains, backward}) {
    EXPECT_EQ(collector->Wait().code(), absl::StatusCode::kAborted) << collector->Wait();
    EXPECT_THAT(std::string(collector->Wait().message()), HasSubstr("WriteTensor"));
  }
  EXPECT_EQ(Read(*value, kValue, {5, 10}).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(engine_->Describe("head")->retained_microbatches, 0);
  EXPECT_EQ(
      engine_
          ->OpenBackward({.head = "head", .microbatch_id = 7, .rows = {0, 4}, .grad_loss = {1, 1, 1, 1}},
                         std::make_shared<RowCollector>())
          .status()
          .code(),
      absl::StatusCode::kNotFound);
  EXPECT_EQ(engine_->Describe("head")->step_rows, 2) << "the generation is the same";
}

TEST_F(TensorAccessTest, AWriteThatBreaksOffLeavesAVersionOfItsOwn) {
  auto writer = Writer();
  const auto begun = Write(*writer, {0, 4});
  ASSERT_TRUE(begun.ok());
  writer.reset();
  EXPECT_GT(State().weights_version, begun->weights_version);
  EXPECT_EQ(ReadCode(kValue), absl::StatusCode::kOk);
  EXPECT_EQ(OpenCode(Whole(1, 4)), absl::StatusCode::kOk);

  const uint64_t version = State().weights_version;
  Writer();
  EXPECT_EQ(State().weights_version, version) << "one that wrote nothing changes nothing";

  device_.fail_write = absl::InternalError("boom");
  writer = Writer();
  EXPECT_EQ(Write(*writer, {0, 4}).status().code(), absl::StatusCode::kInternal);
  EXPECT_GT(State().weights_version, version) << "it may have written some";
  EXPECT_EQ(ReadCode(kValue), absl::StatusCode::kOk);
}

TEST_F(TensorAccessTest, TwoWritesEndOneByOne) {
  const auto first = Writer(), second = Writer();
  ASSERT_TRUE(Write(*first, {0, 5}).ok());
  ASSERT_TRUE(Write(*second, {0, 5}).ok());
  ASSERT_TRUE(Write(*first, {5, 10}).ok());
  EXPECT_EQ(ReadCode(kValue), absl::StatusCode::kUnavailable);
  ASSERT_TRUE(Write(*second, {5, 10}).ok());
  EXPECT_EQ(ReadCode(kValue), absl::StatusCode::kOk);
}

TEST_F(TensorAccessTest, ACheckpointEndsWritesAndReads) {
  const auto writer = Writer();
  const auto value = Reader(), gradient = Reader();
  ASSERT_TRUE(Read(*value, kValue, {0, 5}).ok());
  ASSERT_TRUE(Read(*gradient, kGradient, {0, 5}).ok());
  ASSERT_TRUE(Write(*writer, {0, 5}).ok());
  const HeadState before = State();
  ASSERT_TRUE(engine_->BeginLoad("head", {.step = 5, .updates = 5}, std::nullopt).ok());
  EXPECT_EQ(Read(*value, kValue, {5, 10}).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(Read(*gradient, kGradient, {5, 10}).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ReadCode(kValue), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReadCode(kGradient), absl::StatusCode::kUnavailable);
  const HeadState loaded = State();
  EXPECT_EQ(loaded.step, 5u);
  EXPECT_GT(loaded.generation, before.generation);
  EXPECT_GT(loaded.weights_version, before.weights_version);
  ASSERT_TRUE(engine_->EndLoad("head").ok());
  EXPECT_EQ(State(), loaded) << "it took effect when it began";
  EXPECT_EQ(Write(*writer, {5, 10}).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(State(), loaded);
  EXPECT_EQ(ReadCode(kValue), absl::StatusCode::kOk);
}

TEST_F(TensorAccessTest, AMomentIsNotOfTheWeights) {
  auto collector = std::make_shared<RowCollector>();
  const auto stream = Open(LossOnly(1), collector);
  Send(*stream, 1, {0, 2});
  const auto value = Reader(), moment = Reader();
  ASSERT_TRUE(Read(*value, kValue, {0, 5}).ok());
  ASSERT_TRUE(Read(*moment, kMoment, {0, 5}).ok());
  const HeadState before = State();
  const auto writer = Writer(kMoment);
  ASSERT_TRUE(Write(*writer, {0, 5}).ok());
  EXPECT_EQ(State(), before);
  EXPECT_EQ(Read(*moment, kMoment, {5, 10}).status().code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(Read(*value, kValue, {5, 10}).ok());
  EXPECT_EQ(engine_->ApplyStep("head", {.step = 0}).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(engine_->Describe("head")->tensors_status.code(), absl::StatusCode::kUnavailable);
  Send(*stream, 1, {2, 4});
  EXPECT_TRUE(collector->Wait().ok());
  ASSERT_TRUE(Write(*writer, {5, 10}).ok());
  EXPECT_EQ(ReadCode(kMoment), absl::StatusCode::kOk);
  EXPECT_TRUE(engine_->ApplyStep("head", {.step = 0}).ok());
}

// ---- Resets ----
// Resets through the engine: what ends, what is refused, and a device that fails in the middle.

class ResetsTest : public EngineTest {
 protected:
  // Rows of a microbatch that are accumulated, all of them.
  void Accumulate(uint64_t id, uint64_t step) {
    auto collector = std::make_shared<RowCollector>();
    auto stream = Open(Whole(id, 4, step), collector);
    Send(*stream, id, {0, 4});
    ASSERT_TRUE(collector->Wait().ok());
  }
  HeadSnapshot Snapshot() { return *engine_->Describe("head"); }
};

TEST_F(ResetsTest, BothScopesDiscardTheOpenStep) {
  Start();
  for (const ResetScope scope : {ResetScope::kOptimizer, ResetScope::kAll}) {
    Accumulate(1, 0);
    const HeadState before = Snapshot().state;
    const auto reset = engine_->Reset("head", scope);
    ASSERT_TRUE(reset.ok()) << reset.status();
    if (scope == ResetScope::kAll) {
      ASSERT_TRUE(engine_->EndLoad("head").ok());
    }
    EXPECT_NE(reset->generation, before.generation);
    EXPECT_EQ(Snapshot().step_rows, 0);
    EXPECT_EQ(reset->weights_version == before.weights_version, scope == ResetScope::kOptimizer);
    EXPECT_TRUE(device_.accumulated().empty());
  }
  EXPECT_EQ(device_.moments_zeroed, 2);
}

TEST_F(ResetsTest, TheCountOfUpdatesBeginsAgain) {
  Start();
  for (uint64_t step = 0; step < 3; ++step) {
    ASSERT_TRUE(engine_->ApplyStep("head", {.step = step}).ok());
  }
  ASSERT_TRUE(engine_->Reset("head", ResetScope::kOptimizer).ok());
  EXPECT_EQ(Snapshot().updates, 0u);
  EXPECT_EQ(Snapshot().state.step, 3u);
  ASSERT_TRUE(engine_->ApplyStep("head", {.step = 3}).ok());
  EXPECT_EQ(device_.last_update, 1);
  ASSERT_TRUE(engine_->ApplyStep("head", {.step = 4}).ok());
  EXPECT_EQ(device_.last_update, 2);
  ASSERT_TRUE(engine_->ApplyStep("head", {.step = 5, .begin_optimizer = true}).ok());
  EXPECT_EQ(device_.last_update, 1);
  EXPECT_EQ(Snapshot().updates, 1u);
}

TEST_F(ResetsTest, ASkippedStepBeginsTheOptimizerToo) {
  Start();
  ASSERT_TRUE(engine_->ApplyStep("head", {.step = 0}).ok());
  device_.grad_norm = INFINITY;
  EXPECT_FALSE(engine_->ApplyStep("head", {.step = 1, .begin_optimizer = true}).ok());
  EXPECT_EQ(device_.moments_zeroed, 0) << "it was refused";
  const auto skipped =
      engine_->ApplyStep("head", {.step = 1, .skip_non_finite = true, .begin_optimizer = true});
  ASSERT_TRUE(skipped.ok()) << skipped.status();
  EXPECT_TRUE(skipped->skipped);
  EXPECT_EQ(device_.moments_zeroed, 1);
  EXPECT_EQ(Snapshot().updates, 0u);
}

// A read of a moment is of one version of it.
TEST_F(ResetsTest, ReadsOfMomentsEndWhenTheyAreZeroed) {
  Start();
  const auto reader = *engine_->OpenReader("head");
  const kernels::TensorId moment{kernels::Param::kWeight, kernels::Role::kMoment1};
  std::vector<uint8_t> out(kHidden * 4);
  ASSERT_TRUE(reader->Read(moment, {0, 1}, kernels::DType::kFloat32, absl::MakeSpan(out)).ok());
  ASSERT_TRUE(engine_->Reset("head", ResetScope::kOptimizer).ok());
  const absl::Status read =
      reader->Read(moment, {1, 2}, kernels::DType::kFloat32, absl::MakeSpan(out)).status();
  EXPECT_TRUE(absl::IsAborted(read)) << read;
  EXPECT_THAT(std::string(read.message()), HasSubstr("the head's optimizer was reset"));
}

TEST_F(ResetsTest, OpenCallsThatAccumulateAreInTheWay) {
  Start();
  for (const ResetScope scope : {ResetScope::kOptimizer, ResetScope::kAll}) {
    auto collector = std::make_shared<RowCollector>();
    auto stream = Open(Whole(1, 4), collector);
    {
      auto contribution = engine_->OpenContribution({.head = "head", .contribution_id = 9});
      ASSERT_TRUE(contribution.ok()) << contribution.status();
      const absl::Status refused = engine_->Reset("head", scope).status();
      EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string(refused.message()), AllOf(HasSubstr("1 open accumulating ComputeLoss call"),
                                                        HasSubstr("1 open AddGradient call")));
    }
    EXPECT_EQ(engine_->Reset("head", scope).status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(device_.moments_zeroed, 0);
    Send(*stream, 1, {0, 4});
    ASSERT_TRUE(collector->Wait().ok()) << "it goes on";
    EXPECT_EQ(Snapshot().step_rows, 4);
    ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  }
  // A call that only computes is ended by new values, as by a checkpoint.
  StreamSpec spec = Whole(2, 4);
  spec.accumulate_gradients = false;
  spec.step.reset();
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(spec, collector);
  ASSERT_TRUE(engine_->Reset("head", ResetScope::kOptimizer).ok());
  ASSERT_TRUE(engine_->Reset("head", ResetScope::kAll).ok());
  EXPECT_TRUE(absl::IsAborted(collector->Wait()));
}

TEST_F(ResetsTest, NothingComputesUntilTheValuesAreThere) {
  Start();
  ASSERT_TRUE(engine_->Reset("head", ResetScope::kAll).ok());
  const absl::Status refused = engine_->Open(Whole(1, 2), std::make_shared<RowCollector>()).status();
  EXPECT_TRUE(absl::IsUnavailable(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("is being reset, or that failed half-way"));
  EXPECT_TRUE(absl::IsUnavailable(engine_->ApplyStep("head", {.step = 0}).status()));
  EXPECT_TRUE(absl::IsUnavailable(engine_->Reset("head", ResetScope::kOptimizer).status()));
  ASSERT_TRUE(engine_->Reset("head", ResetScope::kAll).ok()) << "again";
  ASSERT_TRUE(engine_->EndLoad("head").ok());
  EXPECT_TRUE(engine_->ApplyStep("head", {.step = 0}).ok());
}

TEST_F(ResetsTest, MomentsThatMayBeHalfZeroedAreNotTrusted) {
  Start();
  device_.fail_moments = absl::InternalError("boom");
  for (const bool by_step : {true, false}) {
    const absl::Status failed =
        by_step ? engine_->ApplyStep("head", {.step = 0, .begin_optimizer = true}).status()
                : engine_->Reset("head", ResetScope::kOptimizer).status();
    EXPECT_EQ(failed.code(), absl::StatusCode::kInternal) << failed;
    device_.fail_moments = absl::OkStatus();
    EXPECT_EQ(engine_->ApplyStep("head", {.step = 0}).status().code(), absl::StatusCode::kInternal);
    EXPECT_FALSE(Snapshot().tensors_status.ok()) << "a save would keep them";
    ASSERT_TRUE(engine_->Reset("head", ResetScope::kAll).ok());
    ASSERT_TRUE(engine_->EndLoad("head").ok());
    ASSERT_TRUE(engine_->ApplyStep("head", {.step = 0}).ok());
    ASSERT_TRUE(engine_->Reset("head", ResetScope::kAll).ok());
    ASSERT_TRUE(engine_->EndLoad("head").ok());
    device_.fail_moments = absl::InternalError("boom");
  }
}

TEST_F(ResetsTest, AFrozenHead) {
  Start();
  AddHead("frozen", /*trainable=*/false);
  EXPECT_EQ(engine_->Reset("frozen", ResetScope::kOptimizer).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(engine_->Reset("frozen", ResetScope::kAll).ok());
  EXPECT_EQ(engine_->Reset("none", ResetScope::kAll).status().code(), absl::StatusCode::kNotFound);
}

// ---- Runs ----

TEST_F(ResetsTest, TheRunOfTheFirstRowsIsThatOfTheOpenStep) {
  Start();
  EXPECT_EQ(Snapshot().open_run, "");
  for (const std::string run : {"a", "b"}) {
    StreamSpec spec = Whole(run == "a" ? 1 : 2, 4);
    spec.run = run;
    auto collector = std::make_shared<RowCollector>();
    auto stream = Open(spec, collector);
    Send(*stream, spec.microbatch_id, {0, 4});
    ASSERT_TRUE(collector->Wait().ok());
    EXPECT_EQ(Snapshot().open_run, "a");
  }
  StreamSpec stale = Whole(3, 4, 7);
  stale.run = "b";
  const absl::Status refused = engine_->Open(stale, std::make_shared<RowCollector>()).status();
  EXPECT_THAT(
      std::string(refused.message()),
      HasSubstr("open.step is not the open step, which is 0, got 7; another program trains this head: run a "
                "has rows in the open step"));
  stale.run = "a";
  EXPECT_THAT(std::string(engine_->Open(stale, std::make_shared<RowCollector>()).status().message()),
              HasSubstr("no step was applied to this head since it was created"));
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  EXPECT_EQ(Snapshot().open_run, "");
  EXPECT_THAT(std::string(engine_->ZeroGradients("head", 4).status().message()),
              HasSubstr("; no step was applied"));
  EXPECT_THAT(std::string(engine_->GradNorm("head", 4, "x").status().message()),
              HasSubstr("; no step was applied"));
}

// A call that ends before any of its rows have been accumulated leaves no trace.
TEST_F(ResetsTest, ARunWhoseRowsAreGoneHasNone) {
  Start();
  StreamSpec spec = Whole(1, 4);
  spec.run = "a";
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(spec, collector);
  EXPECT_EQ(Snapshot().open_run, "a");
  stream->Cancel(absl::CancelledError("given up"));
  collector->Wait().IgnoreError();
  EXPECT_EQ(Snapshot().open_run, "");
  spec.run = "b";
  auto other = std::make_shared<RowCollector>();
  auto again = Open(spec, other);
  EXPECT_EQ(Snapshot().open_run, "b");
}

TEST_F(ResetsTest, AContributionNamesItsRunToo) {
  Start();
  const auto contribution = engine_->OpenContribution({.head = "head", .run = "tied", .contribution_id = 9});
  ASSERT_TRUE(contribution.ok()) << contribution.status();
  EXPECT_EQ(Snapshot().open_run, "") << "it has no rows yet";
  const std::vector<float> values(kHidden, 1.0f);
  const absl::Span<const uint8_t> bytes(reinterpret_cast<const uint8_t*>(values.data()), values.size() * 4);
  ASSERT_TRUE(engine_->AddRows(*contribution, {0, 1}, bytes).ok());
  EXPECT_EQ(Snapshot().open_run, "tied");
  const absl::Status refused =
      engine_->OpenContribution({.head = "head", .step = 3, .contribution_id = 9}).status();
  EXPECT_THAT(std::string(refused.message()), HasSubstr("run tied has rows in the open step"));
}

// ---- Deletions ----
// Heads that are deleted while something of theirs, or another head of their name, is under way.

using DeletionsTest = EngineTest;

// Its calls have ended, and its weight gradient is still being computed.
TEST_F(DeletionsTest, ADeletionWaitsForTheChunkThatIsUnderWay) {
  absl::Notification has_results, goes_on;
  device_.asynchronous = true;
  device_.fail_done = [&](int64_t) {
    has_results.Notify();
    goes_on.WaitForNotification();
    return absl::InternalError("the device failed");
  };
  Start();
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(Whole(1, 2), collector);
  Send(*stream, 1, {0, 2});
  EXPECT_TRUE(collector->Wait().ok());
  has_results.WaitForNotification();
  stream.reset();
  std::atomic<bool> deleted = false;
  std::thread deletion([&] {
    EXPECT_TRUE(engine_->DeleteHead("head").ok());
    deleted = true;
  });
  while (engine_->Describe("head").ok()) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(engine_->CreateHead("head", {.hidden_size = kHidden, .vocab_size = 10}).code(),
            absl::StatusCode::kAlreadyExists);
  absl::SleepFor(absl::Milliseconds(20));  // if it is too short, the deletion has had no time to be wrong
  EXPECT_FALSE(deleted);
  EXPECT_EQ(device_.heads, 1);
  goes_on.Notify();
  deletion.join();
  EXPECT_EQ(device_.heads, 0);
  device_.fail_done = [](int64_t) { return absl::OkStatus(); };
  AddHead("head");
  EXPECT_TRUE(engine_->ApplyStep("head", {}).ok()) << "what became of the first one is none of its business";
}

// Passes everything on; one creation waits.
class SlowBackend final : public kernels::Backend {
 public:
  static constexpr int64_t kSlowHidden = 7;

  explicit SlowBackend(kernels::Backend* backend) : backend_(backend) {}
  kernels::BackendInfo info() const override { return backend_->info(); }
  kernels::MemoryStats memory() const override { return backend_->memory(); }
  int max_chunks_in_flight() const override { return backend_->max_chunks_in_flight(); }
  absl::StatusOr<kernels::MemoryBytes> PlanHead(const kernels::HeadConfig& config) const override {
    return backend_->PlanHead(config);
  }
  absl::StatusOr<std::unique_ptr<kernels::HeadKernels>> CreateHead(
      const kernels::HeadConfig& config) override {
    if (config.hidden_size == kSlowHidden) {
      creates.Notify();
      goes_on.WaitForNotification();
    }
    return backend_->CreateHead(config);
  }
  absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> AllocateStaging(int64_t bytes) override {
    return backend_->AllocateStaging(bytes);
  }
  absl::StatusOr<std::unique_ptr<kernels::RetainedMemory>> AllocateRetained(int64_t bytes) override {
    return backend_->AllocateRetained(bytes);
  }
  absl::Status PlanHostMemory(kernels::MemoryKind kind, int64_t bytes) override {
    return backend_->PlanHostMemory(kind, bytes);
  }

  absl::Notification creates, goes_on;

 private:
  kernels::Backend* const backend_;
};

// A head is deleted while it is being created, which fails; before the deletion has gone on, its name is that
// of another head.
TEST_F(DeletionsTest, ADeletionTakesNoOtherHeadOfTheName) {
  constexpr absl::Duration kBehind = absl::Milliseconds(30);  // if it is too short, another order is tried
  SlowBackend slow(&backend_);
  EngineOptions options;
  options.slice_bytes = kSliceBytes;
  options.staging_bytes = 64 * kSliceBytes;
  engine_ = Engine::Create(options, &slow, 42, {}).value();
  AddHead("head");
  absl::Notification device_is_busy, device_goes_on;
  std::vector<std::thread> callers;
  callers.emplace_back([&] {
    EXPECT_TRUE(engine_
                    ->OnDevice("head",
                               [&](head::Head&) {
                                 device_is_busy.Notify();
                                 device_goes_on.WaitForNotification();
                                 return absl::OkStatus();
                               })
                    .ok());
  });
  device_is_busy.WaitForNotification();
  const auto is_taken = [&](const char* name) {
    return absl::IsAlreadyExists(engine_->PlanHead(name, {.hidden_size = 1, .vocab_size = 2}).status());
  };
  const auto create = [&](const char* name, kernels::HeadConfig config, absl::StatusCode code) {
    callers.emplace_back([=, this] { EXPECT_EQ(engine_->CreateHead(name, config).code(), code); });
    while (!is_taken(name)) absl::SleepFor(absl::Milliseconds(1));
    absl::SleepFor(kBehind);
  };
  create("name", {.hidden_size = 1, .vocab_size = 2'000'000}, absl::StatusCode::kResourceExhausted);
  create("slow", {.hidden_size = SlowBackend::kSlowHidden, .vocab_size = 2}, absl::StatusCode::kOk);
  callers.emplace_back([&] { EXPECT_TRUE(engine_->DeleteHead("name").ok()); });
  absl::SleepFor(kBehind);
  device_goes_on.Notify();
  slow.creates.WaitForNotification();
  ASSERT_FALSE(is_taken("name"));
  create("name", {.hidden_size = 1, .vocab_size = 2}, absl::StatusCode::kOk);
  slow.goes_on.Notify();
  for (std::thread& caller : callers) caller.join();
  EXPECT_TRUE(engine_->PublishHead("name").ok());
  engine_.reset();  // before the backend
}

}  // namespace
}  // namespace lossd::engine::operations_test
