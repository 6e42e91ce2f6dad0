// SPDX-License-Identifier: Apache-2.0
// Tests of how a group divides a chunk (group_chunk.h): the parts, the decision about sampling in each part,
// and heads with several replicas, each of which divides the classes among its members.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/group/group_backend.h"
#include "kernels/group/group_chunk.h"
#include "kernels/validation.h"
#include "tests/kernels/chunk_run.h"
#include "tests/kernels/group/member_group.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::testing::division_test {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// ---- Decisions of the parts ----
// By rows, each member decides for its part of a chunk whether to sample (Gradients::kAuto). What all parts
// together then have of error is within the limit: the predicted error of the chunk, and what comes out.

constexpr int kMembers = 3;
constexpr int64_t kSliceRows = 8;
constexpr size_t kSlices = 2 * kMembers;  // slices i and i + kMembers are one member's
constexpr int64_t kRows = static_cast<int64_t>(kSlices) * kSliceRows;
constexpr int64_t kClasses = 96;
constexpr float kThreshold = 0.1f;

// Row n is the n-th unit vector, so that column n of dL/dW is dL/dz of row n. The rows of the members are
// sharp in different degrees.
Problem SharpAndFlat(Rng& rng) {
  ProblemSpec spec;
  spec.config.hidden_size = kRows;
  spec.config.vocab_size = kClasses;
  spec.config.split = Split::kRows;
  spec.options.sample_threshold = kThreshold;
  spec.slice_rows.assign(kSlices, kSliceRows);
  spec.ignored = 0.0;
  Problem problem = MakeProblem(spec, rng);
  std::vector<float> sharpness = {0.3f, 2.5f, 6.0f};
  std::shuffle(sharpness.begin(), sharpness.end(), rng);
  for (size_t i = 0; i < kSlices; ++i) {
    SliceData& slice = problem.slices[i];
    std::fill(slice.hidden.begin(), slice.hidden.end(), 0.0f);
    for (int64_t row = 0; row < kSliceRows; ++row) {
      const int64_t n = static_cast<int64_t>(i) * kSliceRows + row;
      slice.hidden[static_cast<size_t>(row * kRows + n)] = 1.0f;
      for (int64_t v = 0; v < kClasses; ++v) {
        problem.weight[static_cast<size_t>(v * kRows + n)] =
            sharpness[i % kMembers] * Uniform(rng, -1.0f, 1.0f);
      }
    }
  }
  return problem;
}

struct Error {
  double variance = 0.0;
  double square = 0.0;
  double relative() const { return std::sqrt(variance / square); }
};

// Of the slices that a member has.
Error OfPart(const ChunkRun& run, size_t member) {
  Error error;
  for (size_t i = member; i < kSlices; i += kMembers) {
    error.variance += run.slices[i].sums.sampling_variance;
    error.square += run.slices[i].sums.squared_gradient;
  }
  return error;
}

double SquaredDistance(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0.0;
  for (size_t i = 0; i < a.size(); ++i) sum += std::pow(double{a[i]} - double{b[i]}, 2);
  return sum;
}

class AutoPartsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    group_ = MakeCpuGroup(kMembers, /*least_rows=*/0);
    ASSERT_NE(group_, nullptr);
    head_ = MakeHead(*group_, problem_);
    ASSERT_NE(head_, nullptr);
    problem_.options.gradients = Gradients::kExact;
    exact_ = Run().second;
    problem_.options.gradients = Gradients::kSampled;
    const ChunkRun sampled = Run().first;
    for (size_t i = 0; i < kMembers; ++i) parts_.push_back(OfPart(sampled, i));
    problem_.options.gradients = Gradients::kAuto;
  }

  // With random numbers of its own: what the chunk says, and dL/dW.
  std::pair<ChunkRun, std::vector<float>> Run() {
    for (SliceData& slice : problem_.slices) slice.sample_seed = rng_();
    EXPECT_TRUE(head_->ZeroGradients().ok());
    ChunkRun run = RunChunk(*head_, problem_);
    EXPECT_TRUE(run.done.ok()) << run.done;
    return {std::move(run), ReadGradient(*head_, Param::kWeight)};
  }

  Rng rng_ = FreshRng();
  Problem problem_ = SharpAndFlat(rng_);
  std::unique_ptr<Backend> group_;
  std::unique_ptr<HeadKernels> head_;
  std::vector<float> exact_;  // dL/dW
  std::vector<Error> parts_;  // of each member, if it samples
};

TEST_F(AutoPartsTest, WhatThePartsDecideKeepsTheChunkWithinTheLimit) {
  constexpr int kRuns = 100;
  const double square = SquaredDistance(exact_, std::vector<float>(exact_.size(), 0.0f));
  double of_parts = 0.0;
  std::vector<double> errors;
  for (const Error& part : parts_) {
    of_parts += part.square;
    errors.push_back(part.relative());
  }
  EXPECT_NEAR(of_parts, square, 1e-4 * square) << "the parts' squares are the chunk's";
  std::sort(errors.begin(), errors.end());
  for (size_t sampled = 0; sampled <= kMembers; ++sampled) {
    SCOPED_TRACE(::testing::Message() << sampled << " parts are sampled");
    const double limit = sampled == 0          ? errors.front() / 2
                         : sampled == kMembers ? errors.back() * 2
                                               : std::sqrt(errors[sampled - 1] * errors[sampled]);
    problem_.options.max_gradient_error = static_cast<float>(limit);
    double predicted = 0.0;
    double actual = 0.0;
    for (int i = 0; i < kRuns; ++i) {
      const auto [run, gradient] = Run();
      for (size_t member = 0; member < kMembers; ++member) {
        const Error part = OfPart(run, member);
        EXPECT_EQ(part.square > 0.0, parts_[member].relative() <= limit) << "by itself";
        predicted += part.variance / kRuns;
      }
      actual += SquaredDistance(gradient, exact_) / kRuns;
    }
    EXPECT_LE(predicted, limit * limit * square);
    EXPECT_LE(actual, limit * limit * square);
    EXPECT_NEAR(actual, predicted, 0.2 * predicted + 1e-9 * square);
  }
}

// ---- Divisions ----
// Divisions of random chunks have the properties that group_chunk.h promises.

std::vector<Slice> Slices(const std::vector<int64_t>& rows) {
  std::vector<Slice> slices(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) slices[i].rows = rows[i];
  return slices;
}

std::vector<int64_t> RowsByMember(const std::vector<ChunkPart>& parts, int members) {
  std::vector<int64_t> rows(static_cast<size_t>(members), 0);
  for (const ChunkPart& part : parts) rows[static_cast<size_t>(part.member)] += part.rows;
  return rows;
}

// Of all chunks, whatever they hold.
void ExpectSound(const std::vector<Slice>& slices, const DivisionLimits& limits,
                 const std::vector<ChunkPart>& parts) {
  std::vector<int> seen(slices.size(), 0);
  int last_member = 0;
  for (const ChunkPart& part : parts) {
    ASSERT_GE(part.member, last_member);
    ASSERT_LT(part.member, limits.members);
    last_member = part.member;
    ASSERT_TRUE(std::is_sorted(part.slices.begin(), part.slices.end()));
    int64_t rows = 0;
    for (const size_t slice : part.slices) {
      ASSERT_LT(slice, slices.size());
      ++seen[slice];
      rows += slices[slice].rows;
    }
    EXPECT_EQ(part.rows, rows);
    EXPECT_LE(part.rows, limits.member_rows);
  }
  EXPECT_EQ(seen, std::vector<int>(slices.size(), 1)) << "each slice once";
}

TEST(DivisionTest, RandomChunksAreDividedSoundlyAndEvenly) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const auto up_to = [&rng](uint64_t n) { return static_cast<int64_t>(rng() % (n + 1)); };
  for (int repeat = 0; repeat < 5000; ++repeat) {
    DivisionLimits limits;
    limits.members = 1 + static_cast<int>(up_to(7));
    limits.member_rows = 1 + up_to(100);
    std::vector<int64_t> rows;
    int64_t left = limits.members * limits.member_rows;
    for (int64_t more = up_to(40); more > 0 && left > 0; --more) {
      rows.push_back(up_to(static_cast<uint64_t>(std::min(left, limits.member_rows))));
      left -= rows.back();
    }
    std::vector<Slice> slices = Slices(rows);
    const int first = static_cast<int>(up_to(static_cast<uint64_t>(limits.members - 1)));
    const std::vector<ChunkPart> parts = Divide(slices, limits, first);
    ExpectSound(slices, limits, parts);
    EXPECT_EQ(Divide(slices, limits, first), parts) << "a pure function";
    for (Slice& slice : slices) slice.retained_offset = up_to(1) == 0 ? -1 : up_to(1 << 20);
    EXPECT_EQ(Divide(slices, limits, first), parts) << "of the numbers of rows alone";
    const std::vector<int64_t> by_member = RowsByMember(parts, limits.members);
    const auto [least, most] = std::minmax_element(by_member.begin(), by_member.end());
    const int64_t largest = rows.empty() ? 0 : *std::max_element(rows.begin(), rows.end());
    EXPECT_LE(*most - *least, largest);
  }
}

// Chunks of one slice each, as those of losses alone often are, keep all members busy.
TEST(DivisionTest, WhatIsEvenBeginsWithTheFirstMember) {
  const DivisionLimits limits{.members = 3, .member_rows = 20};
  for (int first = 0; first < 3; ++first) {
    EXPECT_EQ(Divide(Slices({20}), limits, first),
              (std::vector<ChunkPart>{{.member = first, .rows = 20, .slices = {0}}}));
    std::vector<int64_t> want(3, 5);
    want[static_cast<size_t>(first)] = 9;
    EXPECT_EQ(RowsByMember(Divide(Slices({5, 9, 5}), limits, first), 3), want);
  }
}

TEST(DivisionTest, AMemberHasAsManyPartsAsItNeeds) {
  const DivisionLimits limits{.members = 2, .member_rows = 15};
  EXPECT_EQ(Divide(Slices({10, 10, 10}), limits, 1),
            (std::vector<ChunkPart>{{.member = 0, .rows = 10, .slices = {1}},
                                    {.member = 1, .rows = 10, .slices = {0}},
                                    {.member = 1, .rows = 10, .slices = {2}}}));
}

TEST(DivisionTest, FewRowsAreOneMembers) {
  const DivisionLimits limits{.members = 2, .member_rows = 60, .least_rows = 100};
  EXPECT_EQ(Divide(Slices({30, 20}), limits, 1),
            (std::vector<ChunkPart>{{.member = 1, .rows = 50, .slices = {0, 1}}}));
  EXPECT_EQ(Divide(Slices({40, 50}), limits, 1).size(), 2u) << "one member does not take them";
  EXPECT_EQ(Divide(Slices({50, 50}), limits, 1).size(), 2u);
  EXPECT_EQ(Divide({}, limits, 1), (std::vector<ChunkPart>{{.member = 1}}));
  EXPECT_EQ(Divide(Slices({0, 0}), limits, 1),
            (std::vector<ChunkPart>{{.member = 1, .rows = 0, .slices = {0, 1}}}));
}

TEST(DivisionTest, SlicesWithAHomeGoThereAndTheOthersMakeUpForIt) {
  const DivisionLimits limits{.members = 3, .member_rows = 60};
  std::vector<int> homes = {2, -1, 2, -1, -1};
  const auto divide = [&](const DivisionLimits& by, int first) {
    const std::vector<Slice> slices = Slices({20, 10, 30, 15, 5});
    const std::vector<ChunkPart> parts = Divide(slices, by, first, homes);
    ExpectSound(slices, by, parts);
    return RowsByMember(parts, 3);
  };
  EXPECT_EQ(divide(limits, 0), (std::vector<int64_t>{15, 15, 50}));
  EXPECT_EQ(divide(limits, 1), (std::vector<int64_t>{15, 15, 50}));
  const DivisionLimits few{.members = 3, .member_rows = 80, .least_rows = 100};
  EXPECT_EQ(divide(few, 1), (std::vector<int64_t>{0, 0, 80})) << "at home";
  homes = {-1, -1, -1, -1, -1};
  EXPECT_EQ(divide(few, 1), (std::vector<int64_t>{0, 80, 0}));
  homes = {1, 1, 1, 1, 1};
  EXPECT_EQ(divide(limits, 0), (std::vector<int64_t>{0, 80, 0})) << "in two parts";
}

// ---- Grids ----
// Heads with several replicas, each of which divides the classes among its members: what each member keeps,
// what a step leaves, and who computes which rows. What they compute is compared with the reference in
// conformance_test.

constexpr int kGridMembers = 6;
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
    auto members = CreateCpuMembers({.threads = 1, .workspace_bytes = 1 << 20}, kGridMembers);
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

  Replica Of(int member) const { return {member, kGridMembers}; }
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
  ASSERT_EQ(parts_.size(), static_cast<size_t>(kGridMembers));
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
    for (int member = 0; member < kGridMembers; ++member) {
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
    for (int member = 0; member < kGridMembers; ++member) {
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
      for (int member = 0; member < kGridMembers; ++member) {
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
      for (int member = 0; role == Role::kValue && member < kGridMembers; ++member) {
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
  spec_.config.replicas = kGridMembers;
  const Problem problem = MakeProblem(spec_, rng_);
  const auto head = MakeHead(*group_, problem);
  ASSERT_NE(head, nullptr);
  EXPECT_EQ(head->Describe()[1].choice, "6, by rows");
  EXPECT_EQ(head->chunk_rows(), kGridMembers * head->slice_rows());
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
  auto members = CreateCpuMembers({.threads = 1}, kGridMembers);
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
}  // namespace lossd::kernels::testing::division_test
