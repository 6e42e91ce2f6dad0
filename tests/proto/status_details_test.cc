// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/status_details.h"

#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"

namespace lossd::wire::status_details_test {
namespace {

using google::protobuf::util::MessageDifferencer;

v1::ErrorDetail SomeDetail() {
  v1::ErrorDetail detail;
  detail.set_field("open.targets[17]");
  detail.set_value("50304");
  detail.set_incarnation(0x123456789abcdef0u);
  detail.set_current_step(0);
  detail.add_missing("microbatch 7: rows [128, 256)");
  return detail;
}

TEST(StatusDetailsTest, CarriesTheDetail) {
  const grpc::Status status =
      MakeGrpcStatus(grpc::StatusCode::INVALID_ARGUMENT, "target too large", SomeDetail());
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(), "target too large");
  ASSERT_TRUE(GetErrorDetail(status).has_value());
  EXPECT_TRUE(MessageDifferencer::Equals(*GetErrorDetail(status), SomeDetail()));
  v1::StatusDetails details;
  ASSERT_TRUE(details.ParseFromString(status.error_details()));
  EXPECT_EQ(details.code(), 3);
  EXPECT_EQ(details.message(), "target too large");
}

TEST(StatusDetailsTest, ThereAndBackForEveryCode) {
  for (int code = 1; code <= 16; ++code) {
    absl::Status status(static_cast<absl::StatusCode>(code), absl::StrCat("code ", code));
    EXPECT_EQ(FromGrpcStatus(ToGrpcStatus(status)), status);
    SetErrorDetail(SomeDetail(), &status);
    EXPECT_EQ(static_cast<int>(ToGrpcStatus(status).error_code()), code);
    EXPECT_EQ(FromGrpcStatus(ToGrpcStatus(status)), status);
    EXPECT_TRUE(MessageDifferencer::Equals(*GetErrorDetail(status), SomeDetail()));
  }
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
  EXPECT_TRUE(FromGrpcStatus(grpc::Status::OK).ok());
}

TEST(StatusDetailsTest, UnknownCodesAndForeignDetails) {
  EXPECT_EQ(ToGrpcStatus(absl::Status(static_cast<absl::StatusCode>(77), "x")).error_code(), grpc::UNKNOWN);
  EXPECT_FALSE(GetErrorDetail(grpc::Status(grpc::INTERNAL, "x")).has_value());
  EXPECT_FALSE(GetErrorDetail(grpc::Status(grpc::INTERNAL, "x", "\x0f no protobuf")).has_value());
  EXPECT_EQ(FromGrpcStatus(grpc::Status(grpc::INTERNAL, "x", "\x0f no protobuf")), absl::InternalError("x"));
  EXPECT_FALSE(GetErrorDetail(absl::InternalError("x")).has_value());
}

TEST(StatusDetailsTest, FitsIntoTrailers) {
  v1::ErrorDetail detail = SomeDetail();
  detail.clear_missing();
  for (int i = 0; i < 5000; ++i) detail.add_missing(absl::StrCat("microbatch ", i, ": rows [0, 4096)"));
  std::string long_text = "ab";
  for (int i = 0; i < 4000; ++i) long_text += "\xe2\x82\xac";  // a character of three bytes
  detail.set_value(long_text);
  detail.set_field(long_text);
  absl::Status status = absl::FailedPreconditionError(long_text);
  SetErrorDetail(detail, &status);
  const grpc::Status sent = ToGrpcStatus(status);
  EXPECT_LE(sent.error_message().size(), kMaxMessageBytes);
  EXPECT_LE(sent.error_details().size(), kMaxMessageBytes + kMaxDetailBytes + 100);
  EXPECT_TRUE(absl::EndsWith(sent.error_message(), "\xe2\x82\xac..."));
  const v1::ErrorDetail received = GetErrorDetail(sent).value();
  EXPECT_EQ(received.incarnation(), detail.incarnation());
  EXPECT_LE(received.field().size(), ::lossd::errors::kMaxFieldBytes);
  EXPECT_TRUE(absl::EndsWith(received.field(), "\xe2\x82\xac..."));
  EXPECT_LE(received.value().size(), ::lossd::errors::kMaxValueBytes);
  EXPECT_EQ(received.missing(0), "microbatch 0: rows [0, 4096)");
  const int whole = received.missing_size() - 1;
  EXPECT_GT(whole, 20);
  EXPECT_EQ(received.missing(whole), absl::StrCat("and ", 5000 - whole, " more"));
}

// Protobuf refuses to read a message whose strings are not UTF-8, so the detail would be lost.
TEST(StatusDetailsTest, BytesThatAreNotUtf8DoNotCostTheDetail) {
  v1::ErrorDetail detail = SomeDetail();
  detail.set_field("open.\xff");
  detail.set_value("caf\xc3");
  detail.add_missing("\x80 rows");
  absl::Status status = absl::InvalidArgumentError("no file caf\xc3");
  SetErrorDetail(detail, &status);
  const grpc::Status sent = ToGrpcStatus(status);
  EXPECT_EQ(sent.error_message(), "no file caf\xef\xbf\xbd");
  const std::optional<v1::ErrorDetail> received = GetErrorDetail(sent);
  ASSERT_TRUE(received.has_value());
  EXPECT_EQ(received->field(), "open.\xef\xbf\xbd");
  EXPECT_EQ(received->value(), "caf\xef\xbf\xbd");
  EXPECT_EQ(received->missing(1), "\xef\xbf\xbd rows");
  v1::StatusDetails details;
  EXPECT_TRUE(details.ParseFromString(sent.error_details()));
}

}  // namespace
}  // namespace lossd::wire::status_details_test
