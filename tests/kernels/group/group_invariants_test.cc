// SPDX-License-Identifier: Apache-2.0
// What holds of the tensors of a group's members: the gradient of a class is the sum over them, its owner has
// the whole of it once somebody has looked, values are the same everywhere, and moments are the owner's
// alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/group/group_backend.h"
#include "kernels/validation.h"
#include "tests/kernels/chunk_run.h"

namespace lossd::kernels::testing::group_invariants_test {
namespace {

constexpr int kMembers = 3;
bool AllZero(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float v) { return v == 0.0f; });
}

class GroupInvariantsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto members = CreateCpuMembers({.threads = 1}, kMembers);
    ASSERT_TRUE(members.ok()) << members.status();
    auto group = CreateGroupBackend(*std::move(members),
                                    [this](absl::Span<HeadKernels* const> heads) {
                                      replicas_.assign(heads.begin(), heads.end());
                                      return MakeCpuReplicas(heads);
                                    },
                                    {.least_rows = 0, .members_share_memory = true});
    ASSERT_TRUE(group.ok()) << group.status();
    group_ = *std::move(group);
    spec_.config.hidden_size = 13;
    spec_.config.vocab_size = 37;
    spec_.config.has_bias = true;
    spec_.config.norm = Norm::kLayerNorm;
    spec_.config.optimizer_state = OptimizerState::kAdam;
    spec_.slice_rows = {7, 8, 9, 3};
    spec_.ignored = 0.0;
  }

  // The gradients as the members have them, one after the other.
  std::vector<std::vector<float>> OfMembers(TensorId id) {
    std::vector<std::vector<float>> all;
    for (HeadKernels* replica : replicas_) all.push_back(ReadAll(*replica, id));
    return all;
  }

  std::unique_ptr<Backend> group_;
  std::vector<HeadKernels*> replicas_;
  ProblemSpec spec_;
  Rng rng_ = FreshRng();
};

TEST_F(GroupInvariantsTest, TheGradientIsTheSumAndThenItsOwners) {
  const Problem problem = MakeProblem(spec_, rng_);
  const auto head = MakeHead(*group_, problem);
  ASSERT_NE(head, nullptr);
  ASSERT_TRUE(RunChunk(*head, problem).done.ok());
  for (const Param param : kTrainedParams) {
    const auto parts = OfMembers({param, Role::kGradient});
    for (const auto& part : parts) EXPECT_FALSE(AllZero(part)) << "every member computed some rows";
  }
  std::vector<std::vector<std::vector<float>>> before;
  for (const Param param : kTrainedParams) before.push_back(OfMembers({param, Role::kGradient}));
  double squares = 0.0;
  for (size_t p = 0; p < std::size(kTrainedParams); ++p) {
    const std::vector<float> sum = ReadGradient(*head, kTrainedParams[p]);
    const int64_t cols = ShapeOf(spec_.config, kTrainedParams[p]).cols;
    for (size_t i = 0; i < sum.size(); ++i) {
      EXPECT_EQ(sum[i], before[p][0][i] + before[p][1][i] + before[p][2][i]);
      squares += double{sum[i]} * double{sum[i]};
    }
    for (int member = 0; member < kMembers; ++member) {
      const ShardRows own = ShardRowsOf(spec_.config, kTrainedParams[p], {member, kMembers});
      const std::vector<float> part =
          ReadAll(*replicas_[static_cast<size_t>(member)], {kTrainedParams[p], Role::kGradient});
      for (int64_t i = 0; i < static_cast<int64_t>(part.size()); ++i) {
        const bool mine = i >= own.first * cols && i < own.end() * cols;
        EXPECT_EQ(part[static_cast<size_t>(i)], mine ? sum[static_cast<size_t>(i)] : 0.0f);
      }
    }
  }
  EXPECT_NEAR(*head->GradNorm(), std::sqrt(squares), 1e-9 * std::sqrt(squares));
}

TEST_F(GroupInvariantsTest, AStepLeavesTheSameValuesEverywhereAndNoGradients) {
  const Problem problem = MakeProblem(spec_, rng_);
  const auto head = MakeHead(*group_, problem);
  ASSERT_NE(head, nullptr);
  for (int64_t update = 1; update <= 2; ++update) {
    ASSERT_TRUE(RunChunk(*head, problem).done.ok());
    ASSERT_TRUE(head->ApplyStep({.learning_rate = 0.1}, update).ok());
    for (const Param param : kTrainedParams) {
      for (const auto& values : OfMembers({param, Role::kValue})) {
        EXPECT_EQ(values, ReadAll(*head, {param, Role::kValue})) << Name(param);
      }
      for (const auto& gradient : OfMembers({param, Role::kGradient})) EXPECT_TRUE(AllZero(gradient));
    }
  }
  EXPECT_NE(ReadAll(*head, {Param::kWeight, Role::kValue}), problem.weight);
}

TEST_F(GroupInvariantsTest, MomentsAreTheOwnersAlone) {
  auto head = group_->CreateHead(spec_.config);
  ASSERT_TRUE(head.ok()) << head.status();
  int64_t optimizer_bytes = 0;
  for (int member = 0; member < kMembers; ++member) {
    HeadKernels& replica = *replicas_[static_cast<size_t>(member)];
    optimizer_bytes += replica.memory()[MemoryKind::kOptimizer];
    EXPECT_LT(replica.memory()[MemoryKind::kOptimizer], 37 * 13 * 4 * 2) << "not all of it";
    for (const Param param : kTrainedParams) {
      const TensorId id{param, Role::kMoment1};
      const ShardRows own = ShardRowsOf(spec_.config, param, {member, kMembers});
      const int64_t cols = ShapeOf(spec_.config, param).cols;
      const int64_t rows = ShapeOf(spec_.config, param).rows;
      std::vector<uint8_t> bytes(static_cast<size_t>(rows * cols) * sizeof(float));
      const auto read = [&](int64_t begin, int64_t n) {
        return replica
            .ReadTensor(id, begin, n, DType::kFloat32,
                        absl::MakeSpan(bytes).first(static_cast<size_t>(n * cols) * sizeof(float)))
            .code();
      };
      if (own.rows == 0) {
        EXPECT_EQ(read(0, rows), absl::StatusCode::kNotFound);
        continue;
      }
      EXPECT_EQ(read(own.first, own.rows), absl::StatusCode::kOk);
      if (own.first > 0) {
        EXPECT_EQ(read(own.first - 1, 1), absl::StatusCode::kInvalidArgument);
      }
      if (own.end() < rows) {
        EXPECT_EQ(read(own.end(), 1), absl::StatusCode::kInvalidArgument);
      }
    }
  }
  EXPECT_EQ((*head)->memory()[MemoryKind::kOptimizer], optimizer_bytes);
}

// Members on the CPU have one memory: its limit is that of all together, and of a head that does not fit into
// it, no member keeps a part.
TEST_F(GroupInvariantsTest, WhatDoesNotFitOnAllMembersIsOnNone) {
  const auto plan = group_->PlanHead(spec_.config);
  ASSERT_TRUE(plan.ok()) << plan.status();
  auto members = CreateCpuMembers({.threads = 1, .memory_limit_bytes = plan->Total() - 1}, kMembers);
  ASSERT_TRUE(members.ok()) << members.status();
  auto small = CreateGroupBackend(*std::move(members), MakeCpuReplicas, {.members_share_memory = true});
  ASSERT_TRUE(small.ok()) << small.status();
  EXPECT_EQ((*small)->memory().limit, plan->Total() - 1);
  EXPECT_EQ((*small)->CreateHead(spec_.config).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ((*small)->memory().current.Total(), 0);
  auto staging = (*small)->AllocateStaging(plan->Total() - 1);
  EXPECT_TRUE(staging.ok()) << staging.status();
}

TEST_F(GroupInvariantsTest, MembersDoNotMix) {
  auto heads = group_->CreateHead(spec_.config);
  ASSERT_TRUE(heads.ok()) << heads.status();
  std::vector<HeadKernels*> wrong = {replicas_[1], replicas_[0], replicas_[2]};
  EXPECT_EQ(MakeCpuReplicas(wrong).status().code(), absl::StatusCode::kInvalidArgument);
  wrong = {replicas_[0], replicas_[1]};
  EXPECT_EQ(MakeCpuReplicas(wrong).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(MakeCpuReplicas(std::vector<HeadKernels*>{heads->get()}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace lossd::kernels::testing::group_invariants_test
