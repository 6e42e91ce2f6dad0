// SPDX-License-Identifier: Apache-2.0
#include "server/messages/convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/errors/field_error.h"

namespace lossd::messages::convert_test {
namespace {

using ::testing::ElementsAre;

std::string FieldOf(const absl::Status& status) {
  return errors::GetFieldViolation(status).value_or(errors::FieldViolation()).field;
}

TEST(ConvertTest, StreamSpecTakesEveryField) {
  v1::OpenMicrobatch open;
  open.set_head("h");
  open.set_step(4);
  open.set_microbatch_id(5);
  open.set_microbatch_rows(10);
  open.mutable_rows()->set_begin(2);
  open.mutable_rows()->set_end(4);
  open.set_hidden_dtype(v1::DTYPE_FP16);
  open.mutable_options()->set_ignore_index(-7);
  open.mutable_options()->set_label_smoothing(0.1f);
  open.mutable_options()->set_z_loss(0.2f);
  open.mutable_options()->set_softcap(3.0f);
  open.mutable_options()->set_logit_scale(0.5f);
  open.mutable_options()->set_use_class_weights(true);
  open.mutable_options()->set_gradients(v1::GRADIENTS_AUTO);
  open.mutable_options()->set_filter_epsilon(0.25f);
  open.mutable_options()->set_sample_threshold(0.125f);
  open.mutable_options()->set_max_gradient_error(0.5f);
  open.set_reduction(v1::REDUCTION_MEAN);
  open.set_normalizer(8.0);
  open.set_grad_output(2.0f);
  open.set_want_grad_hidden(true);
  open.set_accumulate_gradients(true);
  open.set_want_row_lse(true);
  open.set_want_row_argmax(true);
  open.add_targets(1);
  open.add_targets(-7);
  open.add_row_weights(1.5f);
  open.add_row_weights(2.5f);
  const auto spec = ToStreamSpec(open);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->head, "h");
  EXPECT_EQ(spec->step, 4u);
  EXPECT_EQ(spec->microbatch_id, 5u);
  EXPECT_EQ(spec->microbatch_rows, 10);
  EXPECT_EQ(spec->rows, (engine::RowRange{2, 4}));
  EXPECT_EQ(spec->hidden_dtype, kernels::DType::kFloat16);
  EXPECT_EQ(spec->ignore_index, -7);
  EXPECT_EQ(spec->options, (kernels::LossOptions{0.5f, 3.0f, 0.1f, 0.2f, true, kernels::Gradients::kAuto,
                                                 0.25f, 0.125f, 0.5f}));
  EXPECT_FALSE(spec->gradients_of_head);
  EXPECT_EQ(spec->reduction, engine::Reduction::kMean);
  EXPECT_EQ(spec->normalizer, 8.0);
  EXPECT_EQ(spec->grad_output, 2.0f);
  EXPECT_TRUE(spec->want_grad_hidden && spec->accumulate_gradients);
  EXPECT_TRUE(spec->want_rows.lse && spec->want_rows.argmax);
  EXPECT_FALSE(spec->want_rows.loss || spec->want_rows.entropy || spec->want_rows.logprob);
  EXPECT_THAT(spec->targets, ElementsAre(1, -7));
  EXPECT_THAT(spec->row_weights, ElementsAre(1.5f, 2.5f));
}

TEST(ConvertTest, AbsentFieldsHaveTheirDefaults) {
  v1::OpenMicrobatch open;
  open.set_hidden_dtype(v1::DTYPE_BF16);
  open.set_reduction(v1::REDUCTION_SUM);
  const auto spec = ToStreamSpec(open);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_FALSE(spec->step.has_value());
  EXPECT_FALSE(spec->normalizer.has_value());
  EXPECT_EQ(spec->ignore_index, -100);
  EXPECT_EQ(spec->grad_output, 1.0f);
  EXPECT_EQ(spec->options, kernels::LossOptions());
  EXPECT_TRUE(spec->gradients_of_head);
}

TEST(ConvertTest, HeadConfigThereAndBack) {
  v1::HeadSpec spec;
  spec.set_name("x");
  spec.set_hidden_size(3);
  spec.set_vocab_size(5);
  spec.set_bias(true);
  spec.set_class_weights(true);
  spec.set_norm(v1::NORM_RMSNORM);
  spec.set_norm_epsilon(1e-6f);
  spec.set_compute_dtype(v1::DTYPE_BF16);
  spec.set_optimizer_state(v1::OPTIMIZER_STATE_MOMENTUM);
  spec.set_frozen(true);
  spec.set_logits(v1::LOGITS_RECOMPUTED);
  spec.set_gradients(v1::GRADIENTS_AUTO);
  spec.set_workspace_bytes(uint64_t{1} << 26);
  const auto config = ToHeadConfig(spec, "spec.", kernels::DType::kFloat32);
  ASSERT_TRUE(config.ok()) << config.status();
  engine::HeadSnapshot snapshot;
  snapshot.name = "x";
  snapshot.config = *config;
  EXPECT_EQ(ToProto(snapshot).spec().SerializeAsString(), spec.SerializeAsString());
}

TEST(ConvertTest, ComputeDtypeIsTheBackendsChoiceIfAbsent) {
  v1::HeadSpec spec;
  spec.set_name("x");
  spec.set_hidden_size(3);
  spec.set_vocab_size(5);
  EXPECT_EQ(ToHeadConfig(spec, "", kernels::DType::kBFloat16)->compute_dtype, kernels::DType::kBFloat16);
}

TEST(ConvertTest, OptimizerFields) {
  v1::Optimizer optimizer;
  optimizer.mutable_adamw()->set_learning_rate(0.1);
  const auto defaults = ToOptimizerOptions(optimizer, "");
  ASSERT_TRUE(defaults.ok());
  EXPECT_EQ(defaults->beta1, 0.9);
  EXPECT_EQ(defaults->beta2, 0.999);
  EXPECT_EQ(defaults->epsilon, 1e-8);
  EXPECT_EQ(defaults->grad_multiplier, 1.0);
  optimizer.mutable_adamw()->set_beta1(0.0);
  EXPECT_EQ(ToOptimizerOptions(optimizer, "")->beta1, 0.0);
  optimizer.mutable_adamw()->set_beta2(1.0);
  EXPECT_EQ(FieldOf(ToOptimizerOptions(optimizer, "optimizer.").status()), "optimizer.adamw.beta2");
  optimizer.mutable_sgd()->set_nesterov(true);
  EXPECT_FALSE(ToOptimizerOptions(optimizer, "").ok());
  optimizer.mutable_sgd()->set_momentum(0.9);
  const auto sgd = ToOptimizerOptions(optimizer, "");
  ASSERT_TRUE(sgd.ok()) << sgd.status();
  EXPECT_EQ(sgd->kind, kernels::OptimizerOptions::Kind::kSgd);
  EXPECT_TRUE(sgd->nesterov);
}

TEST(ConvertTest, RowRanges) {
  v1::RowRange range;
  range.set_begin(2);
  range.set_end(5);
  EXPECT_EQ(*ToRowRange(range, "r", 5), (engine::RowRange{2, 5}));
  EXPECT_EQ(FieldOf(ToRowRange(range, "r", 4).status()), "r.end");
  range.set_begin(6);
  EXPECT_EQ(FieldOf(ToRowRange(range, "r", 10).status()), "r.end");
  range.set_begin(~uint64_t{0});
  range.set_end(~uint64_t{0});
  EXPECT_FALSE(ToRowRange(range, "r", std::numeric_limits<int64_t>::max()).ok());
}

TEST(ConvertTest, Names) {
  for (const char* name : {"a", "lm_head", "A.b-c_9"}) EXPECT_TRUE(CheckName("n", name).ok()) << name;
  for (const char* name : {"", ".", ".hidden", "a/b", "a b", "\xc3\xa9", "a\n"}) {
    EXPECT_EQ(FieldOf(CheckName("n", name)), "n") << name;
  }
  EXPECT_TRUE(CheckName("n", std::string(64, 'x')).ok());
  EXPECT_FALSE(CheckName("n", std::string(65, 'x')).ok());
}

TEST(ConvertTest, SliceResultsKeepTheirOrder) {
  engine::SliceOutput output;
  output.rows = {3, 5};
  output.loss = {1.0f, 2.0f};
  output.argmax = {-1, 7};
  const v1::SliceResult result = ToProto(output);
  EXPECT_EQ(result.rows().begin(), 3u);
  EXPECT_EQ(result.rows().end(), 5u);
  EXPECT_THAT(result.row_loss(), ElementsAre(1.0f, 2.0f));
  EXPECT_THAT(result.row_argmax(), ElementsAre(-1, 7));
  EXPECT_EQ(result.row_lse_size(), 0);
}

}  // namespace
}  // namespace lossd::messages::convert_test
