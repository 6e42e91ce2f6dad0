// SPDX-License-Identifier: Apache-2.0
// Resets through the engine: what ends, what is refused, and a device that fails in the middle.
#include <memory>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/engine.h"
#include "tests/server/engine/engine_fixture.h"

namespace lossd::engine::resets_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

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

}  // namespace
}  // namespace lossd::engine::resets_test
