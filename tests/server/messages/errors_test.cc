// SPDX-License-Identifier: Apache-2.0
#include "server/messages/errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/errors/field_error.h"
#include "lossd/v1/types.pb.h"
#include "proto/wire/status_details.h"
#include "server/engine/errors.h"

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
