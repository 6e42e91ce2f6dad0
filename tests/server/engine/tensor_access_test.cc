// SPDX-License-Identifier: Apache-2.0
// Reading and writing tensors row by row, while other calls change the head or want to use it.
#include "server/engine/tensor_access.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/engine.h"
#include "tests/server/engine/engine_fixture.h"

namespace lossd::engine::tensor_access_test {
namespace {

using ::testing::HasSubstr;

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

}  // namespace
}  // namespace lossd::engine::tensor_access_test
