// SPDX-License-Identifier: Apache-2.0
// What ranks send each other is what they had, field by field. The structured bindings name all fields of a
// type: one that is added has to be added here, and so to the messages.
#include "server/ranks/messages.h"

#include <gtest/gtest.h>

namespace lossd::ranks::messages_test {
namespace {

TEST(RankMessagesTest, HeadConfig) {
  const kernels::HeadConfig config = {.hidden_size = 3,
                                      .vocab_size = 5,
                                      .has_bias = true,
                                      .has_class_weights = true,
                                      .norm = kernels::Norm::kRmsNorm,
                                      .norm_epsilon = 0.25f,
                                      .compute_dtype = kernels::DType::kBFloat16,
                                      .optimizer_state = kernels::OptimizerState::kNone,
                                      .trainable = false,
                                      .logits = kernels::Logits::kRecomputed,
                                      .gradients = kernels::Gradients::kAuto,
                                      .workspace_bytes = 7,
                                      .split = kernels::Split::kVocabulary,
                                      .shares = {3, 0, 1},
                                      .replicas = 2};
  const kernels::HeadConfig none;
  const auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o] = config;
  const auto& [a0, b0, c0, d0, e0, f0, g0, h0, i0, j0, k0, l0, m0, n0, o0] = none;
  EXPECT_TRUE(a != a0 && b != b0 && c != c0 && d != d0 && e != e0 && f != f0 && g != g0 && h != h0 &&
              i != i0 && j != j0 && k != k0 && l != l0 && m != m0 && n != n0 && o != o0)
      << "a field that is lost shows";
  const auto back = FromProto(ToProto(config));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(*back, config);
  v1::HeadConfig wrong = ToProto(config);
  wrong.set_split(3);
  EXPECT_EQ(FromProto(wrong).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(RankMessagesTest, OptionsOfStepsAndLosses) {
  const kernels::OptimizerOptions step = {.kind = kernels::OptimizerOptions::Kind::kSgd,
                                          .learning_rate = 2,
                                          .weight_decay = 3,
                                          .decay_vectors = true,
                                          .grad_multiplier = 4,
                                          .beta1 = 5,
                                          .beta2 = 6,
                                          .epsilon = 7,
                                          .momentum = 8,
                                          .dampening = 9,
                                          .nesterov = true};
  const kernels::OptimizerOptions no_step;
  {
    const auto& [a, b, c, d, e, f, g, h, i, j, k] = step;
    const auto& [a0, b0, c0, d0, e0, f0, g0, h0, i0, j0, k0] = no_step;
    EXPECT_TRUE(a != a0 && b != b0 && c != c0 && d != d0 && e != e0 && f != f0 && g != g0 && h != h0 &&
                i != i0 && j != j0 && k != k0);
  }
  EXPECT_EQ(*FromProto(ToProto(step, 11)), step);
  EXPECT_EQ(ToProto(step, 11).update(), 11);
  const kernels::LossOptions loss = {.logit_scale = 2,
                                     .softcap = 3,
                                     .label_smoothing = 0.5f,
                                     .z_loss = 4,
                                     .use_class_weights = true,
                                     .gradients = kernels::Gradients::kSampled,
                                     .filter_epsilon = 5,
                                     .sample_threshold = 6,
                                     .max_gradient_error = 7};
  const kernels::LossOptions no_loss;
  {
    const auto& [a, b, c, d, e, f, g, h, i] = loss;
    const auto& [a0, b0, c0, d0, e0, f0, g0, h0, i0] = no_loss;
    EXPECT_TRUE(a != a0 && b != b0 && c != c0 && d != d0 && e != e0 && f != f0 && g != g0 && h != h0 &&
                i != i0);
  }
  EXPECT_EQ(*FromProto(ToProto(loss)), loss);
}

TEST(RankMessagesTest, SumsOfSlices) {
  const kernels::SliceSums sums = {.loss = 1,
                                   .z_loss = 2,
                                   .entropy = 3,
                                   .dropped_mass = 4,
                                   .sampling_variance = 5,
                                   .squared_gradient = 6,
                                   .valid_rows = 7,
                                   .correct_rows = 8};
  const kernels::SliceSums back = FromProto(ToProto(sums));
  const auto& [a, b, c, d, e, f, g, h] = back;
  EXPECT_TRUE(a == 1 && b == 2 && c == 3 && d == 4 && e == 5 && f == 6 && g == 7 && h == 8);
}

}  // namespace
}  // namespace lossd::ranks::messages_test
