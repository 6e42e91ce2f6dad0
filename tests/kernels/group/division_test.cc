// SPDX-License-Identifier: Apache-2.0
// Tests of how a group divides a chunk (group_chunk.h): the parts, and the decision about sampling in each
// part.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "kernels/group/group_chunk.h"
#include "tests/kernels/chunk_run.h"
#include "tests/kernels/group/member_group.h"
#include "tests/kernels/problem.h"

// ---- Decisions of the parts ----
// By rows, each member decides for its part of a chunk whether to sample (Gradients::kAuto). What all parts
// together then have of error is within the limit: the predicted error of the chunk, and what comes out.

namespace lossd::kernels::testing::auto_parts_test {
namespace {

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

}  // namespace
}  // namespace lossd::kernels::testing::auto_parts_test

// ---- Divisions ----
// Divisions of random chunks have the properties that group_chunk.h promises.

namespace lossd::kernels::division_test {
namespace {

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

}  // namespace
}  // namespace lossd::kernels::division_test
