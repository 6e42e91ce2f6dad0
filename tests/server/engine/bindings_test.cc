// SPDX-License-Identifier: Apache-2.0
// What calls under way are bound to, and how they end when it changes (docs/consistency.md).
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/errors/field_error.h"
#include "server/engine/engine.h"
#include "server/engine/errors.h"
#include "tests/server/engine/engine_fixture.h"

namespace lossd::engine::bindings_test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

class BindingsTest : public EngineTest {
 protected:
  static constexpr int64_t kVocab = 10;

  BindingsTest() { Start({.retained_bytes = 4096}); }

  struct Call {
    std::shared_ptr<RowCollector> results = std::make_shared<RowCollector>();
    std::unique_ptr<Stream> stream;
  };
  // A stream of which half of the rows have been answered.
  Call HalfWay(const StreamSpec& spec) {
    Call call;
    call.stream = Open(spec, call.results);
    Send(*call.stream, spec.microbatch_id, {0, 2});
    return call;
  }
  void SendRest(const Call& call, uint64_t id) { Send(*call.stream, id, {2, 4}); }
  static StreamSpec LossOnly(uint64_t id) {
    StreamSpec spec = Whole(id, 4);
    spec.accumulate_gradients = spec.want_grad_hidden = false;
    spec.step.reset();
    return spec;
  }
  static StreamSpec LossOfStep(uint64_t id, uint64_t step) {
    StreamSpec spec = LossOnly(id);
    spec.step = step;
    return spec;
  }
  static StreamSpec Retaining(uint64_t id) {
    StreamSpec spec = LossOnly(id);
    spec.reduction = Reduction::kNone;
    spec.retain = true;
    return spec;
  }
  static StreamSpec Ignored(uint64_t id) {
    StreamSpec spec = Whole(id, 4);
    spec.targets.assign(4, spec.ignore_index);
    return spec;
  }
  void Retain(const StreamSpec& spec) {
    Call call;
    call.stream = Open(spec, call.results);
    Send(*call.stream, spec.microbatch_id, {0, 4});
    ASSERT_TRUE(call.results->Wait().ok()) << call.results->Wait();
  }
  static BackwardSpec Backward(uint64_t id) {
    return {.head = "head",
            .microbatch_id = id,
            .rows = {0, 4},
            .want_grad_hidden = true,
            .grad_loss = std::vector<float>(4, 1.0f)};
  }
  absl::Status OpenStatus(const StreamSpec& spec) {
    return engine_->Open(spec, std::make_shared<RowCollector>()).status();
  }
  HeadState State() { return engine_->Describe("head")->state; }
  static void ExpectAborted(const Call& call, const char* why) {
    EXPECT_EQ(call.results->Wait().code(), absl::StatusCode::kAborted) << call.results->Wait();
    EXPECT_THAT(std::string(call.results->Wait().message()), HasSubstr(why));
  }
};

TEST_F(BindingsTest, AStepEndsAllStreams) {
  Retain(Retaining(9));
  const Call loss = HalfWay(LossOnly(1)), of_step = HalfWay(LossOfStep(2, 0)),
             accumulates = HalfWay(Whole(3, 4)), retains = HalfWay(Retaining(4));
  Call backward;
  auto opened = engine_->OpenBackward(Backward(9), backward.results);
  ASSERT_TRUE(opened.ok()) << opened.status();
  (*opened)->Start();
  ASSERT_TRUE(engine_->ApplyStep("head", {.step = 0}).ok());
  for (const Call* call : {&loss, &of_step, &accumulates, &retains, static_cast<const Call*>(&backward)}) {
    ExpectAborted(*call, "step 0 was applied");
    EXPECT_EQ(GetCurrentStep(call->results->Wait()), 1u);
  }
  SendRest(loss, 1);
  EXPECT_EQ(loss.results->losses().size(), 2u) << "no row of the new weights";
  EXPECT_EQ(engine_->Describe("head")->open_streams, 0);
}

TEST_F(BindingsTest, ASkippedStepLeavesTheWeights) {
  device_.grad_norm = std::numeric_limits<double>::infinity();
  const Call loss = HalfWay(LossOnly(1)), of_step = HalfWay(LossOfStep(2, 0)),
             accumulates = HalfWay(Whole(3, 4));
  const HeadState before = State();
  const auto skipped = engine_->ApplyStep("head", {.step = 0, .skip_non_finite = true});
  ASSERT_TRUE(skipped.ok()) << skipped.status();
  EXPECT_EQ(skipped->state.weights_version, before.weights_version);
  EXPECT_GT(skipped->state.generation, before.generation);
  ExpectAborted(of_step, "step 0 was skipped");
  ExpectAborted(accumulates, "step 0 was skipped");
  SendRest(loss, 1);
  EXPECT_TRUE(loss.results->Wait().ok()) << loss.results->Wait();
}

TEST_F(BindingsTest, ZeroedGradientsEndWhatNeedsThem) {
  const Call loss = HalfWay(LossOnly(1)), of_step = HalfWay(LossOfStep(2, 0)),
             accumulates = HalfWay(Whole(3, 4));
  const HeadState before = State();
  const auto zeroed = engine_->ZeroGradients("head", 0);
  ASSERT_TRUE(zeroed.ok());
  EXPECT_EQ(*zeroed, State());
  EXPECT_GT(zeroed->generation, before.generation);
  EXPECT_EQ(zeroed->weights_version, before.weights_version);
  ExpectAborted(accumulates, "zeroed");
  SendRest(loss, 1);
  SendRest(of_step, 2);
  EXPECT_TRUE(loss.results->Wait().ok()) << loss.results->Wait();
  EXPECT_TRUE(of_step.results->Wait().ok()) << of_step.results->Wait();
}

TEST_F(BindingsTest, ACheckpointEndsAllStreamsBeforeItReplacesTheFirstValue) {
  Retain(Retaining(9));
  const Call loss = HalfWay(LossOnly(1)), accumulates = HalfWay(Whole(2, 4));
  const auto contribution = engine_->OpenContribution({.head = "head", .contribution_id = 1});
  ASSERT_TRUE(contribution.ok());
  ASSERT_TRUE(engine_->BeginLoad("head", {.step = 4, .updates = 4}, std::nullopt).ok());
  ExpectAborted(loss, "a checkpoint was loaded");
  ExpectAborted(accumulates, "a checkpoint was loaded");
  EXPECT_EQ(engine_->Describe("head")->retained_microbatches, 0);
  EXPECT_EQ(engine_->Describe("head")->step_microbatches, 0);
  const std::vector<uint8_t> values(kVocab * kHidden * sizeof(float));
  EXPECT_EQ(engine_->AddRows(*contribution, {0, 10}, values).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(OpenStatus(LossOnly(3)).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(engine_->OpenContribution({.head = "head", .step = 4, .contribution_id = 1}).status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(engine_->ApplyStep("head", {.step = 4}).status().code(), absl::StatusCode::kUnavailable);
  ASSERT_TRUE(engine_->EndLoad("head").ok());
  EXPECT_TRUE(OpenStatus(LossOnly(3)).ok());
  EXPECT_TRUE(engine_->ApplyStep("head", {.step = 4}).ok());
}

TEST_F(BindingsTest, AnotherGenerationIsRefusedAndChangesNothing) {
  const uint64_t old = State().generation;
  Retain(Retaining(9));
  StreamSpec spec = Whole(1, 4);
  spec.generation = old;
  EXPECT_TRUE(OpenStatus(spec).ok());
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  Retain(Retaining(9));

  const auto expect_refused = [&](const absl::Status& status, const char* field) {
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
    EXPECT_EQ(errors::GetFieldViolation(status)->field, field);
    EXPECT_EQ(errors::GetFieldViolation(status)->value, std::to_string(old));
  };
  expect_refused(OpenStatus(spec), "open.generation");
  spec = Retaining(2);
  spec.generation = old;
  expect_refused(OpenStatus(spec), "open.generation");
  BackwardSpec backward = Backward(9);
  backward.generation = old;
  expect_refused(engine_->OpenBackward(backward, std::make_shared<RowCollector>()).status(),
                 "backward.generation");
  expect_refused(
      engine_->OpenContribution({.head = "head", .generation = old, .contribution_id = 5}).status(),
      "open.generation");
  expect_refused(engine_->ApplyStep("head", {.step = 0, .generation = old}).status(), "generation");
  const auto head = engine_->Describe("head");
  EXPECT_EQ(head->step_microbatches, 0);
  EXPECT_EQ(head->step_contributions, 0);
  EXPECT_EQ(head->state.step, 0u);
  EXPECT_EQ(engine_->stats().retained_bytes_used, 256) << "of id 9";
  backward.generation = head->state.generation;
  EXPECT_TRUE(engine_->OpenBackward(backward, std::make_shared<RowCollector>()).ok());
}

TEST_F(BindingsTest, AContributionIsOfOneGeneration) {
  const std::vector<uint8_t> values(kVocab * kHidden * sizeof(float));
  const auto half = absl::MakeConstSpan(values).first(values.size() / 2);
  const auto contribution = engine_->OpenContribution({.head = "head", .contribution_id = 1});
  ASSERT_TRUE(contribution.ok());
  const auto first = engine_->AddRows(*contribution, {0, 5}, half);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(first->rows, 5);
  EXPECT_EQ(first->state, State());
  ASSERT_TRUE(engine_->ApplyStep("head", {.step = 0}).ok());
  const absl::Status ended = engine_->AddRows(*contribution, {5, 10}, half).status();
  EXPECT_EQ(ended.code(), absl::StatusCode::kAborted) << ended;
  EXPECT_THAT(std::string(ended.message()), HasSubstr("step 0 was applied"));
  EXPECT_THAT(device_.accumulated(), IsEmpty());
}

TEST_F(BindingsTest, RowsOfAContributionAreAddedWithTheirLedgerEntriesOrNotAtAll) {
  const std::vector<uint8_t> values(kVocab * kHidden * sizeof(float));
  const auto rows = [&](RowRange range) {
    return absl::MakeConstSpan(values).first(static_cast<size_t>(range.size() * kHidden) * sizeof(float));
  };
  const auto contribution = engine_->OpenContribution({.head = "head", .contribution_id = 1});
  ASSERT_TRUE(contribution.ok());
  ASSERT_TRUE(engine_->AddRows(*contribution, {2, 4}, rows({2, 4})).ok());
  // Rows 0, 1 and 4, 5 are two additions on the device; the second one fails.
  int additions = 0;
  device_.fail_add = [&] { return ++additions == 2 ? absl::InternalError("boom") : absl::OkStatus(); };
  EXPECT_EQ(engine_->AddRows(*contribution, {0, 6}, rows({0, 6})).status().code(),
            absl::StatusCode::kInternal);
  device_.fail_add = [] { return absl::OkStatus(); };
  EXPECT_EQ(engine_->ApplyStep("head", {.step = 0}).status().code(), absl::StatusCode::kInternal)
      << "the gradients are not used any more";
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  const auto again = engine_->OpenContribution({.head = "head", .contribution_id = 1});
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(engine_->AddRows(*again, {0, 6}, rows({0, 6}))->rows, 6);
}

// A microbatch of ignored rows is whole without any work of the device.
TEST_F(BindingsTest, NothingJoinsAStepThatIsBeingApplied) {
  Call before;
  before.stream = Open(Ignored(1), before.results);
  before.stream->HalfClose();
  ASSERT_TRUE(before.results->Wait().ok());
  absl::Status microbatch, contribution, loss;
  device_.on_step = [&] {
    microbatch = OpenStatus(Ignored(2));
    contribution =
        engine_->OpenContribution({.head = "head", .contribution_id = 3, .contribution_rows = RowRange{0, 0}})
            .status();
    loss = OpenStatus(LossOnly(4));
  };
  const auto applied = engine_->ApplyStep("head", {.step = 0});
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_EQ(applied->microbatches, 1);
  EXPECT_EQ(applied->contributions, 0);
  EXPECT_EQ(microbatch.code(), absl::StatusCode::kUnavailable) << microbatch;
  EXPECT_EQ(contribution.code(), absl::StatusCode::kUnavailable) << contribution;
  EXPECT_TRUE(loss.ok()) << loss;
  device_.on_step = [] {};
  StreamSpec next = Ignored(2);
  next.step = 1;
  EXPECT_TRUE(OpenStatus(next).ok());
}

TEST_F(BindingsTest, AStepThatFailedIsOpenAgain) {
  device_.fail_step = absl::FailedPreconditionError("not with this optimizer");
  EXPECT_FALSE(engine_->ApplyStep("head", {.step = 0}).ok());
  EXPECT_TRUE(OpenStatus(Whole(1, 4)).ok());
}

TEST_F(BindingsTest, RowsThatAreBeingRetainedAgreeWithOthersOfTheirId) {
  const Call first = HalfWay(Retaining(1));
  StreamSpec other = Retaining(1);
  other.options.logit_scale = 2.0f;
  EXPECT_EQ(OpenStatus(other).code(), absl::StatusCode::kFailedPrecondition);
  other = Retaining(1);
  other.hidden_dtype = kernels::DType::kBFloat16;
  EXPECT_EQ(OpenStatus(other).code(), absl::StatusCode::kFailedPrecondition);
  other = Retaining(1);
  other.rows = {1, 4};
  other.targets.resize(3);
  EXPECT_EQ(OpenStatus(other).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(engine_->stats().retained_bytes_used, 256) << "of the first one alone";

  const Call same = HalfWay(Retaining(1));
  SendRest(first, 1);
  ASSERT_TRUE(first.results->Wait().ok());
  SendRest(same, 1);
  ASSERT_TRUE(same.results->Wait().ok());
  EXPECT_EQ(engine_->Describe("head")->retained_microbatches, 1);
  EXPECT_EQ(engine_->stats().retained_bytes_used, 256) << "the second one has replaced the first";

  ASSERT_TRUE(engine_->Release("head", 1)->released);
  Call failed = HalfWay(Retaining(1));
  failed.stream->Cancel(absl::CancelledError("cut"));
  ASSERT_FALSE(failed.results->Wait().ok());
  other = Retaining(1);
  other.options.logit_scale = 2.0f;
  EXPECT_TRUE(OpenStatus(other).ok()) << "nothing is retained, and nothing is being retained";
}

TEST_F(BindingsTest, AnswersNameTheVersions) {
  const HeadState state = State();
  EXPECT_NE(state.generation, 0u);
  EXPECT_NE(state.weights_version, 0u);
  EXPECT_EQ(engine_->GradNorm("head", 0)->state, state);
  EXPECT_EQ(engine_->Release("head", 1)->state, state);
  Call call;
  call.stream = Open(Whole(1, 4), call.results);
  EXPECT_EQ(call.stream->state(), state);
  Send(*call.stream, 1, {0, 4});
  ASSERT_TRUE(call.results->Wait().ok());
  EXPECT_EQ(call.results->summary().state, state);
  const auto applied = engine_->ApplyStep("head", {.step = 0});
  ASSERT_TRUE(applied.ok());
  EXPECT_EQ(applied->state, State());
  EXPECT_GT(applied->state.generation, state.generation);
  EXPECT_GT(applied->state.weights_version, state.weights_version);
}

}  // namespace
}  // namespace lossd::engine::bindings_test
