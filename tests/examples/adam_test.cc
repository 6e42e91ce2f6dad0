// SPDX-License-Identifier: Apache-2.0
#include "examples/ngram_lm/adam.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "tests/examples/random_seed.h"

namespace lossd::ngram_lm::adam_test {
namespace {

// Algorithm 1 of the paper, word for word, in double precision.
struct Reference {
  double m = 0, v = 0, parameter = 0;
  int t = 0;

  void Step(double learning_rate, double g, const Adam::Options& o) {
    ++t;
    m = o.beta1 * m + (1 - o.beta1) * g;
    v = o.beta2 * v + (1 - o.beta2) * g * g;
    const double m_hat = m / (1 - std::pow(o.beta1, t));
    const double v_hat = v / (1 - std::pow(o.beta2, t));
    parameter -= learning_rate * m_hat / (std::sqrt(v_hat) + o.epsilon);
  }
};

TEST(AdamTest, FollowsTheReference) {
  std::mt19937_64 random(FreshSeed());
  std::normal_distribution<float> normal;
  constexpr size_t kSize = 37;
  const Adam::Options options{.beta1 = 0.8f, .beta2 = 0.97f, .epsilon = 1e-3f};
  Adam adam(kSize, options);
  std::vector<Reference> reference(kSize);
  std::vector<float> parameters(kSize), gradients(kSize);
  for (size_t i = 0; i < kSize; ++i) reference[i].parameter = parameters[i] = normal(random);
  for (int step = 0; step < 50; ++step) {
    const float rate = 0.01f * static_cast<float>(step % 7);
    for (size_t i = 0; i < kSize; ++i) {
      gradients[i] = normal(random);
      reference[i].Step(rate, gradients[i], options);
    }
    adam.Step(rate, gradients, absl::MakeSpan(parameters));
  }
  // fp32 against double over 50 steps of at most 0.06 each.
  for (size_t i = 0; i < kSize; ++i) EXPECT_NEAR(parameters[i], reference[i].parameter, 2e-5) << i;
}

TEST(AdamTest, FirstStepHasTheSizeOfTheLearningRate) {
  Adam adam(2, {});
  std::vector<float> parameters = {1, 1};
  adam.Step(0.25f, {3e-3f, -40}, absl::MakeSpan(parameters));
  EXPECT_NEAR(parameters[0], 0.75, 1e-5);
  EXPECT_NEAR(parameters[1], 1.25, 1e-5);
}

TEST(AdamTest, GoesOnFromAState) {
  std::mt19937_64 random(FreshSeed());
  std::normal_distribution<float> normal;
  constexpr size_t kSize = 5;
  Adam adam(kSize, Adam::Options{});
  std::vector<float> parameters(kSize), gradients(kSize);
  const auto step = [&gradients](Adam& optimizer, std::vector<float>& values) {
    optimizer.Step(0.1f, gradients, absl::MakeSpan(values));
  };
  for (float& g : gradients) g = normal(random);
  for (int i = 0; i < 3; ++i) step(adam, parameters);
  Adam other(kSize, Adam::Options{});
  other.Restore(adam.state());
  std::vector<float> other_parameters = parameters;
  for (float& g : gradients) g = normal(random);
  step(adam, parameters);
  step(other, other_parameters);
  EXPECT_EQ(parameters, other_parameters);
  EXPECT_EQ(other.state().steps, 4);
}

}  // namespace
}  // namespace lossd::ngram_lm::adam_test
