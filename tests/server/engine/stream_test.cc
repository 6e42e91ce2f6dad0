// SPDX-License-Identifier: Apache-2.0
// Tests of streams through an engine (stream.h, stream_state.h, stream_admission.h): what calls are bound to
// and how they end, rows that callers leave behind, rows that wait for their gradients, and sampled
// gradients.
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/backend.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"
#include "server/engine/engine.h"
#include "server/engine/errors.h"
#include "server/engine/ledger.h"
#include "server/engine/schedule.h"
#include "server/engine/stream_state.h"
#include "tests/server/engine/engine_fixture.h"
#include "tests/server/engine/fake_backend.h"

namespace lossd::engine::stream_test {
namespace {

using kernels::Gradients;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;
using ::testing::UnorderedElementsAreArray;

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

// ---- Abandoned rows ----
// What callers leave behind that open rows and go: nothing.

class AbandonedRowsTest : public EngineTest {
 protected:
  // Opens a stream and gives up after `sent` rows.
  absl::Status Abandon(StreamSpec spec, int64_t sent = 0) {
    const uint64_t id = spec.microbatch_id;
    const int64_t begin = spec.rows.begin;
    auto collector = std::make_shared<RowCollector>();
    auto stream = engine_->Open(std::move(spec), collector);
    if (!stream.ok()) return stream.status();
    (*stream)->Start();
    if (sent > 0) {
      Send(**stream, id, {begin, begin + sent});
      while (engine_->Describe("head")->step_rows < sent) absl::SleepFor(absl::Milliseconds(1));
    }
    (*stream)->Cancel(absl::CancelledError("gone"));
    collector->Wait();
    return absl::OkStatus();
  }
};

TEST_F(AbandonedRowsTest, DoNotFillTheLedger) {
  Start({.max_ledger_rows = 16});
  for (uint64_t id = 0; id < 100; ++id) ASSERT_TRUE(Abandon(Whole(id, 16)).ok()) << id;
  EXPECT_EQ(engine_->stats().ledger_rows, 0);
  EXPECT_EQ(engine_->stats().ledger_bytes, 0);
  EXPECT_EQ(engine_->Describe("head")->step_microbatches, 0);
}

TEST_F(AbandonedRowsTest, DoNotFillTheLedgerIfNoneHasATarget) {
  Start({.max_ledger_rows = 16});
  for (uint64_t id = 0; id < 20; ++id) {
    StreamSpec spec = Whole(id, 16);
    spec.targets.assign(16, spec.ignore_index);
    ASSERT_TRUE(Abandon(std::move(spec)).ok()) << id;
  }
  EXPECT_EQ(engine_->stats().ledger_rows, 0);
}

TEST_F(AbandonedRowsTest, MayBeOpenedAgainAsAnotherMicrobatch) {
  Start();
  ASSERT_TRUE(Abandon(Whole(7, 16)).ok());
  StreamSpec other = Whole(7, 5);
  other.targets.assign(5, 3);
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(other, collector);
  ASSERT_NE(stream, nullptr);
  Send(*stream, 7, {0, 5});
  ASSERT_TRUE(collector->Wait().ok()) << collector->Wait();
  EXPECT_EQ(collector->summary().accumulated_rows, 5);
}

TEST_F(AbandonedRowsTest, WhatWasAccumulatedStays) {
  Start();
  ASSERT_TRUE(Abandon(Whole(1, 16), 8).ok());
  EXPECT_EQ(engine_->stats().ledger_rows, 8);
  StreamSpec other = Whole(1, 16);
  other.targets.assign(16, 2);
  EXPECT_EQ(engine_->Open(other, std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kFailedPrecondition);
  auto collector = std::make_shared<RowCollector>();
  auto again = Open(Whole(1, 16), collector);
  ASSERT_NE(again, nullptr);
  Send(*again, 1, {0, 16});
  ASSERT_TRUE(collector->Wait().ok());
  EXPECT_EQ(collector->summary().repeated_rows, 8);
  EXPECT_EQ(collector->summary().accumulated_rows, 8);
}

TEST_F(AbandonedRowsTest, RowsThatAnOpenStreamHasTooStay) {
  Start();
  auto collector = std::make_shared<RowCollector>();
  auto open = Open(Spec(1, 16, {4, 12}), collector);
  ASSERT_NE(open, nullptr);
  ASSERT_TRUE(Abandon(Whole(1, 16)).ok());
  EXPECT_EQ(engine_->stats().ledger_rows, 8);
  Send(*open, 1, {4, 12});
  ASSERT_TRUE(collector->Wait().ok());
  EXPECT_EQ(collector->summary().accumulated_rows, 8);
}

TEST_F(AbandonedRowsTest, OfAnEarlierStepLeaveTheOpenOneAlone) {
  Start();
  auto old_collector = std::make_shared<RowCollector>();
  // Not started: its end comes late.
  auto old_stream = engine_->Open(Whole(1, 8), old_collector);
  ASSERT_TRUE(old_stream.ok());
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(Whole(1, 8), collector);
  ASSERT_NE(stream, nullptr);
  (*old_stream)->Start();
  EXPECT_FALSE(old_collector->Wait().ok());
  EXPECT_EQ(engine_->stats().ledger_rows, 8);
  Send(*stream, 1, {0, 8});
  ASSERT_TRUE(collector->Wait().ok());
}

TEST_F(AbandonedRowsTest, RowsOfOpenCallsAreWithinTheLedgersMemory) {
  Start({.ledger_bytes = 4096, .peer_share = 1.0});
  std::vector<std::unique_ptr<Stream>> streams;
  absl::Status refused;
  for (uint64_t id = 0; id < 100 && refused.ok(); ++id) {
    StreamSpec spec = Whole(id, 64);
    spec.accumulate_gradients = false;
    auto stream = engine_->Open(std::move(spec), std::make_shared<RowCollector>());
    refused = stream.status();
    if (stream.ok()) streams.push_back(*std::move(stream));
  }
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("--ledger_bytes"));
  EXPECT_GT(streams.size(), 2u);
  EXPECT_LE(engine_->stats().row_bytes_used, 4096);
  streams.clear();
  EXPECT_EQ(engine_->stats().row_bytes_used, 0);
}

TEST_F(AbandonedRowsTest, APeerLeavesMemoryForRowsOfOthers) {
  Start({.ledger_bytes = 1 << 16, .peer_share = 0.5});
  std::vector<std::unique_ptr<Stream>> streams;
  const auto open = [&](const std::string& peer, uint64_t id) {
    StreamSpec spec = Whole(id, 64);
    spec.accumulate_gradients = false;
    spec.peer = peer;
    auto stream = engine_->Open(std::move(spec), std::make_shared<RowCollector>());
    if (stream.ok()) streams.push_back(*std::move(stream));
    return stream.status();
  };
  absl::Status refused;
  for (uint64_t id = 0; id < 1000 && refused.ok(); ++id) refused = open("greedy", id);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("--peer_share"));
  EXPECT_TRUE(open("other", 0).ok());
}

TEST_F(AbandonedRowsTest, ALedgerOfManySmallMicrobatchesIsWithinItsMemory) {
  Start({.max_streams = 4, .ledger_bytes = 1 << 16, .peer_share = 1.0});
  absl::Status refused;
  for (uint64_t id = 0; id < 10'000 && refused.ok(); ++id) {
    auto collector = std::make_shared<RowCollector>();
    auto stream = engine_->Open(Whole(id, 1), collector);
    refused = stream.status();
    if (!refused.ok()) break;
    (*stream)->Start();
    Send(**stream, id, {0, 1});
    collector->Wait();
  }
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("--ledger_bytes"));
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  EXPECT_EQ(engine_->stats().row_bytes_used, 0);
}

TEST_F(AbandonedRowsTest, ADeletedHeadGivesItsMemoryBack) {
  Start({.ledger_bytes = 1 << 16});
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(Whole(0, 8), collector);
  Send(*stream, 0, {0, 8});
  ASSERT_TRUE(collector->Wait().ok());
  EXPECT_GT(engine_->stats().row_bytes_used, 0);
  ASSERT_TRUE(engine_->DeleteHead("head").ok());
  EXPECT_EQ(engine_->stats().row_bytes_used, 0);
}

// ---- Lists of ids ----

TEST_F(AbandonedRowsTest, ListsOfMicrobatchesAreBounded) {
  Start({.max_step_microbatches = 100});
  StepRequest request;
  request.expected_microbatches.resize(201);
  const absl::Status refused = engine_->ApplyStep("head", request).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  const auto violation = errors::GetFieldViolation(refused);
  ASSERT_TRUE(violation.has_value());
  EXPECT_EQ(violation->field, "expected_microbatches.size");
  EXPECT_EQ(violation->value, "201");
}

TEST_F(AbandonedRowsTest, AnIdMayBeNamedTwice) {
  Start();
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(Whole(5, 1), collector);
  Send(*stream, 5, {0, 1});
  ASSERT_TRUE(collector->Wait().ok());
  StepRequest request;
  request.expected_microbatches = {5, 5};
  EXPECT_TRUE(engine_->ApplyStep("head", request).ok());
}

// ---- Contributions ----

TEST_F(ContributionsTest, OpeningOneBooksNothing) {
  for (uint64_t id = 0; id < 50; ++id) ASSERT_TRUE(engine_->OpenContribution(Spec(id)).ok()) << id;
  EXPECT_EQ(engine_->stats().ledger_rows, 0);
  EXPECT_EQ(engine_->Describe("head")->step_contributions, 0);
  EXPECT_TRUE(engine_->Open(Stream(3), std::make_shared<RowCollector>()).ok());
}

TEST_F(ContributionsTest, AMicrobatchThatTookTheIdMeanwhileKeepsIt) {
  const absl::StatusOr<Contribution> contribution = engine_->OpenContribution(Spec(3));
  ASSERT_TRUE(contribution.ok());
  const auto stream = engine_->Open(Stream(3), std::make_shared<RowCollector>());
  ASSERT_TRUE(stream.ok());
  const absl::Status refused = Add(*contribution, {0, 1}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("names a microbatch of this step"));
  EXPECT_THAT(Added(), IsEmpty());
}

TEST_F(ContributionsTest, TermsThatDifferAreRefusedWithTheData) {
  ContributionSpec other = Spec(3);
  other.scale = 2.0f;
  const auto first = engine_->OpenContribution(Spec(3));
  const auto second = engine_->OpenContribution(other);
  ASSERT_TRUE(first.ok() && second.ok());
  ASSERT_TRUE(Add(*first, {0, 1}).ok());
  EXPECT_EQ(Add(*second, {1, 2}).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Added(), ElementsAre(300.0f));
}

// ---- The cost of opening ----

double ThreadSeconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

double SecondsToDeclare(int64_t rows) {
  Ledger ledger(rows, 1);
  const std::vector<int32_t> target = {1};
  const double start = ThreadSeconds();
  for (int64_t row = 0; row < rows; ++row) {
    EXPECT_TRUE(ledger.Declare(1, {.microbatch_rows = rows}, {row, row + 1}, {target}).ok());
  }
  return ThreadSeconds() - start;
}

// Single rows, each a declaration of its own: eight times as many take about eight times the time, not 64.
// The least of several times is compared, as a busy machine makes some of them longer.
TEST(LedgerCostTest, DoesNotGrowWithTheRowsThatAreThere) {
  double few = std::numeric_limits<double>::infinity(), many = few;
  for (int round = 0; round < 8 && (round < 2 || many >= 30.0 * few); ++round) {
    few = std::min(few, SecondsToDeclare(5'000));
    many = std::min(many, SecondsToDeclare(40'000));
  }
  EXPECT_LT(many / few, 30.0) << few << " s, " << many << " s";
}

// ---- Deferred microbatches ----
// Microbatches whose rows the engine keeps until their gradients come.

class DeferredTest : public EngineTest {
 protected:
  // A forward pass whose rows are kept.
  static StreamSpec Retaining(uint64_t id, int64_t rows, RowRange range) {
    StreamSpec spec = Spec(id, rows, range);
    spec.reduction = Reduction::kNone;
    spec.retain = true;
    spec.want_grad_hidden = false;
    spec.accumulate_gradients = false;
    return spec;
  }
  void ForwardRetained(uint64_t id, int64_t rows, RowRange range) {
    auto collector = std::make_shared<RowCollector>();
    auto stream = Open(Retaining(id, rows, range), collector);
    ASSERT_NE(stream, nullptr);
    for (int64_t row = range.begin; row < range.end; row += 10) {
      Send(*stream, id, {row, std::min(range.end, row + 10)});
    }
    ASSERT_TRUE(collector->Wait().ok()) << collector->Wait();
  }
  static BackwardSpec Backward(uint64_t id, RowRange rows) {
    BackwardSpec spec;
    spec.head = "head";
    spec.step = 0;
    spec.microbatch_id = id;
    spec.rows = rows;
    spec.want_grad_hidden = true;
    spec.accumulate_gradients = true;
    spec.grad_loss.assign(static_cast<size_t>(rows.size()), 1.0f);
    return spec;
  }
  void RunBackward(const BackwardSpec& spec, const std::shared_ptr<RowCollector>& collector) {
    auto stream = engine_->OpenBackward(spec, collector);
    ASSERT_TRUE(stream.ok()) << stream.status();
    (*stream)->Start();
    for (RowRange rows : (*stream)->RetainedSlices()) EXPECT_TRUE(SentSlice(**stream, rows).Wait());
    ASSERT_TRUE(collector->Wait().ok());
  }
};

TEST_F(DeferredTest, RetainedRowsComeBackWithTheirOwnGradients) {
  Start({.retained_bytes = 4096});
  ForwardRetained(1, 12, {0, 5});
  ForwardRetained(1, 12, {5, 12});
  EXPECT_EQ(engine_->Describe("head")->retained_microbatches, 1);
  EXPECT_THAT(device_.accumulated(), IsEmpty());

  BackwardSpec spec = Backward(1, {2, 9});
  for (size_t i = 0; i < 7; ++i) spec.grad_loss[i] = static_cast<float>(i);
  auto collector = std::make_shared<RowCollector>();
  RunBackward(spec, collector);
  ASSERT_TRUE(collector->Wait().ok()) << collector->Wait();
  EXPECT_EQ(collector->summary().accumulated_rows, 7);
  ASSERT_EQ(collector->grads().size(), 7u);
  EXPECT_THAT(collector->slices(), UnorderedElementsAre(RowRange{2, 5}, RowRange{5, 9}));
  for (int64_t i = 0; i < 7; ++i)
    EXPECT_EQ(collector->grads()[2 + i][0], static_cast<float>(i) * RowName(1, 2 + i));
  EXPECT_THAT(device_.accumulated(), UnorderedElementsAreArray(Names(1, {2, 9})));

  auto again = std::make_shared<RowCollector>();  // a repeat computes, but accumulates nothing
  RunBackward(spec, again);
  ASSERT_TRUE(again->Wait().ok());
  EXPECT_EQ(again->summary().repeated_rows, 7);
}

TEST_F(DeferredTest, OtherGradientsUnderTheSameIdAreRefused) {
  Start({.retained_bytes = 4096});
  ForwardRetained(1, 4, {0, 4});
  BackwardSpec spec = Backward(1, {0, 4});
  spec.grad_lse = {0.0f, 0.5f, -1.0f, 0.0f};
  spec.grad_entropy = {1.0f, 0.0f, 2.0f, 0.0f};
  RunBackward(spec, std::make_shared<RowCollector>());
  const auto expect_refused = [&](auto change) {
    BackwardSpec other = spec;
    change(other);
    const absl::Status status = engine_->OpenBackward(other, std::make_shared<RowCollector>()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("row 2"));
  };
  expect_refused([](BackwardSpec& s) { s.grad_loss[2] = 5.0f; });
  expect_refused([](BackwardSpec& s) { s.grad_lse[2] = -2.0f; });
  expect_refused([](BackwardSpec& s) { s.grad_entropy[2] = 0.0f; });
  auto again = std::make_shared<RowCollector>();
  RunBackward(spec, again);
  EXPECT_EQ(again->summary().repeated_rows, 4);
}

TEST_F(DeferredTest, NoRowsLeaveNothingBehind) {
  Start({.retained_bytes = 1024});
  ForwardRetained(1, 0, {0, 0});
  EXPECT_EQ(engine_->Describe("head")->retained_microbatches, 0);
}

TEST_F(DeferredTest, RetainedRowsAreBoundedReleasedAndExpired) {
  Start({.retained_bytes = 1024});  // 85 rows of 12 bytes, in blocks of 256
  ForwardRetained(1, 40, {0, 40});
  ForwardRetained(2, 40, {0, 40});
  EXPECT_EQ(engine_->stats().retained_bytes_used, 1024);
  StreamSpec third = Retaining(3, 1, {0, 1});
  const absl::Status full = engine_->Open(third, std::make_shared<RowCollector>()).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.message()), HasSubstr("needs 12 bytes; 1024 bytes of 1024 bytes are in use"));

  EXPECT_EQ(engine_->OpenBackward(Backward(9, {0, 1}), std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(engine_->OpenBackward(Backward(1, {39, 41}), std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_TRUE(engine_->Release("head", 1)->released);
  EXPECT_FALSE(engine_->Release("head", 1)->released);
  EXPECT_EQ(engine_->Release("missing", 1).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(engine_->stats().retained_bytes_used, 512);
  EXPECT_EQ(engine_->OpenBackward(Backward(1, {0, 1}), std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(engine_->ExpireRetained(clocks::SteadyNow() - absl::Hours(1)), 0);
  EXPECT_EQ(engine_->ExpireRetained(clocks::SteadyNow() + absl::Hours(1)), 1);
  EXPECT_EQ(engine_->stats().retained_bytes_used, 0);
}

TEST_F(DeferredTest, RetainedRowsEndWithTheirStep) {
  Start({.retained_bytes = 1024});
  ForwardRetained(1, 4, {0, 4});
  ASSERT_TRUE(engine_->ApplyStep("head", {.step = 0}).ok());
  BackwardSpec spec = Backward(1, {0, 4});
  EXPECT_EQ(engine_->OpenBackward(spec, std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kFailedPrecondition);
  spec.step = 1;
  EXPECT_EQ(engine_->OpenBackward(spec, std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(engine_->stats().retained_bytes_used, 0);
}

// Its losses would come from two different weights, and its rows be kept for the wrong step.
TEST_F(DeferredTest, AForwardThatRetainsEndsWithItsStep) {
  Start({.retained_bytes = 1024});
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(Retaining(1, 4, {0, 4}), collector);
  Send(*stream, 1, {0, 2});
  ASSERT_TRUE(engine_->ApplyStep("head", {.step = 0}).ok());
  Send(*stream, 1, {2, 4});
  EXPECT_EQ(collector->Wait().code(), absl::StatusCode::kAborted) << collector->Wait();
  stream.reset();
  EXPECT_EQ(engine_->Describe("head")->retained_microbatches, 0);
}

TEST_F(DeferredTest, ABackwardEndsWithItsStepEvenIfItDoesNotAccumulate) {
  Start({.retained_bytes = 1024});
  ForwardRetained(1, 4, {0, 4});
  BackwardSpec spec = Backward(1, {0, 4});
  spec.accumulate_gradients = false;
  auto collector = std::make_shared<RowCollector>();
  auto stream = engine_->OpenBackward(spec, collector);
  ASSERT_TRUE(stream.ok()) << stream.status();
  (*stream)->Start();
  ASSERT_TRUE(engine_->ApplyStep("head", {.step = 0}).ok());
  EXPECT_EQ(collector->Wait().code(), absl::StatusCode::kAborted) << collector->Wait();
}

TEST_F(DeferredTest, AFailedForwardRetainsNothing) {
  Start({.retained_bytes = 1024});
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(Retaining(1, 4, {0, 4}), collector);
  Send(*stream, 1, {0, 2});
  stream->Cancel(absl::CancelledError("cut"));
  EXPECT_FALSE(collector->Wait().ok());
  stream.reset();
  EXPECT_EQ(engine_->Describe("head")->retained_microbatches, 0);
  ForwardRetained(1, 4, {0, 4});
  ForwardRetained(1, 4, {0, 4});  // a repeat replaces
  EXPECT_EQ(engine_->Open(Retaining(1, 4, {1, 4}), std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kAlreadyExists);
}

TEST_F(DeferredTest, BadBackwardsAreRefused) {
  Start({.retained_bytes = 1024});
  ForwardRetained(1, 4, {0, 4});
  const auto expect = [&](const char* text, auto change) {
    BackwardSpec spec = Backward(1, {0, 4});
    change(spec);
    const absl::Status status = engine_->OpenBackward(spec, std::make_shared<RowCollector>()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  };
  expect("rows", [](BackwardSpec& s) { s.rows = {2, 2}; });
  expect("rows", [](BackwardSpec& s) { s.rows = {-1, 2}; });
  expect("step", [](BackwardSpec& s) { s.step.reset(); });
  expect("grad_loss", [](BackwardSpec& s) { s.grad_loss.clear(); });
  expect("grad_loss[1]", [](BackwardSpec& s) { s.grad_loss[1] = NAN; });
  expect("grad_lse", [](BackwardSpec& s) { s.grad_lse = {1.0f}; });
  expect("grad_entropy[3]", [](BackwardSpec& s) { s.grad_entropy = {0, 0, 0, INFINITY}; });
  StreamSpec spec = Retaining(2, 4, {0, 4});
  spec.want_grad_hidden = true;
  EXPECT_EQ(engine_->Open(spec, std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kInvalidArgument);
  spec = Whole(2, 4);
  spec.retain = true;
  EXPECT_EQ(engine_->Open(spec, std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(DeferredTest, ABackwardOfNoRowsIsRefused) {
  Start({.retained_bytes = 4096});
  ForwardRetained(1, 4, {0, 4});
  for (const RowRange rows : {RowRange{2, 2}, RowRange{3, 2}, RowRange{-1, 2}}) {
    BackwardSpec spec = Backward(1, {0, 4});
    spec.rows = rows;
    spec.grad_loss.assign(static_cast<size_t>(std::max<int64_t>(0, rows.size())), 1.0f);
    const absl::Status status = engine_->OpenBackward(spec, std::make_shared<RowCollector>()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("backward.rows must be a non-empty range"));
  }
}

// A slice that comes when its stream has ended asks, without a lock, what kind of stream it was.
TEST(StreamRowsTest, StaysABackwardWhenItsValuesAreGone) {
  const RowRange rows{0, 2};
  auto created = StreamRows::Create(Spec(1, 2, rows), {.hidden_size = 4, .vocab_size = 3}, HeadState(), {});
  ASSERT_TRUE(created.ok()) << created.status();
  EXPECT_FALSE(created->is_backward());
  created->SetRetained({}, {.loss = {1.0f, 1.0f}});
  EXPECT_TRUE(created->is_backward());
  (void)created->TakeValues();
  EXPECT_TRUE(created->is_backward());
}

// As row memory and streams: who has something may have its share, and who has nothing what is free.
TEST_F(DeferredTest, RetainedMemoryIsSharedByPeer) {
  Start({.peer_share = 0.5, .retained_bytes = 2048});
  const auto open = [&](const std::string& peer, uint64_t id) {
    StreamSpec spec = Retaining(id, 40, {0, 40});  // 512 bytes
    spec.peer = peer;
    return engine_->Open(spec, std::make_shared<RowCollector>());
  };
  const auto a1 = open("a", 1);
  const auto a2 = open("a", 2);
  ASSERT_TRUE(a1.ok() && a2.ok());
  const absl::Status third = open("a", 3).status();
  EXPECT_EQ(third.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(third.message()), HasSubstr("peer a has 1024 bytes of 2048 bytes"));
  EXPECT_THAT(std::string(third.message()), HasSubstr("--peer_share"));
  EXPECT_TRUE(open("b", 4).ok());
}

TEST_F(DeferredTest, OnlyTheirOwnersReleaseMicrobatches) {
  Start({.retained_bytes = 4096});
  const auto retain = [&](uint64_t id, const std::string& identity, const std::string& run) {
    StreamSpec spec = Retaining(id, 4, {0, 4});
    spec.identity = identity;
    spec.run = run;
    auto collector = std::make_shared<RowCollector>();
    auto stream = Open(spec, collector);
    Send(*stream, id, {0, 4});
    ASSERT_TRUE(collector->Wait().ok()) << collector->Wait();
  };
  retain(1, "token:a", "run-a");
  const absl::Status other = engine_->Release("head", 1, {.identity = "token:b", .run = "run-a"}).status();
  EXPECT_EQ(other.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(other.message()), HasSubstr("microbatch_id is retained by token:a"));
  EXPECT_EQ(engine_->Describe("head")->retained_microbatches, 1);
  EXPECT_TRUE(engine_->Release("head", 1, {.identity = "token:a", .run = "another run of it"})->released);
  retain(1, "token:a", "run-a");
  EXPECT_TRUE(engine_->Release("head", 1, {.identity = "token:ops", .may_all = true})->released);
  EXPECT_FALSE(engine_->Release("head", 1, {.identity = "token:b"})->released) << "there is nothing";

  // A server that does not ask knows runs alone.
  retain(2, "", "run-a");
  EXPECT_EQ(engine_->Release("head", 2, {.run = "run-b"}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(engine_->Release("head", 2, {.run = "run-a"})->released);
  retain(2, "", "run-a");
  EXPECT_TRUE(engine_->Release("head", 2)->released) << "an older client says no run";
}

// The rows would be exchanged under their owner.
TEST_F(DeferredTest, NobodyElseRetainsTheSameRows) {
  Start({.retained_bytes = 4096});
  StreamSpec spec = Retaining(1, 4, {0, 4});
  spec.identity = "token:a";
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(spec, collector);
  Send(*stream, 1, {0, 4});
  ASSERT_TRUE(collector->Wait().ok());
  spec.identity = "token:b";
  EXPECT_EQ(engine_->Open(spec, std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kPermissionDenied);
  spec.identity = "token:a";
  EXPECT_TRUE(engine_->Open(spec, std::make_shared<RowCollector>()).ok());
}

// ---- Sampled gradients ----
// Sampled gradients in the engine: every row is given the random numbers of its place in its microbatch,
// however it comes to the device; and the sums of the predicted error reach the summary, the observers and
// the head's description.

// Seed and row number of every row that is computed, by its name.
class Numbers {
 public:
  void Note(const kernels::Chunk& chunk) {
    for (const kernels::Slice& slice : chunk.slices) {
      const auto* hidden = static_cast<const float*>(slice.hidden);
      if (hidden == nullptr) {
        hidden = reinterpret_cast<const float*>(static_cast<FakeRetained*>(chunk.retained)->data() +
                                                slice.retained_offset);
      }
      for (int64_t i = 0; i < slice.rows; ++i) {
        if (hidden[3 * i] == 0.0f) continue;  // a row of zeros in place of one that was not sent again
        seen_[hidden[3 * i]].insert({slice.sample_seed, slice.first_row + i});
      }
    }
  }
  // All rows of the microbatch were computed, with these numbers and no others.
  void Expect(uint64_t id, RowRange rows, uint64_t step) {
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      if (RowName(id, row) == 0.0f) continue;
      const std::set<std::pair<uint64_t, int64_t>> want = {{SampleSeed("head", step, id), row}};
      EXPECT_EQ(seen_[RowName(id, row)], want) << "microbatch " << id << " row " << row;
    }
  }
  void Forget() { seen_.clear(); }

 private:
  std::map<float, std::set<std::pair<uint64_t, int64_t>>> seen_;  // read when no chunk is under way
};

struct Observer : SilentObserver {
  void OnChunk(const ChunkReport& report) override {
    variance += report.sums.sampling_variance;
    square += report.sums.squared_gradient;
    if (report.gradients == Gradients::kSampled) error = report.sums.gradient_error();
  }
  double variance = 0.0, square = 0.0, error = 0.0;  // read when no chunk is under way
};

class SampledTest : public EngineTest {};

TEST_F(SampledTest, RowsHaveTheNumbersOfTheirPlace) {
  Numbers numbers;
  device_.on_chunk = [&](const kernels::Chunk& chunk) { numbers.Note(chunk); };
  Start();
  for (uint64_t step : {0, 1}) {
    numbers.Forget();
    for (int repeat = 0; repeat < 2; ++repeat) {  // a repeat is cut in another way
      auto first = std::make_shared<RowCollector>(), second = std::make_shared<RowCollector>();
      auto one = Open(Spec(7, 20, {0, 12}, step), first);
      auto other = Open(Spec(7, 20, {12, 20}, step), second);
      Send(*other, 7, {15, 20});
      for (int64_t row = 0; row < 12; row += 4 - repeat)
        Send(*one, 7, {row, std::min<int64_t>(12, row + 4 - repeat)});
      Send(*other, 7, {12, 15});
      ASSERT_TRUE(first->Wait().ok()) << first->Wait();
      ASSERT_TRUE(second->Wait().ok()) << second->Wait();
    }
    auto collector = std::make_shared<RowCollector>();
    auto stream = Open(Spec(8, 5, {0, 5}, step), collector);
    Send(*stream, 8, {0, 5});
    ASSERT_TRUE(collector->Wait().ok());
    numbers.Expect(7, {0, 20}, step);
    numbers.Expect(8, {0, 5}, step);
    ASSERT_TRUE(
        engine_
            ->ApplyStep("head", {.step = step, .optimizer = {.kind = kernels::OptimizerOptions::Kind::kSgd}})
            .ok());
  }
}

TEST_F(SampledTest, BackwardHasTheNumbersOfADirectComputation) {
  Numbers numbers;
  device_.on_chunk = [&](const kernels::Chunk& chunk) { numbers.Note(chunk); };
  Start({.retained_bytes = 4096});
  auto collector = std::make_shared<RowCollector>();
  StreamSpec spec = Spec(3, 12, {0, 12});
  spec.reduction = Reduction::kNone;
  spec.retain = true;
  spec.want_grad_hidden = spec.accumulate_gradients = false;
  auto forward = Open(spec, collector);
  Send(*forward, 3, {0, 7});
  Send(*forward, 3, {7, 12});
  ASSERT_TRUE(collector->Wait().ok());
  for (const RowRange rows : {RowRange{0, 5}, {5, 12}, {0, 12}}) {
    BackwardSpec backward{.head = "head", .step = 0, .microbatch_id = 3, .rows = rows};
    backward.want_grad_hidden = true;
    backward.grad_loss.assign(static_cast<size_t>(rows.size()), 1.0f);
    auto results = std::make_shared<RowCollector>();
    auto stream = engine_->OpenBackward(backward, results);
    ASSERT_TRUE(stream.ok()) << stream.status();
    (*stream)->Start();
    for (RowRange part : (*stream)->RetainedSlices()) EXPECT_TRUE(SentSlice(**stream, part).Wait());
    ASSERT_TRUE(results->Wait().ok());
  }
  numbers.Expect(3, {0, 12}, 0);
}

TEST_F(SampledTest, SumsReachTheSummaryTheObserversAndTheDescription) {
  Observer observer;
  device_.sampling_variance = 0.25;
  device_.squared_gradient = 4.0;
  Start({}, {&observer});
  EXPECT_EQ(engine_->Describe("head")->gradient_error, 0.0);
  auto collector = std::make_shared<RowCollector>();
  StreamSpec spec = Whole(1, 8);
  spec.options.gradients = Gradients::kSampled;
  spec.targets[2] = spec.ignore_index;
  auto stream = Open(spec, collector);
  Send(*stream, 1, {0, 3});
  Send(*stream, 1, {3, 8});
  ASSERT_TRUE(collector->Wait().ok()) << collector->Wait();
  EXPECT_EQ(collector->summary().sums.sampling_variance, 7 * 0.25);
  EXPECT_EQ(collector->summary().sums.squared_gradient, 7 * 4.0);
  EXPECT_EQ(engine_->Describe("head")->gradient_error, 0.25);
  auto exact = std::make_shared<RowCollector>();
  stream = Open(Whole(2, 8), exact);
  Send(*stream, 2, {0, 8});
  ASSERT_TRUE(exact->Wait().ok());
  EXPECT_EQ(exact->summary().sums.squared_gradient, 0.0);
  EXPECT_EQ(engine_->Describe("head")->gradient_error, 0.25) << "of the last chunk that was sampled";
  EXPECT_EQ(observer.variance, 7 * 0.25);
  EXPECT_EQ(observer.square, 7 * 4.0);
  EXPECT_EQ(observer.error, 0.25);
  engine_ = nullptr;  // before the observer
}

class DeterministicSampledTest : public DeterministicTest {};

TEST_F(DeterministicSampledTest, RowsHaveTheNumbersOfTheirPlace) {
  Numbers numbers;
  Observer observer;
  device_.on_chunk = [&](const kernels::Chunk& chunk) { numbers.Note(chunk); };
  device_.sampling_variance = 0.25;
  device_.squared_gradient = 4.0;
  Start({}, {&observer});
  StreamSpec spec = Spec(0, 40, {0, 40});
  spec.options.gradients = Gradients::kSampled;
  Call call = Open(spec);
  for (const RowRange rows : {RowRange{0, 10}, {10, 16}, {16, 32}, {32, 40}})
    ASSERT_TRUE(Send(call, 0, rows));
  ASSERT_TRUE(call.results->Wait().ok()) << call.results->Wait();
  EXPECT_EQ(call.results->summary().sums.sampling_variance, 40 * 0.25);
  EXPECT_EQ(call.results->summary().sums.squared_gradient, 40 * 4.0);
  EXPECT_EQ(observer.variance, 40 * 0.25);
  numbers.Expect(0, {0, 40}, 0);
  spec = Spec(0, 40, {20, 40});  // a repeat of some rows: zeros are computed in place of the others
  spec.options.gradients = Gradients::kSampled;
  Call repeat = Open(spec);
  ASSERT_TRUE(Send(repeat, 0, {20, 32}));
  ASSERT_TRUE(Send(repeat, 0, {32, 40}));
  ASSERT_TRUE(repeat.results->Wait().ok()) << repeat.results->Wait();
  EXPECT_EQ(repeat.results->summary().sums.squared_gradient, 20 * 4.0);
  numbers.Expect(0, {0, 40}, 0);
  call.stream.reset();
  repeat.stream.reset();
  engine_ = nullptr;  // before the observer
}

}  // namespace
}  // namespace lossd::engine::stream_test
