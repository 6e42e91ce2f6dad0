// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "kernels/errors/field_error.h"
#include "lossd/v1/types.pb.h"
#include "proto/wire/status_details.h"
#include "server/rpc/request_call.h"

namespace lossd::rpc::status_test {
namespace {

TEST(StatusTest, TheDetailTravelsWithTheStatus) {
  const grpc::Status status = ToGrpc(errors::FieldError("open.x", "be small", 12), 9);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(), "open.x must be small, got 12");
  const v1::ErrorDetail detail = wire::GetErrorDetail(status).value_or(v1::ErrorDetail());
  EXPECT_EQ(detail.field(), "open.x");
  EXPECT_EQ(detail.incarnation(), 9u);
  EXPECT_TRUE(ToGrpc(absl::OkStatus(), 9).ok());
}

TEST(StatusTest, CodesHaveTheirNames) {
  EXPECT_EQ(CodeName(ToGrpc(absl::OutOfRangeError("x"), 1)), "OUT_OF_RANGE");
  EXPECT_EQ(CodeName(grpc::Status::OK), "OK");
}

}  // namespace
}  // namespace lossd::rpc::status_test
