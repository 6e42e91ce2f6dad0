// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/kernels/loss_rows.h"

#include <vector>

#include "gtest/gtest.h"

namespace lossd::kernels::cuda::loss_rows_test {
namespace {

TEST(LossTerms, AreGeneralIfAnyOptionNeedsIt) {
  const float values[1] = {1.0f};
  EXPECT_FALSE((LossTerms{.vocab = 10, .scale = 0.5f, .z_loss = 1e-4f}).IsGeneral());
  EXPECT_TRUE((LossTerms{.bias = values}).IsGeneral());
  EXPECT_TRUE((LossTerms{.class_weights = values}).IsGeneral());
  EXPECT_TRUE((LossTerms{.scale = -1.0f}).IsGeneral());
  EXPECT_TRUE((LossTerms{.softcap = 30.0f}).IsGeneral());
  EXPECT_TRUE((LossTerms{.smoothing = 0.1f}).IsGeneral());
  EXPECT_TRUE((LossTerms{.want_entropy = true}).IsGeneral());
  EXPECT_TRUE((LossTerms{.any_coef_entropy = true}).IsGeneral());
  EXPECT_FALSE((LossTerms{.objective = {.kind = ObjectiveKind::kPpo, .clip_high = 0.2f}}).IsGeneral());
  EXPECT_TRUE((LossTerms{.objective = {.kind = ObjectiveKind::kPpo, .entropy_bonus = 0.1f}}).IsGeneral());
}

TEST(LossTerms, NeedEntropiesAsResultsOrForGradients) {
  EXPECT_FALSE(LossTerms().NeedsEntropy());
  EXPECT_TRUE((LossTerms{.want_entropy = true}).NeedsEntropy());
  EXPECT_TRUE((LossTerms{.any_coef_entropy = true}).NeedsEntropy());
}

TEST(LossTerms, CountClassesFromTheFirstOfABlock) {
  const float values[16] = {};
  const LossTerms terms = {.vocab = 16, .bias = values, .class_weights = values + 1};
  EXPECT_EQ(terms.From(8).bias, values + 8);
  EXPECT_EQ(terms.From(8).class_weights, values + 9);
  EXPECT_EQ(terms.From(8).vocab, 16);
  EXPECT_EQ((LossTerms{.vocab = 16}).From(8).bias, nullptr);
  EXPECT_EQ((LossTerms{.vocab = 16}).From(8).class_weights, nullptr);
}

TEST(RowInputs, ABlockHasTheRowsThatExist) {
  const std::vector<float> floats(24);
  const std::vector<int32_t> targets(24);
  const float* const f = floats.data();
  const RowInputs in = {.rows = 20,
                        .padded_rows = 24,
                        .targets = targets.data(),
                        .target_dots = f,
                        .weights = f,
                        .coef_loss = f,
                        .coef_lse = f,
                        .coef_entropy = f,
                        .advantages = f,
                        .old_logprobs = f,
                        .ref_logprobs = f};
  const RowInputs whole = in.Block(8, 8), last = in.Block(16, 8);
  EXPECT_EQ(whole.rows, 8);
  EXPECT_EQ(last.rows, 4);
  EXPECT_EQ(last.padded_rows, 8);
  EXPECT_EQ(last.targets, targets.data() + 16);
  for (const float* values : {last.target_dots, last.weights, last.coef_loss, last.coef_lse,
                              last.coef_entropy, last.advantages, last.old_logprobs, last.ref_logprobs}) {
    EXPECT_EQ(values, f + 16);
  }
  RowInputs without = in;
  without.advantages = without.old_logprobs = without.ref_logprobs = nullptr;
  EXPECT_EQ(without.Block(8, 8).old_logprobs, nullptr);
}

TEST(RowResults, FromARowOn) {
  std::vector<float> floats(8);
  std::vector<int32_t> argmax(8);
  float* const f = floats.data();
  const RowResults out = RowResults{f, f + 1, f + 2, f + 3, f + 4, argmax.data()}.From(3);
  EXPECT_EQ(out.loss, f + 3);
  EXPECT_EQ(out.z_loss_part, f + 4);
  EXPECT_EQ(out.lse, f + 5);
  EXPECT_EQ(out.entropy, f + 6);
  EXPECT_EQ(out.target_logprob, f + 7);
  EXPECT_EQ(out.argmax, argmax.data() + 3);
}

}  // namespace
}  // namespace lossd::kernels::cuda::loss_rows_test
