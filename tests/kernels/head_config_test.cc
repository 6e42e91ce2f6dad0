// SPDX-License-Identifier: Apache-2.0
#include "kernels/head_config.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/errors/field_error.h"

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
