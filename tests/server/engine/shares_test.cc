// SPDX-License-Identifier: Apache-2.0
// Shares of a head that lies on several devices by vocabulary: when they change, and what the engine then
// says of the head.
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/engine.h"
#include "tests/kernels/group/member_group.h"
#include "tests/server/engine/engine_fixture.h"

namespace lossd::engine::shares_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr kernels::TensorId kWeight = {kernels::Param::kWeight, kernels::Role::kValue};

class SharesTest : public ::testing::Test {
 protected:
  static constexpr int64_t kHidden = 3, kClasses = 10;

  void Start(EngineOptions options = {}) {
    options.slice_bytes = 4096;
    options.staging_bytes = int64_t{1} << 20;
    auto engine = Engine::Create(options, backend_.get(), 42, {});
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    const kernels::HeadConfig config{
        .hidden_size = kHidden, .vocab_size = kClasses, .split = kernels::Split::kVocabulary};
    ASSERT_TRUE(engine_->CreateHead("head", config).ok());
    ASSERT_TRUE(engine_->PublishHead("head").ok());
  }
  std::vector<float> Weight() {
    std::vector<float> values(kHidden * kClasses);
    EXPECT_TRUE(engine_
                    ->OnDevice("head",
                               [&](head::Head& head) {
                                 return head.ReadRows(kWeight, 0, kClasses, kernels::DType::kFloat32,
                                                      {reinterpret_cast<uint8_t*>(values.data()),
                                                       values.size() * sizeof(float)});
                               })
                    .ok());
    return values;
  }

  std::unique_ptr<kernels::Backend> backend_ = kernels::testing::MakeCpuGroup(3, 0);
  std::unique_ptr<Engine> engine_;
};

TEST_F(SharesTest, TheHeadSaysWhatItHas) {
  Start();
  std::vector<float> values(kHidden * kClasses);
  for (size_t i = 0; i < values.size(); ++i) values[i] = 0.1f * static_cast<float>(i) - 1.0f;
  ASSERT_TRUE(engine_
                  ->OnDevice("head",
                             [&](head::Head& head) {
                               return head.WriteRows(kWeight, 0, kClasses, kernels::DType::kFloat32,
                                                     {reinterpret_cast<const uint8_t*>(values.data()),
                                                      values.size() * sizeof(float)});
                             })
                  .ok());
  const HeadSnapshot before = *engine_->Describe("head");
  EXPECT_THAT(before.config.shares, IsEmpty());
  ASSERT_EQ(before.devices.size(), 3u);
  EXPECT_EQ(before.devices[0].classes + before.devices[1].classes + before.devices[2].classes, kClasses);
  EXPECT_EQ(before.devices[1].share, 1);
  for (const std::vector<int32_t>& shares : {std::vector<int32_t>{2, 0, 3}, {0, 0, 1}, {}}) {
    ASSERT_TRUE(engine_->SetShares("head", shares).ok());
    const HeadSnapshot head = *engine_->Describe("head");
    EXPECT_EQ(head.config.shares, shares);
    EXPECT_EQ(head.state.step, before.state.step);
    EXPECT_EQ(head.state.generation, before.state.generation);
    EXPECT_EQ(head.state.weights_version, before.state.weights_version);
    EXPECT_EQ(head.limits.max_rows, head.chunk_rows);
    EXPECT_EQ(head.memory.by_kind, engine_->PlanHead("other", head.config)->memory.by_kind);
    EXPECT_EQ(Weight(), values);
  }
  ASSERT_TRUE(engine_->SetShares("head", {2, 0, 3}).ok());
  EXPECT_EQ(engine_->Describe("head")->devices[1].classes, 0);
  EXPECT_EQ(engine_->Describe("head")->devices[2].share, 3);
}

TEST_F(SharesTest, WhileRowsAreUnderWayTheyStay) {
  Start();
  auto collector = std::make_shared<RowCollector>();
  StreamSpec spec = Spec(1, 4, {0, 4}, 0);
  auto stream = engine_->Open(std::move(spec), collector);
  ASSERT_TRUE(stream.ok()) << stream.status();
  const absl::Status refused = engine_->SetShares("head", {2, 0, 3});
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("open ComputeLoss or Backward calls: 1"));
  EXPECT_THAT(engine_->Describe("head")->config.shares, IsEmpty());
  stream->reset();
}

TEST_F(SharesTest, WhatIsWrongChangesNothing) {
  Start();
  for (const std::vector<int32_t>& wrong : {std::vector<int32_t>{1, 1}, {0, 0, 0}, {1, -1, 1}}) {
    EXPECT_EQ(engine_->SetShares("head", wrong).code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(engine_->SetShares("none", {1, 1, 1}).code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(engine_->Describe("head")->config.shares, IsEmpty());
}

// Where they stay as they are, a head whose chunks become smaller cannot follow.
TEST_F(SharesTest, GroupsOfADeterministicEngineStay) {
  EngineOptions options;
  options.deterministic = true;
  Start(options);
  const HeadSnapshot before = *engine_->Describe("head");
  const absl::Status status = engine_->SetShares("head", {0, 0, 1});
  const HeadSnapshot after = *engine_->Describe("head");
  EXPECT_EQ(after.limits.row_grid, before.limits.row_grid);
  if (status.ok()) {
    EXPECT_THAT(after.config.shares, ElementsAre(0, 0, 1));
    EXPECT_GE(after.chunk_rows, before.limits.row_grid);
  } else {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(after.config.shares, IsEmpty());
  }
}

class UndividedTest : public EngineTest {};

TEST_F(UndividedTest, HasNoShares) {
  Start();
  EXPECT_EQ(engine_->SetShares("head", {1}).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(engine_->Describe("head")->devices.empty());
}

}  // namespace
}  // namespace lossd::engine::shares_test
