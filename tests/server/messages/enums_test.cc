// SPDX-License-Identifier: Apache-2.0
#include "server/messages/enums.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/strings/match.h"
#include "kernels/errors/field_error.h"

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
  EXPECT_EQ(*ToSplit(v1::SPLIT_UNSPECIFIED, "split"), kernels::Split::kAny);
  EXPECT_EQ(*ToGradients(v1::GRADIENTS_UNSPECIFIED, "gradients"), kernels::Gradients::kExact);
  EXPECT_EQ(*ToRole(v1::ROLE_UNSPECIFIED, "role"), kernels::Role::kValue);
  ExpectRefused(v1::DTYPE_UNSPECIFIED, ToAnyDType);
  ExpectRefused(v1::PARAM_UNSPECIFIED, ToParam);
  ExpectRefused(v1::REDUCTION_UNSPECIFIED, ToReduction);
}

}  // namespace
}  // namespace lossd::messages::enums_test
