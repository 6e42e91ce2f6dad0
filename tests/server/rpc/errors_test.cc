#include "server/rpc/errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lossd/v1/types.pb.h"
#include "proto/wire/status_details.h"
#include "server/engine/errors.h"

namespace lossd::rpc {
namespace {

v1::ErrorDetail DetailOnTheWire(const absl::Status& status, uint64_t incarnation = 9) {
  return wire::GetErrorDetail(ToGrpc(status, incarnation)).value_or(v1::ErrorDetail());
}

TEST(ErrorsTest, FieldErrorsNameFieldAndValue) {
  const absl::Status status = FieldError("open.x", "be small", 12);
  EXPECT_EQ(status.message(), "open.x must be small, got 12");
  const v1::ErrorDetail detail = DetailOnTheWire(status);
  EXPECT_EQ(detail.field(), "open.x");
  EXPECT_EQ(detail.value(), "12");
  EXPECT_EQ(detail.incarnation(), 9u);
}

TEST(ErrorsTest, EngineErrorsGetTheirDetail) {
  const v1::ErrorDetail step = DetailOnTheWire(engine::StepNotOpen("open.step", 4, 3));
  EXPECT_EQ(step.field(), "open.step");
  EXPECT_EQ(step.value(), "4");
  EXPECT_EQ(step.current_step(), 3u);
  EXPECT_FALSE(DetailOnTheWire(absl::InternalError("disk")).has_current_step());
}

TEST(ErrorsTest, LocatedAddsThePlace) {
  const absl::Status located =
      Located(absl::InvalidArgumentError("softcap must be > 0, got -1"), "open.options.");
  EXPECT_EQ(located.message(), "open.options.softcap must be > 0, got -1");
  EXPECT_EQ(DetailOnTheWire(located).field(), "open.options.softcap");
  EXPECT_EQ(DetailOnTheWire(located).value(), "-1");
}

TEST(ErrorsTest, LocatedLeavesOthersAlone) {
  for (const absl::Status& status : {absl::OkStatus(), absl::InternalError("the disk must rest, got tired"),
                                     FieldError("a", "be b", 1), absl::NotFoundError("no file")}) {
    EXPECT_EQ(Located(status, "x."), status);
  }
}

TEST(ErrorsTest, MissingRowsTravelInTheDetail) {
  const absl::Status status =
      WithMissing(absl::FailedPreconditionError("rows are missing"), {"microbatch 7", "microbatch 9"});
  EXPECT_THAT(DetailOnTheWire(status).missing(), ::testing::ElementsAre("microbatch 7", "microbatch 9"));
}

TEST(ErrorsTest, CodesHaveTheirNames) {
  EXPECT_EQ(CodeName(ToGrpc(absl::OutOfRangeError("x"), 1)), "OUT_OF_RANGE");
  EXPECT_EQ(CodeName(grpc::Status::OK), "OK");
}

}  // namespace
}  // namespace lossd::rpc
