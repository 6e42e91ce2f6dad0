// SPDX-License-Identifier: Apache-2.0
// Heads whose classes lie on several CPU backends: what each member keeps, what they have in common, and what
// is refused. What they compute is compared with the reference in conformance_test.
#include "kernels/group/vocabulary_head.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/group/group_backend.h"
#include "kernels/validation.h"
#include "tests/kernels/chunk_run.h"

namespace lossd::kernels::testing::vocabulary_head_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kMembers = 3;

class VocabularyHeadTest : public ::testing::Test {
 protected:
  void SetUp() override {
    group_ = MakeGroup(0);
    spec_.config.hidden_size = 13;
    spec_.config.vocab_size = 37;
    spec_.config.has_bias = true;
    spec_.config.has_class_weights = true;
    spec_.config.norm = Norm::kLayerNorm;
    spec_.config.optimizer_state = OptimizerState::kAdam;
    spec_.config.split = Split::kVocabulary;
    spec_.slice_rows = {7, 8, 9, 3};
    spec_.ignored = 0.0;
  }

  std::unique_ptr<Backend> MakeGroup(int64_t memory_limit_bytes, JoinClasses join = JoinCpuClasses) {
    auto members = CreateCpuMembers(
        {.threads = 1, .workspace_bytes = 1 << 20, .memory_limit_bytes = memory_limit_bytes}, kMembers);
    EXPECT_TRUE(members.ok()) << members.status();
    auto group = CreateGroupBackend(*std::move(members), MakeCpuReplicas,
                                    {.least_rows = 0,
                                     .members_share_memory = true,
                                     .join_classes = [this, join](absl::Span<HeadKernels* const> heads) {
                                       parts_.assign(heads.begin(), heads.end());
                                       return join(heads);
                                     }});
    EXPECT_TRUE(group.ok()) << group.status();
    return *std::move(group);
  }

  // What a member has of a tensor.
  std::vector<float> OfMember(int member, TensorId id) {
    const ShardRows own = StoredRowsOf(spec_.config, id, {member, kMembers});
    const int64_t cols = ShapeOf(spec_.config, id.param).cols;
    std::vector<float> values(static_cast<size_t>(own.rows * cols));
    const absl::Span<uint8_t> bytes(reinterpret_cast<uint8_t*>(values.data()), values.size() * sizeof(float));
    const absl::Status status =
        parts_[static_cast<size_t>(member)]->ReadTensor(id, own.first, own.rows, DType::kFloat32, bytes);
    EXPECT_TRUE(status.ok()) << status;
    return values;
  }

  std::unique_ptr<Backend> group_;
  std::vector<HeadKernels*> parts_;
  ProblemSpec spec_;
  Rng rng_ = FreshRng();
};

TEST_F(VocabularyHeadTest, EachMemberHasItsClassesAlone) {
  const auto head = group_->CreateHead(spec_.config);
  ASSERT_TRUE(head.ok()) << head.status();
  ASSERT_EQ(parts_.size(), static_cast<size_t>(kMembers));
  MemoryBytes sum;
  for (HeadKernels* part : parts_) {
    for (const MemoryKind kind : {MemoryKind::kGradients, MemoryKind::kOptimizer}) {
      // 13 of 37 classes at most, and the two vectors of the norm.
      const int64_t floats = 13 * (13 + 1) + 2 * 13;
      const int64_t moments = kind == MemoryKind::kOptimizer ? 2 : 1;
      EXPECT_LE(part->memory()[kind], moments * (floats * 4 + 4 * 64)) << Name(kind);
    }
    for (size_t kind = 0; kind < kMemoryKinds; ++kind) sum.by_kind[kind] += part->memory().by_kind[kind];
  }
  EXPECT_EQ((*head)->memory().by_kind, sum.by_kind);
  EXPECT_EQ(group_->PlanHead(spec_.config)->by_kind, sum.by_kind);
  std::vector<uint8_t> row(13 * 4);
  const auto read = [&](int member, int64_t class_index) {
    return parts_[static_cast<size_t>(member)]
        ->ReadTensor({Param::kWeight, Role::kValue}, class_index, 1, DType::kFloat32, absl::MakeSpan(row))
        .code();
  };
  EXPECT_EQ(read(0, 12), absl::StatusCode::kOk);
  EXPECT_EQ(read(0, 13), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(read(1, 12), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(read(1, 13), absl::StatusCode::kOk);
  EXPECT_EQ(read(2, 36), absl::StatusCode::kOk);
}

TEST_F(VocabularyHeadTest, TheNormStaysTheSameOnAllMembersAndCountsOnce) {
  const Problem problem = MakeProblem(spec_, rng_);
  const auto head = MakeHead(*group_, problem);
  ASSERT_NE(head, nullptr);
  for (int64_t update = 1; update <= 3; ++update) {
    ASSERT_TRUE(RunChunk(*head, problem).done.ok());
    double squares = 0.0;
    for (const Param param : kTrainedParams) {
      for (const float g : ReadGradient(*head, param)) squares += double{g} * double{g};
    }
    EXPECT_NEAR(*head->GradNorm(), std::sqrt(squares), 1e-9 * std::sqrt(squares));
    for (const Param param : {Param::kNormGain, Param::kNormShift}) {
      EXPECT_EQ(OfMember(0, {param, Role::kGradient}), OfMember(1, {param, Role::kGradient}));
      EXPECT_EQ(OfMember(0, {param, Role::kGradient}), OfMember(2, {param, Role::kGradient}));
    }
    ASSERT_TRUE(head->ApplyStep({.learning_rate = 0.1}, update).ok());
    for (const Param param : {Param::kNormGain, Param::kNormShift}) {
      for (const Role role : {Role::kValue, Role::kMoment1, Role::kMoment2}) {
        for (int member = 1; member < kMembers; ++member) {
          EXPECT_EQ(OfMember(0, {param, role}), OfMember(member, {param, role})) << Name(param) << Name(role);
        }
      }
    }
  }
}

// What the members say of a chunk's gradient is what one device says: they look at the same probabilities.
TEST_F(VocabularyHeadTest, ErrorAndDroppedMassAreThoseOfAllClasses) {
  spec_.options.filter_epsilon = 0.01f;
  spec_.options.sample_threshold = 0.1f;
  spec_.options.max_gradient_error = 10.0f;
  const auto one = CreateCpuBackend({.threads = 1});
  ASSERT_TRUE(one.ok());
  for (const Gradients gradients : {Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
    spec_.config.gradients = gradients;
    spec_.options.gradients = gradients;
    const Problem problem = MakeProblem(spec_, rng_);
    const auto sole = MakeHead(**one, problem);
    const auto head = MakeHead(*group_, problem);
    ASSERT_TRUE(sole != nullptr && head != nullptr);
    EXPECT_THAT(head->Describe(),
                ::testing::Contains(
                    Choice{.what = "gradients", .choice = std::string(Name(gradients)), .reason = ""}));
    const ChunkRun want = RunChunk(*sole, problem);
    const ChunkRun got = RunChunk(*head, problem);
    EXPECT_EQ(got.gradients, want.gradients);
    EXPECT_EQ(got.choices, want.choices);
    EXPECT_EQ(got.sample_threshold, want.sample_threshold);
    for (size_t i = 0; i < got.slices.size(); ++i) {
      const LossSums &sums = got.slices[i].sums, &all = want.slices[i].sums;
      EXPECT_EQ(sums.dropped_mass > 0.0, gradients == Gradients::kFiltered);
      EXPECT_EQ(sums.sampling_variance > 0.0, gradients != Gradients::kFiltered);
      EXPECT_NEAR(sums.dropped_mass, all.dropped_mass, 1e-4 * all.dropped_mass);
      EXPECT_NEAR(sums.sampling_variance, all.sampling_variance, 1e-4 * all.sampling_variance);
      EXPECT_NEAR(sums.squared_gradient, all.squared_gradient, 1e-4 * all.squared_gradient);
    }
  }
}

// A member whose classes alone would be within the limit goes with the others: here all of the error is the
// last member's, and of the square the first's target has most.
TEST_F(VocabularyHeadTest, AutoDecidesByTheErrorOfAllMembers) {
  spec_.config.norm = Norm::kNone;
  spec_.options.gradients = Gradients::kAuto;
  spec_.options.sample_threshold = 0.5f;
  Problem problem = MakeProblem(spec_, rng_);
  for (SliceData& slice : problem.slices) {
    for (int32_t& target : slice.targets) target = 0;
  }
  for (size_t v = 0; v < 37; ++v) problem.bias[v] = v < 25 ? -60.0f : 0.0f;
  const auto head = MakeHead(*group_, problem);
  ASSERT_NE(head, nullptr);
  double variance = 0.0, square = 0.0;
  for (const SliceOutputs& slice : RunChunk(*head,
                                            [&] {
                                              Problem sampled = problem;
                                              sampled.options.gradients = Gradients::kSampled;
                                              return sampled;
                                            }())
                                       .slices) {
    variance += slice.sums.sampling_variance;
    square += slice.sums.squared_gradient;
  }
  const double error = std::sqrt(variance / square);
  ASSERT_GT(error, 0.0);
  for (const double factor : {0.9, 1.1}) {
    problem.options.max_gradient_error = static_cast<float>(factor * error);
    EXPECT_EQ(RunChunk(*head, problem).gradients, factor < 1.0 ? Gradients::kExact : Gradients::kSampled);
  }
}

// Logits of -infinity are probabilities of 0, also where a member has no others.
TEST_F(VocabularyHeadTest, AMemberWithoutFiniteLogitsAddsNothing) {
  spec_.config.norm = Norm::kNone;
  Problem problem = MakeProblem(spec_, rng_);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (size_t v = 13; v < 25; ++v) problem.bias[v] = -kInfinity;
  for (size_t v = 30; v < 37; ++v) problem.bias[v] = -kInfinity;
  for (auto& slice : problem.slices) {
    for (int32_t& target : slice.targets) target = target < 0 ? target : target % 13;
  }
  const auto one = CreateCpuBackend({.threads = 1});
  ASSERT_TRUE(one.ok());
  const auto sole = MakeHead(**one, problem);
  const auto head = MakeHead(*group_, problem);
  ASSERT_TRUE(sole != nullptr && head != nullptr);
  const ChunkRun want = RunChunk(*sole, problem);
  const ChunkRun got = RunChunk(*head, problem);
  for (size_t i = 0; i < got.slices.size(); ++i) {
    EXPECT_EQ(want.slices[i].first_nonfinite_row, -1);
    EXPECT_EQ(got.slices[i].first_nonfinite_row, -1);
    EXPECT_NEAR(got.slices[i].sums.loss, want.slices[i].sums.loss,
                1e-5 * std::fabs(want.slices[i].sums.loss));
  }
}

TEST_F(VocabularyHeadTest, FewerClassesThanDevicesAreRefused) {
  spec_.config.vocab_size = 2;
  for (const absl::Status& status :
       {group_->PlanHead(spec_.config).status(), group_->CreateHead(spec_.config).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("vocab_size must be at least 3, the devices that it is split over, got 2"));
  }
  spec_.config.split = Split::kAny;
  EXPECT_TRUE(group_->CreateHead(spec_.config).ok()) << "by rows";
}

TEST_F(VocabularyHeadTest, DevicesThatCannotShareClassesRefuse) {
  group_ = MakeGroup(0, RefuseToSplitVocabulary);
  const absl::Status status = group_->CreateHead(spec_.config).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("split must be rows"), HasSubstr("got vocabulary")));
  EXPECT_EQ(group_->memory().current.Total(), 0);
}

// By rows where that fits, else by vocabulary, else refused with the figures of both.
TEST_F(VocabularyHeadTest, WithoutASplitTheMemoryDecides) {
  HeadConfig any = spec_.config;
  any.split = Split::kAny;
  HeadConfig by_rows = any;
  by_rows.split = Split::kRows;
  const int64_t rows_bytes = group_->PlanHead(by_rows)->Total();
  const int64_t vocabulary_bytes = group_->PlanHead(spec_.config)->Total();
  ASSERT_LT(vocabulary_bytes, rows_bytes);
  const auto devices = [](const HeadKernels& head) {
    for (const Choice& choice : head.Describe()) {
      if (choice.what == "devices") return choice;
    }
    return Choice();
  };
  group_ = MakeGroup(rows_bytes);
  auto head = group_->CreateHead(any);
  ASSERT_TRUE(head.ok()) << head.status();
  EXPECT_EQ(devices(**head).choice, "3, by rows");
  EXPECT_EQ((*head)->config(), any);
  head->reset();
  group_ = MakeGroup(rows_bytes - 1);
  head = group_->CreateHead(any);
  ASSERT_TRUE(head.ok()) << head.status();
  EXPECT_EQ(devices(**head).choice, "3, by vocabulary");
  EXPECT_EQ(devices(**head).reason, "a copy on every device does not fit; up to 13 classes each");
  EXPECT_EQ((*head)->config(), any);
  head->reset();
  EXPECT_EQ(group_->CreateHead(by_rows).status().code(), absl::StatusCode::kResourceExhausted);
  group_ = MakeGroup(vocabulary_bytes - 1);
  const absl::Status refusal = group_->CreateHead(any).status();
  EXPECT_EQ(refusal.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refusal.message()), AllOf(HasSubstr("split by rows, the head needs"),
                                                    HasSubstr("by vocabulary, on each of 3 devices")));
  EXPECT_EQ(group_->memory().current.Total(), 0);
}

// ---- Shares of a living head ----

std::vector<std::vector<float>> AllTensors(HeadKernels& head) {
  std::vector<std::vector<float>> all;
  for (const Param param : kAllParams) {
    for (const Role role : {Role::kValue, Role::kGradient, Role::kMoment1, Role::kMoment2}) {
      if (!HasTensor(head.config(), {param, role})) continue;
      const TensorShape shape = ShapeOf(head.config(), param);
      std::vector<float>& values = all.emplace_back(static_cast<size_t>(shape.elements()));
      const absl::Status status =
          head.ReadTensor({param, role}, 0, shape.rows, DType::kFloat32,
                          {reinterpret_cast<uint8_t*>(values.data()), values.size() * sizeof(float)});
      EXPECT_TRUE(status.ok()) << status;
    }
  }
  return all;
}

absl::Status Accept(const HeadKernels&) { return absl::OkStatus(); }

TEST_F(VocabularyHeadTest, OtherSharesKeepEveryBit) {
  const Problem problem = MakeProblem(spec_, rng_);
  const auto head = MakeHead(*group_, problem);
  ASSERT_NE(head, nullptr);
  for (int64_t update = 1; update <= 2; ++update) {
    ASSERT_TRUE(RunChunk(*head, problem).done.ok());
    ASSERT_TRUE(head->ApplyStep({.learning_rate = 0.1}, update).ok());
  }
  const auto before = AllTensors(*head);
  int64_t update = 3;
  for (const std::vector<int32_t>& shares :
       {std::vector<int32_t>{5, 0, 2}, {0, 0, 1}, {1, 1, 1}, {}, {0, 3, 0}}) {
    SCOPED_TRACE(::testing::PrintToString(shares));
    const auto kept = AllTensors(*head);
    ASSERT_TRUE(head->SetShares(shares, Accept).ok());
    EXPECT_EQ(head->config().shares, shares);
    EXPECT_EQ(AllTensors(*head), kept);
    HeadConfig config = spec_.config;
    config.shares = shares;
    EXPECT_EQ(head->memory().by_kind, group_->PlanHead(config)->by_kind);
    EXPECT_EQ(group_->memory().current.by_kind, head->memory().by_kind)
        << "of the division before nothing is left";
    for (int member = 0; member < kMembers; ++member) {
      const TensorId weight = {Param::kWeight, Role::kValue};
      const ShardRows own = StoredRowsOf(config, weight, {member, kMembers});
      std::vector<uint8_t> bytes(static_cast<size_t>(own.rows * 13 * 4));
      EXPECT_TRUE(parts_[static_cast<size_t>(member)]
                      ->ReadTensor(weight, own.first, own.rows, DType::kFloat32, absl::MakeSpan(bytes))
                      .ok())
          << member;
    }
    // It computes as one that was made so.
    const auto made = group_->CreateHead(config);
    ASSERT_TRUE(made.ok()) << made.status();
    for (const Param param : kAllParams) {
      for (const Role role : {Role::kValue, Role::kMoment1, Role::kMoment2}) {
        if (!HasTensor(config, {param, role})) continue;
        const TensorShape shape = ShapeOf(config, param);
        std::vector<uint8_t> bytes(static_cast<size_t>(shape.elements()) * 4);
        ASSERT_TRUE(
            head->ReadTensor({param, role}, 0, shape.rows, DType::kFloat32, absl::MakeSpan(bytes)).ok());
        ASSERT_TRUE((*made)->WriteTensor({param, role}, 0, shape.rows, DType::kFloat32, bytes).ok());
      }
    }
    for (HeadKernels* const each : {head.get(), made->get()}) {
      ASSERT_TRUE(RunChunk(*each, problem).done.ok());
      ASSERT_TRUE(each->ApplyStep({.learning_rate = 0.1}, update).ok());
    }
    EXPECT_EQ(AllTensors(*head), AllTensors(**made));
    ++update;
  }
  EXPECT_NE(AllTensors(*head), before);
}

TEST_F(VocabularyHeadTest, SharesThatCannotBeLeaveTheHeadAsItIs) {
  const Problem problem = MakeProblem(spec_, rng_);
  const int64_t bytes = group_->PlanHead(spec_.config)->Total();
  group_ = MakeGroup(bytes + bytes / 2);  // for one of it, not for two
  const auto head = MakeHead(*group_, problem);
  ASSERT_NE(head, nullptr);
  const auto before = AllTensors(*head);
  const absl::Status no_room = head->SetShares({5, 0, 2}, Accept);
  EXPECT_EQ(no_room.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(no_room.message()), HasSubstr("no room for the head by both divisions"));
  for (const std::vector<int32_t>& wrong :
       {std::vector<int32_t>{1, 2}, {1, 2, 3, 4}, {0, 0, 0}, {1, -1, 1}}) {
    EXPECT_EQ(head->SetShares(wrong, Accept).code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(head->config().shares.empty());
  EXPECT_EQ(AllTensors(*head), before);
  EXPECT_EQ(group_->memory().current.by_kind, head->memory().by_kind);
  ASSERT_TRUE(RunChunk(*head, problem).done.ok());

  const auto roomy = MakeGroup(0);
  const auto other = MakeHead(*roomy, problem);
  ASSERT_NE(other, nullptr);
  const absl::Status reason = absl::FailedPreconditionError("too few rows");
  EXPECT_EQ(other->SetShares({5, 0, 2},
                             [&](const HeadKernels& divided) {
                               EXPECT_THAT(divided.config().shares, ::testing::ElementsAre(5, 0, 2));
                               return reason;
                             }),
            reason);
  EXPECT_TRUE(other->config().shares.empty());
  EXPECT_EQ(AllTensors(*other), before);
}

TEST_F(VocabularyHeadTest, HeadsThatAreNotDividedHaveNoShares) {
  spec_.config.split = Split::kRows;
  const auto head = group_->CreateHead(spec_.config);
  ASSERT_TRUE(head.ok()) << head.status();
  EXPECT_EQ((*head)->SetShares({1, 1, 1}, Accept).code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace lossd::kernels::testing::vocabulary_head_test
