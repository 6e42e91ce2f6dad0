// SPDX-License-Identifier: Apache-2.0
#include "examples/ngram_lm/model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "tests/examples/random_seed.h"

namespace lossd::ngram_lm::model_test {
namespace {

constexpr StageOneShape kShape{.tokens = 11, .context = 3, .embedding = 5, .hidden = 7, .output = 4};
constexpr int64_t kRows = 6;

class StageOneTest : public testing::Test {
 protected:
  StageOneTest() : random_(FreshSeed()), model_(kShape, random_()) {
    for (float& p : model_.parameters()) p += 0.1f * normal_(random_);  // biases too
    for (int64_t i = 0; i < kRows * kShape.context; ++i) {
      activations_.contexts.push_back(static_cast<int32_t>(random_() % kShape.tokens));
    }
    direction_.resize(kRows * kShape.output);
    for (float& g : direction_) g = normal_(random_);
  }

  // direction . output, in double precision: a scalar whose gradient Backward must give.
  double Objective() {
    model_.Forward(&activations_);
    double sum = 0;
    for (size_t i = 0; i < direction_.size(); ++i) {
      sum += static_cast<double>(direction_[i]) * activations_.output[i];
    }
    return sum;
  }

  std::mt19937_64 random_;
  std::normal_distribution<float> normal_;
  StageOne model_;
  Activations activations_;
  std::vector<float> direction_;
};

TEST_F(StageOneTest, GradientsAgreeWithFiniteDifferences) {
  Objective();
  model_.Backward(activations_, direction_);
  const std::vector<float> gradients(model_.gradients().begin(), model_.gradients().end());
  ASSERT_EQ(gradients.size(), 11 * 5 + 7 * 15 + 7 + 4 * 7 + 4);
  constexpr float kStep = 1e-2f;
  for (size_t i = 0; i < gradients.size(); ++i) {
    float& parameter = model_.parameters()[i];
    const float before = parameter;
    parameter = before + kStep;
    const double above = Objective();
    const double up = static_cast<double>(parameter) - before;
    parameter = before - kStep;
    const double below = Objective();
    const double down = static_cast<double>(before) - parameter;
    parameter = before;
    const double expected = (above - below) / (up + down);
    // Rounding of fp32 sums over the step, and the third derivative times its square.
    EXPECT_NEAR(gradients[i], expected, 5e-3 * (1 + std::abs(expected))) << "parameter " << i;
  }
}

TEST_F(StageOneTest, BackwardAddsAndZeroGradientsClears) {
  Objective();
  model_.Backward(activations_, direction_);
  const std::vector<float> once(model_.gradients().begin(), model_.gradients().end());
  model_.Backward(activations_, direction_);
  for (size_t i = 0; i < once.size(); ++i) EXPECT_NEAR(model_.gradients()[i], 2 * once[i], 1e-4) << i;
  EXPECT_GT(*std::max_element(once.begin(), once.end()), 0);
  model_.ZeroGradients();
  for (float g : model_.gradients()) EXPECT_EQ(g, 0);
}

TEST_F(StageOneTest, RowsAreIndependent) {
  Objective();
  Activations last;
  last.contexts.assign(activations_.contexts.end() - kShape.context, activations_.contexts.end());
  model_.Forward(&last);
  for (int64_t i = 0; i < kShape.output; ++i) {
    EXPECT_NEAR(last.output[i], activations_.output[(kRows - 1) * kShape.output + i], 1e-5);
  }
}

TEST(StageOneInitTest, HiddenStatesStartNearUnitVariance) {
  const StageOneShape shape{.tokens = 500, .context = 8, .embedding = 32, .hidden = 128, .output = 64};
  StageOne model(shape, FreshSeed());
  Activations activations;
  for (int i = 0; i < 200 * 8; ++i) activations.contexts.push_back(i * 7 % 500);
  model.Forward(&activations);
  double squares = 0;
  for (float x : activations.output) squares += static_cast<double>(x) * x;
  const double variance = squares / static_cast<double>(activations.output.size());
  EXPECT_GT(variance, 0.4);
  EXPECT_LT(variance, 2.5);
}

}  // namespace
}  // namespace lossd::ngram_lm::model_test
