// SPDX-License-Identifier: Apache-2.0
#include "server/engine/update_bounds.h"

#include <gtest/gtest.h>

#include <cmath>

namespace lossd::engine::update_bounds_test {
namespace {

using kernels::OptimizerOptions;
using Kind = OptimizerOptions::Kind;

UpdateReach ReachOf(const OptimizerOptions& options, int64_t update = 1, double norm = 1.0) {
  UpdateReach reach = UpdateReach::kUnknown;
  EXPECT_TRUE(CheckOptionsFit(options, update).ok());
  const absl::Status status = CheckReach(options, update, norm, &reach);
  EXPECT_TRUE(status.ok()) << status;
  return reach;
}

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
                      update, 1e6),
              UpdateReach::kBounded);
  }
}

TEST(UpdateBoundsTest, UnusualOptionsAreLookedAt) {
  EXPECT_EQ(ReachOf({.epsilon = 0.0}), UpdateReach::kUnknown) << "a moment of 0 whose square was too small";
  EXPECT_EQ(ReachOf({.epsilon = 1e-60}), UpdateReach::kUnknown) << "0 in fp32";
  EXPECT_EQ(ReachOf({.beta1 = 0.99, .beta2 = 0.9}), UpdateReach::kUnknown);
  EXPECT_EQ(ReachOf({.learning_rate = 3.0, .weight_decay = 1.0}), UpdateReach::kUnknown);
  EXPECT_EQ(ReachOf({.kind = Kind::kSgd, .learning_rate = 0.1, .momentum = 1.5}), UpdateReach::kUnknown);
  EXPECT_EQ(ReachOf({.kind = Kind::kSgd, .learning_rate = 0.1, .momentum = 0.9, .dampening = -3.0}),
            UpdateReach::kUnknown);
  EXPECT_EQ(ReachOf({.kind = Kind::kSgd, .learning_rate = 1e10}, 1, 1e15), UpdateReach::kUnknown);
}

TEST(UpdateBoundsTest, WhatMustOverflowIsRefused) {
  UpdateReach reach = UpdateReach::kBounded;
  EXPECT_FALSE(CheckReach({.learning_rate = 1e31}, 1, 1.0, &reach).ok());
  EXPECT_FALSE(CheckReach({.grad_multiplier = 1e15}, 1, 1e5, &reach).ok());
  EXPECT_TRUE(CheckReach({.grad_multiplier = 1e15}, 1, 1e4, &reach).ok());
  EXPECT_FALSE(CheckReach({.kind = Kind::kSgd, .learning_rate = 1e20}, 1, 1e11, &reach).ok());
  EXPECT_FALSE(
      CheckReach({.kind = Kind::kSgd, .learning_rate = 1e-30, .grad_multiplier = 1e30}, 1, 1e9, &reach).ok());
  EXPECT_FALSE(CheckOptionsFit({.learning_rate = 3e38, .beta1 = 0.9999}, 1).ok());
  EXPECT_FALSE(CheckOptionsFit({.learning_rate = 1e20, .weight_decay = 1e20}, 1).ok());
}

}  // namespace
}  // namespace lossd::engine::update_bounds_test
