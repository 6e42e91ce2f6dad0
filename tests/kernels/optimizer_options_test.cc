// SPDX-License-Identifier: Apache-2.0
#include "kernels/optimizer_options.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/errors/field_error.h"

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
