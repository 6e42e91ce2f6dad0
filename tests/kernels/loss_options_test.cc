#include "kernels/loss_options.h"

#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace lossd::kernels {
namespace {

using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

void ExpectRefused(const LossOptions& options, const char* message) {
  const absl::Status status = Validate(options);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr(message));
}

TEST(LossOptionsTest, AcceptsTheEndsOfEachRange) {
  EXPECT_TRUE(Validate({}).ok());
  EXPECT_TRUE(Validate({.logit_scale = -0.5f}).ok());
  EXPECT_TRUE(Validate({.label_smoothing = 1.0f}).ok());
}

TEST(LossOptionsTest, RefusesValuesOutOfRangeByName) {
  ExpectRefused({.label_smoothing = 1.5f}, "label_smoothing must be in [0, 1], got 1.5");
  ExpectRefused({.label_smoothing = -0.1f}, "label_smoothing must be in [0, 1], got -0.1");
  ExpectRefused({.logit_scale = 0.0f}, "logit_scale must be finite and not 0, got 0");
  ExpectRefused({.softcap = -30.0f}, "softcap must be finite and >= 0 (0: none), got -30");
  ExpectRefused({.z_loss = -1.0f}, "z_loss must be finite and >= 0, got -1");
}

TEST(LossOptionsTest, RefusesValuesThatAreNotFinite) {
  for (float bad : {kNan, kInf, -kInf}) {
    ExpectRefused({.logit_scale = bad}, "logit_scale");
    ExpectRefused({.softcap = bad}, "softcap");
    ExpectRefused({.label_smoothing = bad}, "label_smoothing");
    ExpectRefused({.z_loss = bad}, "z_loss");
  }
}

}  // namespace
}  // namespace lossd::kernels
