// SPDX-License-Identifier: Apache-2.0
// Tests of convert.h and texts.h: messages, enumerations, texts and errors.
#include "server/messages/convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "absl/strings/match.h"
#include "kernels/errors/field_error.h"
#include "lossd/v1/types.pb.h"
#include "proto/wire/status_details.h"
#include "server/engine/errors.h"

// ---- Conversions ----

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
  open.set_class_count(3);
  for (const int32_t place : {4, 4, 0}) open.add_classes(place);
  open.set_top_k(9);
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
  EXPECT_THAT(spec->classes, ElementsAre(4, 4, 0));
  EXPECT_TRUE(spec->shared_classes());
  EXPECT_EQ(spec->want_rows.class_count, 3);
  EXPECT_EQ(spec->want_rows.top_k, 9);
}

TEST(ConvertTest, NumbersOfClassesThatNoIntegerHolds) {
  for (const bool top : {false, true}) {
    v1::OpenMicrobatch open;
    open.set_hidden_dtype(v1::DTYPE_BF16);
    open.set_reduction(v1::REDUCTION_SUM);
    top ? open.set_top_k(1u << 31) : open.set_class_count(1u << 31);
    EXPECT_EQ(FieldOf(ToStreamSpec(open).status()), top ? "open.top_k" : "open.class_count");
  }
}

TEST(ConvertTest, SoftTargets) {
  v1::OpenMicrobatch open;
  open.set_microbatch_rows(1);
  open.mutable_rows()->set_end(1);
  open.set_hidden_dtype(v1::DTYPE_BF16);
  open.set_reduction(v1::REDUCTION_SUM);
  open.add_targets(1);
  open.set_target_count(2);
  for (const int32_t place : {5, -1}) open.add_target_classes(place);
  for (const float weight : {0.75f, 0.0f}) open.add_target_weights(weight);
  for (const kernels::Rest rest : {kernels::Rest::kNoTargets, kernels::Rest::kNone,
                                   kernels::Rest::kRenormalized, kernels::Rest::kOneClass}) {
    open.mutable_options()->set_rest(static_cast<v1::Rest>(rest));
    const auto spec = ToStreamSpec(open);
    ASSERT_TRUE(spec.ok()) << spec.status();
    EXPECT_EQ(spec->options.rest, rest);
    EXPECT_EQ(spec->soft.count, 2);
    EXPECT_THAT(spec->soft.classes, ElementsAre(5, -1));
    EXPECT_THAT(spec->soft.weights, ElementsAre(0.75f, 0.0f));
  }
  open.set_target_count(1u << 31);
  EXPECT_EQ(FieldOf(ToStreamSpec(open).status()), "open.target_count");
}

TEST(ConvertTest, ObjectivesAndTheirNumbers) {
  v1::OpenMicrobatch open;
  open.set_microbatch_rows(2);
  open.mutable_rows()->set_end(2);
  open.set_hidden_dtype(v1::DTYPE_BF16);
  open.set_reduction(v1::REDUCTION_SUM);
  open.add_targets(1);
  open.add_targets(2);
  v1::Objective& sent = *open.mutable_options()->mutable_objective();
  sent.set_kind(v1::OBJECTIVE_PPO);
  sent.set_clip_low(0.25f);
  sent.set_clip_high(0.5f);
  sent.set_dual_clip(3.0f);
  sent.set_kl(v1::KL_K2);
  sent.set_kl_coef(0.125f);
  sent.set_entropy_bonus(-0.5f);
  for (const float value : {1.0f, 2.0f}) {
    open.add_advantages(value);
    open.add_old_logprobs(-value);
    open.add_ref_logprobs(-2 * value);
  }
  const auto spec = ToStreamSpec(open);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->options.objective, (kernels::Objective{kernels::ObjectiveKind::kPpo, 0.25f, 0.5f, 3.0f,
                                                         kernels::KlEstimator::kK2, 0.125f, -0.5f}));
  EXPECT_THAT(spec->numbers.advantages, ElementsAre(1, 2));
  EXPECT_THAT(spec->numbers.old_logprobs, ElementsAre(-1, -2));
  EXPECT_THAT(spec->numbers.ref_logprobs, ElementsAre(-2, -4));

  open.mutable_options()->clear_objective();
  open.mutable_options()->mutable_objective()->set_kind(v1::OBJECTIVE_CISPO);
  EXPECT_EQ(
      ToStreamSpec(open)->options.objective,
      (kernels::Objective{.kind = kernels::ObjectiveKind::kCispo, .clip_low = 1.0f, .clip_high = 4.0f}));
  open.mutable_options()->mutable_objective()->set_kind(v1::OBJECTIVE_PPO);
  EXPECT_EQ(ToStreamSpec(open)->options.objective,
            (kernels::Objective{.kind = kernels::ObjectiveKind::kPpo, .clip_low = 0.2f, .clip_high = 0.2f}));
}

TEST(ConvertTest, SumsOfObjectivesAreThereIfThereAreRows) {
  engine::StreamSummary summary;
  EXPECT_FALSE(ToProto(summary).has_objective());
  summary.sums.objective = {4, 3, 2.0, 1.0, 0.5};
  const v1::ObjectiveSums sums = ToProto(summary).objective();
  EXPECT_TRUE(sums.rows() == 4 && sums.clipped_rows() == 3 && sums.ratio() == 2.0 && sums.old_kl() == 1.0 &&
              sums.ref_kl() == 0.5);
}

TEST(ConvertTest, SumsOfDistillation) {
  engine::StreamSummary summary;
  summary.sums.divergence = 3.5;
  summary.sums.target_loss = 0.25;
  EXPECT_EQ(ToProto(summary).divergence_sum(), 3.5);
  EXPECT_EQ(ToProto(summary).target_loss_sum(), 0.25);
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
  spec.set_residency(v1::RESIDENCY_HOST);
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
  EXPECT_FALSE(defaults->lazy_rows);
  optimizer.mutable_adamw()->set_beta1(0.0);
  EXPECT_EQ(ToOptimizerOptions(optimizer, "")->beta1, 0.0);
  optimizer.mutable_adamw()->set_beta2(1.0);
  EXPECT_EQ(FieldOf(ToOptimizerOptions(optimizer, "optimizer.").status()), "optimizer.adamw.beta2");
  optimizer.mutable_sgd()->set_nesterov(true);
  EXPECT_FALSE(ToOptimizerOptions(optimizer, "").ok());
  optimizer.mutable_sgd()->set_momentum(0.9);
  optimizer.set_lazy_rows(true);
  const auto sgd = ToOptimizerOptions(optimizer, "");
  ASSERT_TRUE(sgd.ok()) << sgd.status();
  EXPECT_EQ(sgd->kind, kernels::OptimizerOptions::Kind::kSgd);
  EXPECT_TRUE(sgd->nesterov);
  EXPECT_TRUE(sgd->lazy_rows);
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
  output.class_logprobs = {-1.5f, -2.5f};
  output.top_logprobs = {0.0f, -0.5f, 0.0f, -3.0f};
  output.top_classes = {-1, -1, 7, 2};
  const v1::SliceResult result = ToProto(output);
  EXPECT_EQ(result.rows().begin(), 3u);
  EXPECT_EQ(result.rows().end(), 5u);
  EXPECT_THAT(result.row_loss(), ElementsAre(1.0f, 2.0f));
  EXPECT_THAT(result.row_argmax(), ElementsAre(-1, 7));
  EXPECT_THAT(result.class_logprobs(), ElementsAre(-1.5f, -2.5f));
  EXPECT_THAT(result.top_logprobs(), ElementsAre(0.0f, -0.5f, 0.0f, -3.0f));
  EXPECT_THAT(result.top_classes(), ElementsAre(-1, -1, 7, 2));
  EXPECT_EQ(result.row_lse_size(), 0);
}

}  // namespace
}  // namespace lossd::messages::convert_test

// ---- Enums ----

namespace lossd::messages::enums_test {
namespace {

// Every value of the protocol, the last of which is `last`, comes back. UNSPECIFIED, 0, is none.
template <typename Proto, typename To>
void ExpectThereAndBack(Proto last, To to) {
  for (int value = 1; value <= last; ++value) {
    const auto inside = to(static_cast<Proto>(value), "spec.field");
    ASSERT_TRUE(inside.ok()) << inside.status();
    EXPECT_EQ(ToProto(*inside), value);
  }
}

template <typename Proto, typename To>
void ExpectRefused(Proto value, To to) {
  const absl::Status status = to(value, "spec.field").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << static_cast<int>(value);
  EXPECT_TRUE(absl::StrContains(status.message(), std::to_string(static_cast<int>(value)))) << status;
  EXPECT_EQ(errors::GetFieldViolation(status).value_or(errors::FieldViolation()).field, "spec.field");
}

absl::StatusOr<kernels::DType> ToAnyDType(v1::DType dtype, absl::string_view field) {
  return ToDType(dtype, field);
}

TEST(EnumsTest, ValuesComeBack) {
  ExpectThereAndBack(v1::DType_MAX, ToAnyDType);
  ExpectThereAndBack(v1::Norm_MAX, ToNorm);
  ExpectThereAndBack(v1::OptimizerState_MAX, ToOptimizerState);
  ExpectThereAndBack(v1::Logits_MAX, ToLogits);
  ExpectThereAndBack(v1::Gradients_MAX, ToGradients);
}

TEST(EnumsTest, EveryValueOfTheProtocolIsKnown) {
  for (int value = 1; value <= v1::Param_MAX; ++value)
    EXPECT_TRUE(ToParam(static_cast<v1::Param>(value), "param").ok()) << value;
  for (int value = 1; value <= v1::Role_MAX; ++value)
    EXPECT_TRUE(ToRole(static_cast<v1::Role>(value), "role").ok()) << value;
  for (int value = 1; value <= v1::Reduction_MAX; ++value)
    EXPECT_TRUE(ToReduction(static_cast<v1::Reduction>(value), "reduction").ok()) << value;
}

TEST(EnumsTest, OtherValuesAreRefused) {
  ExpectRefused(static_cast<v1::DType>(99), ToAnyDType);
  ExpectRefused(static_cast<v1::Norm>(99), ToNorm);
  ExpectRefused(static_cast<v1::OptimizerState>(99), ToOptimizerState);
  ExpectRefused(static_cast<v1::Logits>(99), ToLogits);
  ExpectRefused(static_cast<v1::Split>(99), ToSplit);
  ExpectRefused(static_cast<v1::Gradients>(99), ToGradients);
  ExpectRefused(static_cast<v1::Param>(99), ToParam);
  ExpectRefused(static_cast<v1::Role>(99), ToRole);
  ExpectRefused(static_cast<v1::Reduction>(99), ToReduction);
}

TEST(EnumsTest, UnspecifiedIsADefaultOrRefused) {
  EXPECT_EQ(*ToDType(v1::DTYPE_UNSPECIFIED, "dtype", kernels::DType::kBFloat16), kernels::DType::kBFloat16);
  EXPECT_EQ(*ToNorm(v1::NORM_UNSPECIFIED, "norm"), kernels::Norm::kNone);
  EXPECT_EQ(*ToOptimizerState(v1::OPTIMIZER_STATE_UNSPECIFIED, "state"), kernels::OptimizerState::kAdam);
  EXPECT_EQ(*ToLogits(v1::LOGITS_UNSPECIFIED, "logits"), kernels::Logits::kStored);
  EXPECT_THAT(std::string(ToLogits(static_cast<v1::Logits>(9), "spec.logits").status().message()),
              ::testing::HasSubstr(
                  "spec.logits must be LOGITS_STORED, LOGITS_RECOMPUTED, LOGITS_NONE or unspecified, got 9"));
  EXPECT_EQ(*ToSplit(v1::SPLIT_UNSPECIFIED, "split"), kernels::Split::kAny);
  EXPECT_EQ(*ToGradients(v1::GRADIENTS_UNSPECIFIED, "gradients"), kernels::Gradients::kExact);
  EXPECT_EQ(*ToRole(v1::ROLE_UNSPECIFIED, "role"), kernels::Role::kValue);
  ExpectRefused(v1::DTYPE_UNSPECIFIED, ToAnyDType);
  ExpectRefused(v1::PARAM_UNSPECIFIED, ToParam);
  ExpectRefused(v1::REDUCTION_UNSPECIFIED, ToReduction);
}

}  // namespace
}  // namespace lossd::messages::enums_test

// ---- Texts ----

namespace lossd::messages {
namespace {

using ::testing::HasSubstr;

TEST(TextsTest, CharactersAreCountedNotBytes) {
  std::string umlauts, faces;
  for (int i = 0; i < 128; ++i) {
    umlauts += "\u00e4";
    faces += "\U0001f600";
  }
  for (const std::string& run :
       {std::string(), std::string("host:17-0123abcd"), std::string(128, 'x'), umlauts, faces}) {
    EXPECT_TRUE(CheckRun("run", run).ok()) << run;
  }
  for (const std::string& run : {std::string(129, 'x'), umlauts + "x", faces + "x"}) {
    const absl::Status status = CheckRun("open.run", run);
    EXPECT_EQ(std::string(status.message()),
              "open.run must be at most 128 printable characters, got 129 characters");
    EXPECT_EQ(errors::GetFieldViolation(status)->field, "open.run");
  }
}

TEST(TextsTest, WhatIsNotPrintableIsRefused) {
  for (const std::string& run :
       {std::string("a\nb"), std::string("a\0b", 3), std::string("\x1b[31m"), std::string("\x7f"),
        std::string("\u0085"), std::string("\u202e"), std::string("\u2028"), std::string("\ufeff"),
        std::string("\xff"), std::string("\xc3")}) {
    EXPECT_THAT(std::string(CheckRun("run", run).message()), HasSubstr("not printable")) << run;
  }
}

TEST(TextsTest, AnIdIsNotEmpty) {
  EXPECT_TRUE(CheckCallId("reset_id", "a").ok());
  EXPECT_TRUE(CheckCallId("reset_id", std::string(64, 'a')).ok());
  EXPECT_EQ(std::string(CheckCallId("reset_id", "").message()),
            "reset_id must be 1 to 64 printable characters, got nothing");
  EXPECT_FALSE(CheckCallId("reset_id", std::string(65, 'a')).ok());
}

}  // namespace
}  // namespace lossd::messages

// ---- Errors ----

namespace lossd::messages::errors_test {
namespace {

v1::ErrorDetail DetailOnTheWire(const absl::Status& status, uint64_t incarnation = 9) {
  return wire::GetErrorDetail(WithDetail(status, incarnation)).value_or(v1::ErrorDetail());
}

TEST(ErrorsTest, FieldAndValueReachTheDetail) {
  const absl::Status status = errors::Within("open.", errors::FieldError("x", "be small", 12));
  EXPECT_EQ(WithDetail(status, 9).message(), "open.x must be small, got 12");
  const v1::ErrorDetail detail = DetailOnTheWire(status);
  EXPECT_EQ(detail.field(), "open.x");
  EXPECT_EQ(detail.value(), "12");
  EXPECT_EQ(detail.incarnation(), 9u);
  EXPECT_FALSE(detail.has_current_step());
}

TEST(ErrorsTest, EngineErrorsGetTheirDetail) {
  const v1::ErrorDetail step = DetailOnTheWire(engine::StepNotOpen("open.step", 4, 3, "why"));
  EXPECT_EQ(step.field(), "open.step");
  EXPECT_EQ(step.value(), "4");
  EXPECT_EQ(step.current_step(), 3u);
  const v1::ErrorDetail head = DetailOnTheWire(engine::UnknownHead("x must y, got z"));
  EXPECT_EQ(head.field(), "head");
  EXPECT_EQ(head.value(), "x must y, got z");
}

TEST(ErrorsTest, NothingIsReadOutOfMessages) {
  const v1::ErrorDetail detail = DetailOnTheWire(absl::InternalError("the disk must rest, got tired"));
  EXPECT_EQ(detail.field(), "");
  EXPECT_EQ(detail.value(), "");
  EXPECT_FALSE(detail.has_current_step());
  EXPECT_EQ(detail.incarnation(), 9u);
}

TEST(ErrorsTest, MissingRowsTravelInTheDetail) {
  const absl::Status status = engine::WithMissing(absl::FailedPreconditionError("rows are missing"),
                                                  {"microbatch 7", "microbatch 9"});
  EXPECT_THAT(DetailOnTheWire(status).missing(), ::testing::ElementsAre("microbatch 7", "microbatch 9"));
}

TEST(ErrorsTest, AnotherProcessIsNotMeant) {
  EXPECT_TRUE(CheckIncarnation("open.incarnation", 5, 5).ok());
  const absl::Status status = CheckIncarnation("open.incarnation", 0xab, 5);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(DetailOnTheWire(status).field(), "open.incarnation");
  EXPECT_EQ(DetailOnTheWire(status).value(), "00000000000000ab");
}

}  // namespace
}  // namespace lossd::messages::errors_test
