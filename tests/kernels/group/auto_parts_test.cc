// SPDX-License-Identifier: Apache-2.0
// By rows, each member decides for its part of a chunk whether to sample (Gradients::kAuto). What all parts
// together then have of error is within the limit: the predicted error of the chunk, and what comes out.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "tests/kernels/chunk_run.h"
#include "tests/kernels/group/member_group.h"
#include "tests/kernels/problem.h"

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
