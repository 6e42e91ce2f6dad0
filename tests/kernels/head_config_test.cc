// SPDX-License-Identifier: Apache-2.0
// Tests of head_config.h: the configuration of a head, the options of a loss, and the options of an
// optimizer.
#include "kernels/head_config.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/errors/field_error.h"

// ---- Head config ----

namespace lossd::kernels::head_config_test {
namespace {

using ::testing::HasSubstr;

HeadConfig Valid() {
  HeadConfig config;
  config.hidden_size = 4;
  config.vocab_size = 9;
  return config;
}

TEST(HeadConfigTest, RefusesValuesOutOfRangeByName) {
  EXPECT_TRUE(Validate(Valid()).ok());
  struct Case {
    void (*change)(HeadConfig&);
    const char* message;
  };
  const Case cases[] = {
      {[](HeadConfig& c) { c.hidden_size = 0; }, "hidden_size must be in [1, 16777216], got 0"},
      {[](HeadConfig& c) { c.hidden_size = int64_t{1} << 40; },
       "hidden_size must be in [1, 16777216], got 10"},
      {[](HeadConfig& c) { c.vocab_size = -3; }, "vocab_size must be in [1, 2147483647], got -3"},
      {[](HeadConfig& c) { c.vocab_size = int64_t{1} << 31; }, "got 2147483648"},
      {[](HeadConfig& c) { c.norm_epsilon = -1.0f; }, "norm_epsilon must be finite and >= 0, got -1"},
      {[](HeadConfig& c) { c.norm_epsilon = std::numeric_limits<float>::quiet_NaN(); }, "norm_epsilon"},
      {[](HeadConfig& c) { c.norm = static_cast<Norm>(9); },
       "norm must be none, layernorm or rmsnorm, got 9"},
      {[](HeadConfig& c) { c.compute_dtype = static_cast<DType>(7); }, "compute_dtype"},
      {[](HeadConfig& c) { c.optimizer_state = static_cast<OptimizerState>(5); }, "optimizer_state"},
      {[](HeadConfig& c) { c.split = static_cast<Split>(3); },
       "split must be any, rows or vocabulary, got 3"},
      {[](HeadConfig& c) { c.logits = static_cast<Logits>(2); },
       "logits must be stored or recomputed, got 2"},
      {[](HeadConfig& c) { c.gradients = static_cast<Gradients>(4); },
       "gradients must be exact, filtered, sampled or auto, got 4"},
  };
  for (const Case& c : cases) {
    HeadConfig config = Valid();
    c.change(config);
    const absl::Status status = Validate(config);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.message));
    const auto [field, rule, value] = errors::GetFieldViolation(status).value_or(errors::FieldViolation());
    EXPECT_EQ(status.message(), absl::StrCat(field, " ", rule, ", got ", value));
  }
}

TEST(HeadConfigTest, TensorsFollowTheConfig) {
  HeadConfig config = Valid();
  EXPECT_TRUE(HasTensor(config, {Param::kWeight, Role::kMoment2}));
  EXPECT_FALSE(HasTensor(config, {Param::kBias, Role::kValue}));
  EXPECT_FALSE(HasTensor(config, {Param::kNormGain, Role::kValue}));
  config.norm = Norm::kRmsNorm;
  EXPECT_TRUE(HasTensor(config, {Param::kNormGain, Role::kGradient}));
  EXPECT_FALSE(HasTensor(config, {Param::kNormShift, Role::kValue}));
  config.norm = Norm::kLayerNorm;
  EXPECT_TRUE(HasTensor(config, {Param::kNormShift, Role::kMoment1}));
  config.has_class_weights = true;
  EXPECT_TRUE(HasTensor(config, {Param::kClassWeights, Role::kValue}));
  EXPECT_FALSE(HasTensor(config, {Param::kClassWeights, Role::kGradient}));
  config.optimizer_state = OptimizerState::kMomentum;
  EXPECT_TRUE(HasTensor(config, {Param::kWeight, Role::kMoment1}));
  EXPECT_FALSE(HasTensor(config, {Param::kWeight, Role::kMoment2}));
  config.trainable = false;
  EXPECT_TRUE(HasTensor(config, {Param::kWeight, Role::kValue}));
  EXPECT_FALSE(HasTensor(config, {Param::kWeight, Role::kGradient}));
  EXPECT_FALSE(HasTensor(config, {Param::kWeight, Role::kMoment1}));
}

TEST(HeadConfigTest, Shapes) {
  const HeadConfig config = Valid();
  EXPECT_EQ(ShapeOf(config, Param::kWeight).elements(), 36);
  EXPECT_EQ(ShapeOf(config, Param::kBias).rows, 9);
  EXPECT_EQ(ShapeOf(config, Param::kBias).cols, 1);
  EXPECT_EQ(ShapeOf(config, Param::kNormGain).rows, 4);
}

}  // namespace
}  // namespace lossd::kernels::head_config_test

// ---- Loss options ----

namespace lossd::kernels::loss_options_test {
namespace {

using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

void ExpectRefused(const LossOptions& options, const char* message) {
  const absl::Status status = Validate(options);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  const auto [field, rule, value] = errors::GetFieldViolation(status).value_or(errors::FieldViolation());
  EXPECT_EQ(status.message(), absl::StrCat(field, " ", rule, ", got ", value));
}

TEST(LossOptionsTest, AcceptsTheEndsOfEachRange) {
  EXPECT_TRUE(Validate(LossOptions{}).ok());
  EXPECT_TRUE(Validate(LossOptions{.logit_scale = -0.5f}).ok());
  EXPECT_TRUE(Validate(LossOptions{.label_smoothing = 1.0f}).ok());
  EXPECT_TRUE(Validate(LossOptions{.filter_epsilon = 0.0f, .max_gradient_error = 0.0f}).ok());
  EXPECT_TRUE(Validate(LossOptions{.filter_epsilon = 0.999f, .max_gradient_error = 1e30f}).ok());
  EXPECT_TRUE(Validate(LossOptions{.sample_threshold = 1e-30f}).ok());
  EXPECT_TRUE(Validate(LossOptions{.sample_threshold = 1.0f}).ok());
}

TEST(LossOptionsTest, RefusesValuesOutOfRangeByName) {
  ExpectRefused({.label_smoothing = 1.5f}, "label_smoothing must be in [0, 1], got 1.5");
  ExpectRefused({.label_smoothing = -0.1f}, "label_smoothing must be in [0, 1], got -0.1");
  ExpectRefused({.logit_scale = 0.0f}, "logit_scale must be finite and not 0, got 0");
  ExpectRefused({.softcap = -30.0f}, "softcap must be 0 (none), or finite and >= 1.1754944e-38, got -30");
  ExpectRefused({.softcap = 1e-39f}, "softcap must be 0 (none), or finite and >= 1.1754944e-38, got 1e-39");
  ExpectRefused({.softcap = std::numeric_limits<float>::denorm_min()}, "softcap");
  EXPECT_TRUE(Validate(LossOptions{.softcap = std::numeric_limits<float>::min()}).ok());
  ExpectRefused({.z_loss = -1.0f}, "z_loss must be finite and >= 0, got -1");
  ExpectRefused({.filter_epsilon = 1.0f}, "filter_epsilon must be in [0, 1), got 1");
  ExpectRefused({.filter_epsilon = -0.1f}, "filter_epsilon must be in [0, 1), got -0.1");
  ExpectRefused({.sample_threshold = 1.5f}, "sample_threshold must be in [1e-30, 1], got 1.5");
  ExpectRefused({.sample_threshold = 0.0f}, "sample_threshold must be in [1e-30, 1], got 0");
  ExpectRefused({.sample_threshold = 9e-31f}, "sample_threshold");
  ExpectRefused({.max_gradient_error = -0.5f}, "max_gradient_error must be finite and >= 0, got -0.5");
}

TEST(LossOptionsTest, RefusesValuesThatAreNotFinite) {
  for (float bad : {kNan, kInf, -kInf}) {
    ExpectRefused({.logit_scale = bad}, "logit_scale");
    ExpectRefused({.softcap = bad}, "softcap");
    ExpectRefused({.label_smoothing = bad}, "label_smoothing");
    ExpectRefused({.z_loss = bad}, "z_loss");
    ExpectRefused({.filter_epsilon = bad}, "filter_epsilon");
    ExpectRefused({.sample_threshold = bad}, "sample_threshold");
    ExpectRefused({.max_gradient_error = bad}, "max_gradient_error");
  }
}

TEST(LossOptionsTest, SaysWhatCannotBeFiltered) {
  const LossOptions filtered{.gradients = Gradients::kFiltered};
  EXPECT_THAT(WhyExact({}, false), HasSubstr("exact"));
  EXPECT_EQ(WhyExact(filtered, false), "");
  EXPECT_EQ(WhyExact({.softcap = 30.0f, .z_loss = 1.0f, .gradients = Gradients::kFiltered}, false), "");
  EXPECT_EQ(WhyExact({.label_smoothing = 0.1f, .gradients = Gradients::kFiltered}, false), "");
  EXPECT_THAT(WhyExact(filtered, true), HasSubstr("entropy"));
  const LossOptions capped{.softcap = 30.0f, .label_smoothing = 0.1f, .gradients = Gradients::kFiltered};
  EXPECT_THAT(WhyExact(capped, false), HasSubstr("smoothing"));
}

TEST(LossOptionsTest, SlopesGrowWithClassWeightsAndTheZLoss) {
  EXPECT_EQ(LargestSlope({}, 1.0), 1.0);
  EXPECT_EQ(LargestSlope({}, 0.25), 1.0);
  EXPECT_EQ(LargestSlope({}, 8.0), 8.0);
  EXPECT_EQ(LargestSlope({.z_loss = 0.5f}, 8.0), 108.0);
}

TEST(LossOptionsTest, EverythingCanBeSampled) {
  for (const Gradients gradients : {Gradients::kSampled, Gradients::kAuto}) {
    EXPECT_EQ(WhyExact({.gradients = gradients}, true), "");
    EXPECT_EQ(WhyExact({.softcap = 30.0f, .label_smoothing = 0.1f, .gradients = gradients}, true), "");
  }
}

}  // namespace
}  // namespace lossd::kernels::loss_options_test

// ---- Optimizer options ----

namespace lossd::kernels::optimizer_options_test {
namespace {

using ::testing::HasSubstr;
using Kind = OptimizerOptions::Kind;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

void ExpectRefused(const OptimizerOptions& options, const char* message) {
  const absl::Status status = Validate(options);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  const auto [field, rule, value] = errors::GetFieldViolation(status).value_or(errors::FieldViolation());
  EXPECT_EQ(status.message(), absl::StrCat(field, " ", rule, ", got ", value));
}

TEST(OptimizerOptionsTest, RefusesValuesOutOfRangeByName) {
  EXPECT_TRUE(Validate(OptimizerOptions{}).ok());
  ExpectRefused({.learning_rate = -1.0}, "learning_rate must be finite and >= 0, got -1");
  ExpectRefused({.weight_decay = -0.5}, "weight_decay must be finite and >= 0, got -0.5");
  ExpectRefused({.beta1 = 1.0}, "beta1 must be in [0, 1), got 1");
  ExpectRefused({.beta2 = -0.1}, "beta2 must be in [0, 1), got -0.1");
  ExpectRefused({.epsilon = -1e-8}, "epsilon must be finite and >= 0, got -1e-08");
  ExpectRefused({.kind = Kind::kSgd, .momentum = -0.9}, "momentum must be finite and >= 0, got -0.9");
  ExpectRefused({.kind = Kind::kSgd, .nesterov = true}, "momentum must be > 0 with nesterov, got 0");
  ExpectRefused({.kind = Kind::kSgd, .momentum = 0.9, .dampening = 0.1, .nesterov = true},
                "dampening must be 0 with nesterov, got 0.1");
  ExpectRefused({.kind = static_cast<Kind>(5)}, "kind");
}

TEST(OptimizerOptionsTest, RefusesValuesThatAreNotFinite) {
  for (double bad : {kNan, kInf}) {
    ExpectRefused({.learning_rate = bad}, "learning_rate");
    ExpectRefused({.weight_decay = bad}, "weight_decay");
    ExpectRefused({.grad_multiplier = bad}, "grad_multiplier");
    ExpectRefused({.beta1 = bad}, "beta1");
    ExpectRefused({.beta2 = bad}, "beta2");
    ExpectRefused({.epsilon = bad}, "epsilon");
    ExpectRefused({.kind = Kind::kSgd, .momentum = bad}, "momentum");
    ExpectRefused({.kind = Kind::kSgd, .dampening = bad}, "dampening");
  }
}

TEST(OptimizerOptionsTest, RequiredState) {
  EXPECT_EQ(RequiredState({.kind = Kind::kAdamW}), OptimizerState::kAdam);
  EXPECT_EQ(RequiredState({.kind = Kind::kSgd}), OptimizerState::kNone);
  EXPECT_EQ(RequiredState({.kind = Kind::kSgd, .momentum = 0.9}), OptimizerState::kMomentum);
}

}  // namespace
}  // namespace lossd::kernels::optimizer_options_test
