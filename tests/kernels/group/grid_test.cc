// SPDX-License-Identifier: Apache-2.0
// Heads with several replicas, each of which divides the classes among its members: what each member keeps,
// what a step leaves, and who computes which rows. What they compute is compared with the reference in
// group_conformance_test.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/cpu_replicas.h"
#include "kernels/group/group_backend.h"
#include "kernels/validation.h"
#include "tests/kernels/chunk_run.h"

namespace lossd::kernels::testing::grid_test {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kMembers = 6;
constexpr int kReplicas = 2;
constexpr int kPlaces = 3;

class GridTest : public ::testing::Test {
 protected:
  void SetUp() override {
    group_ = MakeGroup({.least_rows = 0});
    spec_.config.hidden_size = 13;
    spec_.config.vocab_size = 61;
    spec_.config.has_bias = true;
    spec_.config.has_class_weights = true;
    spec_.config.norm = Norm::kLayerNorm;
    spec_.config.optimizer_state = OptimizerState::kAdam;
    spec_.config.split = Split::kVocabulary;
    spec_.config.shares = {5, 2, 3};
    spec_.config.replicas = kReplicas;
    spec_.slice_rows = {7, 8, 9, 3};
    spec_.ignored = 0.0;
  }

  std::unique_ptr<Backend> MakeGroup(GroupOptions options) {
    auto members = CreateCpuMembers({.threads = 1, .workspace_bytes = 1 << 20}, kMembers);
    EXPECT_TRUE(members.ok()) << members.status();
    options.members_share_memory = true;
    options.join_classes = [this](absl::Span<HeadKernels* const> heads) {
      parts_.assign(heads.begin(), heads.end());
      return JoinCpuClasses(heads);
    };
    auto group = CreateGroupBackend(*std::move(members), MakeCpuReplicas, options);
    EXPECT_TRUE(group.ok()) << group.status();
    return *std::move(group);
  }

  Replica Of(int member) const { return {member, kMembers}; }
  int64_t ColsOf(Param param) const { return ShapeOf(spec_.config, param).cols; }

  // What a member keeps of a tensor.
  std::vector<float> OfMember(int member, TensorId id) {
    const ShardRows kept = StoredRowsOf(spec_.config, id, Of(member));
    std::vector<float> values(static_cast<size_t>(kept.rows * ColsOf(id.param)));
    if (values.empty()) return values;
    const absl::Span<uint8_t> bytes(reinterpret_cast<uint8_t*>(values.data()), values.size() * sizeof(float));
    const absl::Status status =
        parts_[static_cast<size_t>(member)]->ReadTensor(id, kept.first, kept.rows, DType::kFloat32, bytes);
    EXPECT_TRUE(status.ok()) << status;
    return values;
  }

  // What the head says of the rows that a member keeps.
  std::vector<float> OfHead(HeadKernels& head, int member, TensorId id) {
    const std::vector<float> all = ReadAll(head, id);
    const ShardRows kept = StoredRowsOf(spec_.config, id, Of(member));
    const int64_t cols = ColsOf(id.param);
    return {all.begin() + kept.first * cols, all.begin() + kept.end() * cols};
  }

  std::vector<int64_t> RowsOfMembers() {
    std::vector<int64_t> rows;
    for (const MemberState& state : group_->MemberStates()) {
      rows.push_back(state.work.rows);
    }
    return rows;
  }

  std::string Refusal(const HeadConfig& config) {
    const auto head = group_->CreateHead(config);
    EXPECT_EQ(head.status().code(), absl::StatusCode::kInvalidArgument) << head.status();
    EXPECT_EQ(group_->PlanWholeHead(config, {}).status(), head.status())
        << "a plan refuses what a creation does";
    return std::string(head.status().message());
  }

  std::unique_ptr<Backend> group_;
  std::vector<HeadKernels*> parts_;
  ProblemSpec spec_;
  Rng rng_ = FreshRng();
};

TEST_F(GridTest, EveryReplicaHasAllClassesAndEachMomentIsOnce) {
  const auto head = group_->CreateHead(spec_.config);
  ASSERT_TRUE(head.ok()) << head.status();
  ASSERT_EQ(parts_.size(), static_cast<size_t>(kMembers));
  for (const Param param : {Param::kWeight, Param::kBias}) {
    std::vector<int> updated(61, 0);
    for (int replica = 0; replica < kReplicas; ++replica) {
      int64_t next = 0;
      for (int place = 0; place < kPlaces; ++place) {
        const int member = replica * kPlaces + place;
        const ShardRows kept = StoredRowsOf(spec_.config, {param, Role::kGradient}, Of(member));
        EXPECT_EQ(kept, ClassesOf(spec_.config, {place, kPlaces * kReplicas}));
        EXPECT_EQ(kept.first, next);
        next = kept.end();
        const ShardRows own = ShardRowsOf(spec_.config, param, Of(member));
        EXPECT_GE(own.first, kept.first);
        EXPECT_LE(own.end(), kept.end());
        for (int64_t row = own.first; row < own.end(); ++row) ++updated[static_cast<size_t>(row)];
      }
      EXPECT_EQ(next, 61);
    }
    EXPECT_THAT(updated, Each(1));
  }
  MemoryBytes sum;
  for (HeadKernels* part : parts_) {
    for (size_t kind = 0; kind < kMemoryKinds; ++kind) sum.by_kind[kind] += part->memory().by_kind[kind];
  }
  EXPECT_EQ((*head)->memory().by_kind, sum.by_kind);
  EXPECT_EQ(group_->PlanHead(spec_.config)->by_kind, sum.by_kind);
  const auto planned = group_->PlanWholeHead(spec_.config, {});
  ASSERT_TRUE(planned.ok()) << planned.status();
  EXPECT_EQ(planned->chunk_rows, (*head)->chunk_rows());
  EXPECT_EQ(planned->slice_rows, (*head)->slice_rows());
  EXPECT_EQ(planned->chunk_rows, kReplicas * planned->slice_rows);
  for (const std::vector<Choice>& choices : {planned->choices, (*head)->Describe()}) {
    ASSERT_GE(choices.size(), 2u);
    EXPECT_EQ(choices[1].what, "devices");
    EXPECT_EQ(choices[1].choice, "6, 2 replicas of 3 by vocabulary");
  }
}

TEST_F(GridTest, TheGradientIsTheSumOverTheReplicasAndThenItsOwners) {
  const Problem problem = MakeProblem(spec_, rng_);
  const auto head = MakeHead(*group_, problem);
  ASSERT_NE(head, nullptr);
  ASSERT_TRUE(RunChunk(*head, problem).done.ok());
  std::vector<std::vector<std::vector<float>>> before;
  for (const Param param : kTrainedParams) {
    auto& of_members = before.emplace_back();
    for (int member = 0; member < kMembers; ++member) {
      of_members.push_back(OfMember(member, {param, Role::kGradient}));
    }
  }
  double squares = 0.0;
  for (size_t p = 0; p < std::size(kTrainedParams); ++p) {
    const Param param = kTrainedParams[p];
    for (const float g : ReadGradient(*head, param)) squares += double{g} * double{g};
    for (int place = 0; place < kPlaces; ++place) {
      const std::vector<float>& first = before[p][static_cast<size_t>(place)];
      const std::vector<float>& second = before[p][static_cast<size_t>(kPlaces + place)];
      const std::vector<float> sum = OfHead(*head, place, {param, Role::kGradient});
      ASSERT_EQ(sum.size(), first.size());
      for (size_t i = 0; i < sum.size(); ++i) EXPECT_EQ(sum[i], first[i] + second[i]) << Name(param);
      EXPECT_NE(first, std::vector<float>(first.size(), 0.0f)) << "both replicas computed some rows";
      EXPECT_NE(second, std::vector<float>(second.size(), 0.0f));
    }
    for (int member = 0; member < kMembers; ++member) {
      const std::vector<float> sum = OfHead(*head, member, {param, Role::kGradient});
      const std::vector<float> part = OfMember(member, {param, Role::kGradient});
      const ShardRows kept = StoredRowsOf(spec_.config, {param, Role::kGradient}, Of(member));
      const ShardRows own = ShardRowsOf(spec_.config, param, Of(member));
      for (size_t i = 0; i < part.size(); ++i) {
        const int64_t row = kept.first + static_cast<int64_t>(i) / ColsOf(param);
        EXPECT_EQ(part[i], row >= own.first && row < own.end() ? sum[i] : 0.0f);
      }
    }
  }
  EXPECT_NEAR(*head->GradNorm(), std::sqrt(squares), 1e-9 * std::sqrt(squares)) << "the norm counts once";
}

TEST_F(GridTest, AStepLeavesTheSameValuesInAllReplicasAndNoGradients) {
  const Problem problem = MakeProblem(spec_, rng_);
  const auto head = MakeHead(*group_, problem);
  ASSERT_NE(head, nullptr);
  for (int64_t update = 1; update <= 2; ++update) {
    ASSERT_TRUE(RunChunk(*head, problem).done.ok());
    ASSERT_TRUE(head->ApplyStep({.learning_rate = 0.1}, update).ok());
    for (const Param param : kTrainedParams) {
      for (int member = 0; member < kMembers; ++member) {
        EXPECT_EQ(OfMember(member, {param, Role::kValue}), OfHead(*head, member, {param, Role::kValue}))
            << Name(param) << " of member " << member;
        EXPECT_THAT(OfMember(member, {param, Role::kGradient}), Each(0.0f));
      }
    }
  }
  EXPECT_NE(ReadAll(*head, {Param::kWeight, Role::kValue}), problem.weight);
}

// Of every tensor, whichever members keep it.
TEST_F(GridTest, WhatIsWrittenIsRead) {
  const auto head = group_->CreateHead(spec_.config);
  ASSERT_TRUE(head.ok()) << head.status();
  for (const Param param : kAllParams) {
    for (const Role role : {Role::kValue, Role::kGradient, Role::kMoment1, Role::kMoment2}) {
      const TensorId id{param, role};
      if (!HasTensor(spec_.config, id)) continue;
      const TensorShape shape = ShapeOf(spec_.config, param);
      std::vector<float> values(static_cast<size_t>(shape.elements()));
      for (float& value : values) value = static_cast<float>(UniformInt(rng_, 1, 1000));
      // In two pieces that no member's rows end with.
      const int64_t cut = std::min<int64_t>(shape.rows, 5);
      const absl::Span<const uint8_t> bytes(reinterpret_cast<const uint8_t*>(values.data()),
                                            values.size() * sizeof(float));
      const auto at = static_cast<size_t>(cut * shape.cols) * sizeof(float);
      ASSERT_TRUE((*head)->WriteTensor(id, 0, cut, DType::kFloat32, bytes.first(at)).ok());
      ASSERT_TRUE((*head)->WriteTensor(id, cut, shape.rows - cut, DType::kFloat32, bytes.subspan(at)).ok());
      EXPECT_EQ(ReadAll(**head, id), values) << Name(param) << " " << Name(role);
      for (int member = 0; role == Role::kValue && member < kMembers; ++member) {
        EXPECT_EQ(OfMember(member, id), OfHead(**head, member, id)) << Name(param) << " of " << member;
      }
      if (role != Role::kGradient) continue;
      ASSERT_TRUE((*head)->AddGradient(param, 0, shape.rows, DType::kFloat32, 2.0f, bytes).ok());
      for (float& value : values) value *= 3.0f;
      EXPECT_EQ(ReadAll(**head, id), values) << Name(param) << ", added once";
    }
  }
}

// Where the rows are decides, unless sums have to be the same each time; what lies nowhere is divided evenly.
TEST_F(GridTest, RowsGoToTheReplicaThatHasThem) {
  int device = -1;  // of all hidden states
  group_ = MakeGroup({.least_rows = 0, .member_of = [&](const void*) { return device; }});
  const Problem problem = MakeProblem(spec_, rng_);
  const auto head = MakeHead(*group_, problem);
  ASSERT_NE(head, nullptr);
  const auto run = [&](const RunOptions& options = {}) {
    const std::vector<int64_t> before = RowsOfMembers();
    EXPECT_TRUE(RunChunk(*head, problem, options).done.ok());
    std::vector<int64_t> rows = RowsOfMembers();
    for (size_t i = 0; i < rows.size(); ++i) rows[i] -= before[i];
    return rows;
  };
  std::vector<int64_t> rows = run();
  EXPECT_EQ(rows[0] + rows[3], 27);
  EXPECT_LE(std::abs(rows[0] - rows[3]), 9);
  EXPECT_THAT(rows, ElementsAre(rows[0], rows[0], rows[0], rows[3], rows[3], rows[3]));
  device = 1;
  EXPECT_THAT(run(), ElementsAre(27, 27, 27, 0, 0, 0));
  device = 5;
  EXPECT_THAT(run(), ElementsAre(0, 0, 0, 27, 27, 27));
  EXPECT_THAT(run(), ElementsAre(0, 0, 0, 27, 27, 27)) << "whoever had the chunk before";
  EXPECT_THAT(run({.independent = true}), ElementsAre(27, 27, 27, 0, 0, 0)) << "by its turn";
}

TEST_F(GridTest, AReplicaOfOneMemberIsAHeadByRows) {
  spec_.config.shares = {};
  spec_.config.replicas = kMembers;
  const Problem problem = MakeProblem(spec_, rng_);
  const auto head = MakeHead(*group_, problem);
  ASSERT_NE(head, nullptr);
  EXPECT_EQ(head->Describe()[1].choice, "6, by rows");
  EXPECT_EQ(head->chunk_rows(), kMembers * head->slice_rows());
  ASSERT_TRUE(RunChunk(*head, problem).done.ok());
  EXPECT_TRUE(head->ApplyStep({.learning_rate = 0.1}, 1).ok());
}

TEST_F(GridTest, WithoutASplitItIsByVocabulary) {
  spec_.config.split = Split::kAny;
  spec_.config.shares = {};
  const auto head = group_->CreateHead(spec_.config);
  ASSERT_TRUE(head.ok()) << head.status();
  EXPECT_EQ((*head)->Describe()[1].choice, "6, 2 replicas of 3 by vocabulary");
  EXPECT_EQ((*head)->config(), spec_.config) << "as it was asked for";
}

TEST_F(GridTest, HeadsThatDoNotSayHaveTheReplicasOfTheGroup) {
  spec_.config.shares = {};
  spec_.config.replicas = 0;
  group_ = MakeGroup({.replicas = 3});
  const auto choice = [&] { return (*group_->CreateHead(spec_.config))->Describe()[1].choice; };
  EXPECT_EQ(choice(), "6, 3 replicas of 2 by vocabulary");
  EXPECT_EQ(group_->PlanWholeHead(spec_.config, {})->choices[1].choice, choice());
  EXPECT_EQ(group_->PlanWholeHead(spec_.config, {})->memory.by_kind, group_->PlanHead(spec_.config)->by_kind);
  spec_.config.replicas = 1;
  EXPECT_EQ(choice(), "6, by vocabulary");
  spec_.config.replicas = 0;
  spec_.config.split = Split::kRows;
  EXPECT_EQ(choice(), "6, by rows");
  auto members = CreateCpuMembers({.threads = 1}, kMembers);
  const auto refused = CreateGroupBackend(*std::move(members), MakeCpuReplicas, {.replicas = 4});
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("replicas must be at least 1 and divide"));
}

TEST_F(GridTest, RefusesWhatIsNoGrid) {
  HeadConfig config = spec_.config;
  config.replicas = 4;
  EXPECT_THAT(Refusal(config), HasSubstr("replicas must divide the server's devices, 6"));
  config.replicas = -1;
  EXPECT_THAT(Refusal(config), HasSubstr("replicas must be in [0, 65536]"));
  config.replicas = 3;
  EXPECT_THAT(Refusal(config),
              HasSubstr("shares must have one entry for each of the devices of a replica, 2"));
  config.shares = {};
  config.vocab_size = 1;
  EXPECT_THAT(Refusal(config), HasSubstr("vocab_size must be at least 2"));
  config.split = Split::kRows;
  EXPECT_THAT(Refusal(config), HasSubstr("split must be vocabulary with replicas"));
  group_ = MakeGroup({.may_have_replicas = false});
  EXPECT_THAT(Refusal(spec_.config),
              HasSubstr("replicas must be 0 or 1 where a head lies on the devices of"));
  EXPECT_EQ(group_->memory().current.Total(), 0);
}

}  // namespace
}  // namespace lossd::kernels::testing::grid_test
