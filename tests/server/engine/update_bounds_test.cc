// SPDX-License-Identifier: Apache-2.0
#include "server/engine/update_bounds.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace lossd::engine::update_bounds_test {
namespace {

using kernels::OptimizerOptions;
using ::testing::HasSubstr;
using Kind = OptimizerOptions::Kind;

// Of weights of which nothing is known, unless said otherwise.
UpdateReach ReachOf(const OptimizerOptions& options, int64_t update = 1, double norm = 1.0,
                    const Magnitudes& before = {}) {
  EXPECT_TRUE(CheckOptionsFit(options, update).ok());
  const absl::StatusOr<Reach> reach = CheckReach(options, update, norm, before);
  EXPECT_TRUE(reach.ok()) << reach.status();
  return reach.ok() ? reach->reach : UpdateReach::kUnknown;
}

bool IsRefused(const OptimizerOptions& options, double norm) {
  return !CheckReach(options, 1, norm, {}).ok();
}

constexpr Magnitudes kMeasured{.matrix = 10.0, .vectors = 10.0, .moment1 = 100.0, .moment2 = 1e4};

// These take no look at the weights, so they cost nothing.
TEST(UpdateBoundsTest, OptionsOfTrainingAreBounded) {
  for (const int64_t update : {1, 2, 1000, 1 << 30}) {
    EXPECT_EQ(ReachOf({}, update), UpdateReach::kBounded);
    EXPECT_EQ(ReachOf({.learning_rate = 0.0}, update), UpdateReach::kBounded);
    EXPECT_EQ(ReachOf({.learning_rate = 0.1, .weight_decay = 0.1, .beta1 = 0.9, .beta2 = 0.95}, update, 1e6),
              UpdateReach::kBounded);
    EXPECT_EQ(ReachOf({.learning_rate = 1.0, .grad_multiplier = 1.0 / 65536, .epsilon = 1e-15}, update, 1e9),
              UpdateReach::kBounded);
    EXPECT_EQ(ReachOf({.kind = Kind::kSgd,
                       .learning_rate = 0.5,
                       .weight_decay = 1e-4,
                       .momentum = 0.9,
                       .nesterov = true},
                      update, 1e6, kMeasured),
              UpdateReach::kBounded);
  }
}

TEST(UpdateBoundsTest, UnusualOptionsAreLookedAt) {
  EXPECT_EQ(ReachOf({.epsilon = 0.0}), UpdateReach::kUnknown) << "a moment of 0 whose square was too small";
  EXPECT_EQ(ReachOf({.epsilon = 1e-60}), UpdateReach::kUnknown) << "0 in fp32";
  EXPECT_EQ(ReachOf({.epsilon = 1e-40}), UpdateReach::kUnknown) << "subnormal";
  EXPECT_EQ(ReachOf({.learning_rate = 3.0, .weight_decay = 1.0}), UpdateReach::kUnknown);
  EXPECT_EQ(ReachOf({.learning_rate = 1e20, .epsilon = 1e-15}), UpdateReach::kUnknown);
  EXPECT_EQ(ReachOf({.kind = Kind::kSgd, .learning_rate = 0.1, .momentum = 1e36}, 2, 1e8, kMeasured),
            UpdateReach::kUnknown);
  EXPECT_EQ(ReachOf({.kind = Kind::kSgd, .learning_rate = 1.0, .momentum = 0.9, .dampening = 1e30}, 2, 1e8),
            UpdateReach::kUnknown);
}

// What a head holds decides where the options alone do not.
TEST(UpdateBoundsTest, MagnitudesAreCounted) {
  const OptimizerOptions grows{.learning_rate = 3.0, .weight_decay = 1.0};
  EXPECT_EQ(ReachOf(grows, 1, 1.0, kMeasured), UpdateReach::kBounded);
  EXPECT_EQ(ReachOf(grows, 1, 1.0, {.matrix = 3e37, .vectors = 0.0}), UpdateReach::kUnknown);
  const OptimizerOptions decays{.kind = Kind::kSgd, .learning_rate = 0.1, .weight_decay = 0.1};
  EXPECT_EQ(ReachOf(decays), UpdateReach::kUnknown) << "a weight may be infinite";
  EXPECT_EQ(ReachOf(decays, 1, 1.0, kMeasured), UpdateReach::kBounded);
  // A buffer that was filled by large gradients, and a learning rate that small ones invite.
  const OptimizerOptions steep{.kind = Kind::kSgd, .learning_rate = 1e38, .momentum = 0.9};
  EXPECT_EQ(ReachOf(steep, 2, 1e-18, {.moment1 = 1e18}), UpdateReach::kUnknown);
  EXPECT_EQ(ReachOf(steep, 2, 1e-18), UpdateReach::kBounded) << "an empty one";
  EXPECT_EQ(ReachOf({}, 2, 1.0, {.moment1 = 1e37}), UpdateReach::kUnknown);
  EXPECT_EQ(ReachOf({}, 2, 1.0, {.moment2 = 3.3e38}), UpdateReach::kUnknown);
}

TEST(UpdateBoundsTest, WhatIsBoundedSaysHowLargeItIs) {
  const OptimizerOptions options{.kind = Kind::kSgd, .learning_rate = 0.5, .momentum = 0.5};
  const auto reach = CheckReach(options, 2, 8.0, kMeasured);
  ASSERT_TRUE(reach.ok()) << reach.status();
  EXPECT_NEAR(reach->after.moment1, 58.0, 1e-3);
  EXPECT_NEAR(reach->after.matrix, 39.0, 1e-3);
  EXPECT_EQ(reach->after.moment2, 1e4);
}

// -infinity in a bias keeps a class out; decay by SGD makes it NaN, as does a factor of 0.
TEST(UpdateBoundsTest, DecayOfInfiniteValuesIsRefused) {
  const Magnitudes masked{.matrix = 1.0};
  OptimizerOptions sgd{.kind = Kind::kSgd, .learning_rate = 0.1, .weight_decay = 0.1};
  EXPECT_TRUE(CheckDecay(sgd, masked).ok());
  sgd.decay_vectors = true;
  EXPECT_TRUE(CheckDecay(sgd, kMeasured).ok());
  EXPECT_THAT(std::string(CheckDecay(sgd, masked).message()), HasSubstr("optimizer.decay_vectors"));
  EXPECT_THAT(std::string(CheckDecay(sgd, {.vectors = 1.0}).message()),
              HasSubstr("optimizer.sgd.weight_decay"));
  OptimizerOptions adamw{.learning_rate = 0.1, .weight_decay = 0.1, .decay_vectors = true};
  EXPECT_TRUE(CheckDecay(adamw, masked).ok());
  adamw.weight_decay = 10.0;
  EXPECT_FALSE(CheckDecay(adamw, masked).ok());
  EXPECT_THAT(std::string(CheckDecay(adamw, {.vectors = 1.0}).message()),
              HasSubstr("optimizer.adamw.weight_decay"));
}

TEST(UpdateBoundsTest, WhatMustOverflowIsRefused) {
  EXPECT_TRUE(IsRefused({.learning_rate = 1e31}, 1.0));
  EXPECT_TRUE(IsRefused({.grad_multiplier = 1e15}, 1e5));
  EXPECT_FALSE(IsRefused({.grad_multiplier = 1e15}, 1e3));
  EXPECT_TRUE(IsRefused({.kind = Kind::kSgd, .learning_rate = 1e20}, 1e11));
  EXPECT_TRUE(IsRefused({.kind = Kind::kSgd, .learning_rate = 1e-30, .grad_multiplier = 1e30}, 1e9));
  EXPECT_FALSE(CheckOptionsFit({.learning_rate = 3e38, .beta1 = 0.9999}, 1).ok());
  EXPECT_FALSE(CheckOptionsFit({.learning_rate = 1e20, .weight_decay = 1e20}, 1).ok());
}

}  // namespace
}  // namespace lossd::engine::update_bounds_test
