// SPDX-License-Identifier: Apache-2.0
// Tests of the demo's model: the text as tokens, Adam, and the gradients of stage one.
#include "examples/ngram_lm/model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/support/temp_folder.h"

namespace lossd::ngram_lm::model_test {
namespace {

using ::testing::ElementsAre;

// ---- Text ----

TEST(SplitWordsTest, CutsWordsAndCharactersWithTheSpaceBefore) {
  EXPECT_THAT(SplitWords("a bc12, d"), ElementsAre("a", " bc12", ",", " d"));
  EXPECT_THAT(SplitWords("x\n\n   y "), ElementsAre("x", "\n", "\n", "  ", " y", " "));
  EXPECT_THAT(SplitWords("\xC3\xA9t\xC3\xA9->"), ElementsAre("\xC3\xA9t\xC3\xA9", "-", ">"));
}

TEST(SplitWordsTest, CoversRandomBytes) {
  std::mt19937_64 random(1);
  std::string bytes(5000, '\0');
  for (char& c : bytes) c = static_cast<char>(random());
  EXPECT_EQ(absl::StrJoin(SplitWords(bytes), ""), bytes);
}

TEST(TokenizeTest, FrequentWordsHaveTokensByFrequency) {
  std::string text;  // 4000 words: "a" half of them, "b" a quarter, the others once each
  for (int i = 0; i < 1000; ++i) absl::StrAppend(&text, " a b a w", i);
  const auto tokens = Tokenize(text, 3);
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  EXPECT_EQ(tokens->vocab_size, 3);
  EXPECT_EQ(tokens->train.size(), 3800);
  EXPECT_THAT(tokens->held_out, testing::SizeIs(200)) << "a twentieth";
  EXPECT_THAT(std::vector<int32_t>(tokens->train.begin(), tokens->train.begin() + 4),
              ElementsAre(1, 2, 1, 0));
  EXPECT_THAT(std::vector<int32_t>(tokens->held_out.begin(), tokens->held_out.begin() + 4),
              ElementsAre(1, 2, 1, 0));
}

TEST(TokenizeTest, FewWordsMakeASmallVocabulary) {
  std::string text;
  for (int i = 0; i < 1000; ++i) absl::StrAppend(&text, " w", i % 10);
  const auto tokens = Tokenize(text, 100);
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  EXPECT_EQ(tokens->vocab_size, 11);
  EXPECT_THAT(tokens->train, testing::Each(testing::AllOf(testing::Ge(1), testing::Le(10))));
}

TEST(TokenizeTest, RefusesShortTextsAndEmptyVocabularies) {
  EXPECT_EQ(Tokenize("one two", 100).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Tokenize(std::string(5000, '.'), 1).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(LoadTextTest, JoinsFilesInTheOrderOfTheirPaths) {
  test::TempFolder folder;
  test::WriteWholeFile(folder.File("2.txt"), std::string(600, 'b'));
  test::WriteWholeFile(folder.File("1.txt"), std::string(600, '.'));
  test::WriteWholeFile(folder.File("3.txt"), std::string(600, '.'));
  const auto text = LoadText(folder.File("*.txt"), 8);
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_EQ(text->train.size() + text->held_out.size(), 1201) << "600 points, a word, 600 points";
  EXPECT_EQ(LoadText(folder.File("*.missing"), 8).status().code(), absl::StatusCode::kNotFound);
}

TEST(UnigramEntropyTest, AddsOneToEveryCount) {
  // Counts 3, 1, 0 plus one each: probabilities 4/7, 2/7, 1/7.
  EXPECT_NEAR(UnigramEntropy({{0, 0, 0, 1}, {0, 2}, 3}), -(std::log(4.0 / 7) + std::log(1.0 / 7)) / 2, 1e-12);
  EXPECT_NEAR(UnigramEntropy({{}, {1}, 8}), std::log(8.0), 1e-12);
}

// ---- Adam ----

// Algorithm 1 of the paper, word for word, in double precision.
struct ReferenceAdam {
  double m = 0, v = 0, parameter = 0;
  int t = 0;

  void Step(double learning_rate, double g) {
    ++t;
    m = 0.9 * m + 0.1 * g;
    v = 0.99 * v + 0.01 * g * g;
    const double m_hat = m / (1 - std::pow(0.9, t));
    const double v_hat = v / (1 - std::pow(0.99, t));
    parameter -= learning_rate * m_hat / (std::sqrt(v_hat) + 1e-8);
  }
};

TEST(AdamTest, FollowsTheReference) {
  std::mt19937_64 random(2);
  std::normal_distribution<float> normal;
  constexpr size_t kSize = 37;
  Adam adam(kSize);
  std::vector<ReferenceAdam> reference(kSize);
  std::vector<float> parameters(kSize), gradients(kSize);
  for (size_t i = 0; i < kSize; ++i) reference[i].parameter = parameters[i] = normal(random);
  for (int step = 0; step < 50; ++step) {
    const float rate = 0.01f * static_cast<float>(step % 7);
    for (size_t i = 0; i < kSize; ++i) {
      gradients[i] = normal(random);
      reference[i].Step(rate, gradients[i]);
    }
    adam.Step(rate, gradients, absl::MakeSpan(parameters));
  }
  EXPECT_EQ(adam.steps, 50);
  // fp32 against double over 50 steps of at most 0.06 each.
  for (size_t i = 0; i < kSize; ++i) EXPECT_NEAR(parameters[i], reference[i].parameter, 2e-5) << i;
}

// ---- Stage one ----

constexpr StageOneShape kShape{.tokens = 11, .context = 3, .embedding = 5, .hidden = 7, .output = 4};

class StageOneTest : public testing::Test {
 protected:
  StageOneTest() : random_(3), model_(kShape, 4), direction_(positions_.size() * kShape.output) {
    for (float& p : model_.parameters()) p += 0.1f * normal_(random_);  // biases too
    for (int i = 0; i < 30; ++i) tokens_.push_back(static_cast<int32_t>(random_() % kShape.tokens));
    for (float& g : direction_) g = normal_(random_);
  }

  // direction . output, in double precision: a scalar whose gradient Backward must give.
  double Objective() {
    activations_ = model_.Forward(tokens_, positions_);
    double sum = 0;
    for (size_t i = 0; i < direction_.size(); ++i)
      sum += static_cast<double>(direction_[i]) * activations_.output[i];
    return sum;
  }

  std::mt19937_64 random_;
  std::normal_distribution<float> normal_;
  StageOne model_;
  std::vector<int32_t> tokens_;
  const std::vector<int64_t> positions_ = {3, 29, 17, 4, 4, 11};
  std::vector<float> direction_;
  Activations activations_;
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

TEST_F(StageOneTest, RowsAreIndependentAndHaveTheirContexts) {
  Objective();
  EXPECT_THAT(std::vector<int32_t>(activations_.contexts.begin(), activations_.contexts.begin() + 3),
              ElementsAre(tokens_[0], tokens_[1], tokens_[2]));
  EXPECT_EQ(activations_.targets[1], tokens_[29]);
  const Activations last = model_.Forward(tokens_, {positions_.back()});
  for (int64_t i = 0; i < kShape.output; ++i)
    EXPECT_NEAR(last.output[i], activations_.output[5 * kShape.output + i], 1e-5);
}

TEST(StageOneInitTest, HiddenStatesStartNearUnitVariance) {
  const StageOneShape shape{.tokens = 500, .context = 8, .embedding = 32, .hidden = 128, .output = 64};
  std::vector<int32_t> tokens;
  for (int i = 0; i < 1700; ++i) tokens.push_back(i * 7 % 500);
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < 200; ++i) positions.push_back(8 + 8 * i);
  double squares = 0;
  const Activations activations = StageOne(shape, 5).Forward(tokens, positions);
  for (float x : activations.output) squares += static_cast<double>(x) * x;
  const double variance = squares / static_cast<double>(activations.output.size());
  EXPECT_GT(variance, 0.4);
  EXPECT_LT(variance, 2.5);
}

}  // namespace
}  // namespace lossd::ngram_lm::model_test
