// SPDX-License-Identifier: Apache-2.0
// Two GPUs with a replica each hold what one GPU with the whole head holds: sums of gradients, updated
// values, and what is computed with them.
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/exchange_times.h"
#include "kernels/group/group_backend.h"
#include "tests/kernels/chunk_run.h"
#include "tests/kernels/cuda/cuda_test_device.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::testing::cuda_replicas_test {
namespace {

using ::testing::Each;

constexpr int kReplicas = 2;

// Relative, in norm. Both sides add up the same fp32 products in another order.
double Difference(const std::vector<float>& got, const std::vector<float>& want) {
  double difference = 0.0, size = 0.0;
  for (size_t i = 0; i < want.size(); ++i) {
    difference += std::pow(double{got[i]} - double{want[i]}, 2);
    size += std::pow(double{want[i]}, 2);
  }
  return size == 0.0 ? difference : std::sqrt(difference / size);
}
constexpr double kSameSums = 1e-5;

class CudaReplicas : public ::testing::Test {
 protected:
  void SetUp() override {
    LOSSD_SKIP_WITHOUT_GPU();
    if (GpuCount() < kReplicas) GTEST_SKIP() << "one GPU only";
    for (int i = 0; i < kReplicas; ++i) {
      auto backend =
          CreateCudaBackend({.device = i, .replica = {i, kReplicas}, .workspace_bytes = int64_t{64} << 20});
      ASSERT_TRUE(backend.ok()) << backend.status();
      backends_.push_back(*std::move(backend));
    }
    auto single = CreateCudaBackend({.device = 0, .workspace_bytes = int64_t{64} << 20});
    ASSERT_TRUE(single.ok()) << single.status();
    single_ = *std::move(single);
    auto group = CudaReplicaGroup::Create({0, 1});
    ASSERT_TRUE(group.ok()) << group.status();
    group_ = *std::move(group);
  }

  // What the owners hold of a tensor, as one.
  static std::vector<float> Gathered(const std::vector<std::unique_ptr<HeadKernels>>& heads, TensorId id) {
    const HeadConfig& config = heads.front()->config();
    const TensorShape shape = ShapeOf(config, id.param);
    std::vector<float> all;
    const bool by_class = id.param == Param::kWeight || id.param == Param::kBias;
    for (int i = 0; i < kReplicas; ++i) {
      const Shard shard = ShardOf(config.vocab_size, {i, kReplicas});
      const int64_t begin = by_class ? shard.first_class : 0;
      const int64_t rows = by_class ? shard.classes : (i == 0 ? shape.rows : 0);
      std::vector<float> part(static_cast<size_t>(rows * shape.cols));
      const auto bytes = absl::MakeSpan(reinterpret_cast<uint8_t*>(part.data()), part.size() * sizeof(float));
      const absl::Status status =
          heads[static_cast<size_t>(i)]->ReadTensor(id, begin, rows, DType::kFloat32, bytes);
      EXPECT_TRUE(status.ok()) << status;
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }

  void Train(const ProblemSpec& spec, Rng& rng) {
    const Problem first = MakeProblem(spec, rng);
    Problem other = first;
    for (SliceData& slice : other.slices) slice = MakeSlice(spec, slice.rows(), rng);
    SCOPED_TRACE(Describe(first));
    const auto whole = MakeHead(*single_, first);
    std::vector<std::unique_ptr<HeadKernels>> heads;
    std::vector<HeadKernels*> replicas;
    for (const auto& backend : backends_) {
      heads.push_back(MakeHead(*backend, first));
      replicas.push_back(heads.back().get());
    }
    auto connected = group_->Connect(replicas);
    ASSERT_TRUE(connected.ok()) << connected.status();
    const std::unique_ptr<Replicas> joined = *std::move(connected);

    for (int step = 1; step <= 2; ++step) {
      RunChunk(*whole, first);
      RunChunk(*whole, other);
      RunChunk(*heads[0], first);
      RunChunk(*heads[1], other);
      ASSERT_TRUE(joined->SumGradients().ok());
      CompareGradients(*whole, heads);
      // A sum of sums is the same sum.
      ASSERT_TRUE(joined->SumGradients().ok());
      CompareGradients(*whole, heads);
      const OptimizerOptions options = {.learning_rate = 1e-2, .weight_decay = 0.1, .epsilon = 1e-3};
      ASSERT_TRUE(whole->ApplyStep(options, step).ok());
      for (const auto& head : heads) ASSERT_TRUE(head->ApplyStep(options, step).ok());
      ASSERT_TRUE(joined->SpreadValues().ok());
      CompareState(*whole, heads);
    }
    // All of them compute with all values.
    const ChunkRun want = RunChunk(*whole, first);
    const ChunkRun of_first = RunChunk(*heads[0], first), of_second = RunChunk(*heads[1], first);
    for (size_t i = 0; i < want.slices.size(); ++i) {
      EXPECT_EQ(of_first.slices[i].lse, of_second.slices[i].lse);
      EXPECT_EQ(of_first.slices[i].grad_hidden, of_second.slices[i].grad_hidden);
      EXPECT_LE(Difference(of_first.slices[i].lse, want.slices[i].lse), 1e-3);
    }
  }

  static void CompareGradients(HeadKernels& whole, const std::vector<std::unique_ptr<HeadKernels>>& heads) {
    double squares = 0.0;
    for (const auto& head : heads) {
      const absl::StatusOr<double> norm = head->GradNorm();
      ASSERT_TRUE(norm.ok()) << norm.status();
      squares += *norm * *norm;
    }
    EXPECT_NEAR(std::sqrt(squares), *whole.GradNorm(), kSameSums * *whole.GradNorm());
    for (const Param param : kTrainedParams) {
      const TensorId id{param, Role::kGradient};
      if (!HasTensor(whole.config(), id)) continue;
      EXPECT_LE(Difference(Gathered(heads, id), ReadAll(whole, id)), kSameSums) << Name(param);
    }
  }

  static void CompareState(HeadKernels& whole, const std::vector<std::unique_ptr<HeadKernels>>& heads) {
    for (const Param param : kTrainedParams) {
      for (const Role role : {Role::kValue, Role::kMoment1, Role::kMoment2}) {
        if (!HasTensor(whole.config(), {param, role})) continue;
        EXPECT_LE(Difference(Gathered(heads, {param, role}), ReadAll(whole, {param, role})), 1e-4)
            << Name(param) << " " << Name(role);
      }
      if (!HasTensor(whole.config(), {param, Role::kGradient})) continue;
      for (const auto& head : heads) EXPECT_THAT(ReadAll(*head, {param, Role::kGradient}), Each(0.0f));
    }
  }

  std::vector<std::unique_ptr<Backend>> backends_;
  std::unique_ptr<Backend> single_;
  std::unique_ptr<CudaReplicaGroup> group_;
};

TEST_F(CudaReplicas, TrainAsOneHeadDoes) {
  Rng rng = FreshRng();
  for (const DType compute : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const Norm norm : {Norm::kNone, Norm::kRmsNorm, Norm::kLayerNorm}) {
      // With the classes that pad them: shards of 8 and 0, 8 and 8, 504 and 496, 504 and 504.
      for (const int64_t vocab : {1, 9, 1000, 1003}) {
        ProblemSpec spec;
        spec.config = {.hidden_size = 72, .vocab_size = vocab};
        spec.config.norm = norm;
        spec.config.has_bias = norm != Norm::kRmsNorm;
        spec.config.compute_dtype = compute;
        spec.hidden_dtype = compute;
        spec.slice_rows = {40, 17};
        Train(spec, rng);
      }
    }
  }
}

// Of a group of GPUs of one process: every exchange of a step and of a chunk, at every GPU, in no more time
// than there was.
TEST_F(CudaReplicas, TimeTheirExchanges) {
  Rng rng = FreshRng();
  const std::shared_ptr<CudaReplicaGroup> shared = std::move(group_);
  using Heads = absl::Span<HeadKernels* const>;
  auto group =
      CreateGroupBackend(std::move(backends_), [shared](Heads heads) { return shared->Connect(heads); },
                         {.least_rows = 0,
                          .join_classes = [shared](Heads heads) { return shared->Join(heads); },
                          .exchanges = shared->exchanges()});
  ASSERT_TRUE(group.ok()) << group.status();
  for (const Split split : {Split::kVocabulary, Split::kRows}) {
    SCOPED_TRACE(Name(split));
    ProblemSpec spec;
    spec.config = {.hidden_size = 72, .vocab_size = 1003, .compute_dtype = DType::kBFloat16};
    spec.config.norm = Norm::kRmsNorm;
    spec.config.split = split;
    spec.slice_rows = {40, 24};
    const Problem problem = MakeProblem(spec, rng);
    const std::vector<MemberState> before = (*group)->MemberStates();
    const absl::Time start = absl::Now();
    const auto head = MakeHead(**group, problem);
    ASSERT_TRUE(RunChunk(*head, problem).done.ok());
    ASSERT_TRUE(head->ApplyStep({.learning_rate = 1e-2, .epsilon = 1e-3}, 1).ok());
    const absl::Duration took = absl::Now() - start;
    const std::vector<MemberState> after = (*group)->MemberStates();
    for (size_t i = 0; i < after.size(); ++i) {
      for (size_t kind = 0; kind < kExchangeKinds; ++kind) {
        const auto exchange = static_cast<ExchangeKind>(kind);
        const bool of_step =
            exchange == ExchangeKind::kSumGradients || exchange == ExchangeKind::kSpreadValues;
        const absl::Duration time = after[i].exchanges[kind] - before[i].exchanges[kind];
        EXPECT_EQ(time > absl::ZeroDuration(), of_step == (split == Split::kRows))
            << Name(exchange) << " of " << i;
        EXPECT_LE(time, took) << Name(exchange) << " of " << i;
      }
    }
  }
}

TEST_F(CudaReplicas, HaveTheMomentsOfTheirShardOnly) {
  Rng rng = FreshRng();
  ProblemSpec spec;
  spec.config = {.hidden_size = 64, .vocab_size = 20000, .compute_dtype = DType::kBFloat16};
  const Problem problem = MakeProblem(spec, rng);
  const auto head = MakeHead(*backends_[1], problem);
  const auto whole = MakeHead(*single_, problem);
  EXPECT_NEAR(static_cast<double>(head->memory()[MemoryKind::kOptimizer]),
              static_cast<double>(whole->memory()[MemoryKind::kOptimizer]) / 2.0, double{4 << 20});
  std::vector<uint8_t> row(64 * sizeof(float));
  const Shard shard = ShardOf(20000, {1, kReplicas});
  const auto read = [&](int64_t at) {
    return head->ReadTensor({Param::kWeight, Role::kMoment1}, at, 1, DType::kFloat32, absl::MakeSpan(row));
  };
  EXPECT_TRUE(read(shard.first_class).ok());
  const absl::Status refused = read(shard.first_class - 1);
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.message(), ::testing::HasSubstr("rows"));
}

TEST(CudaReplicaGroup, RefusesAGpuTwice) {
  LOSSD_SKIP_WITHOUT_GPU();
  EXPECT_FALSE(CudaReplicaGroup::Create({0, 0}).ok());
}

}  // namespace
}  // namespace lossd::kernels::testing::cuda_replicas_test
