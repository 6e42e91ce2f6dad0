// SPDX-License-Identifier: Apache-2.0
#include "kernels/loss_options.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/errors/field_error.h"

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
