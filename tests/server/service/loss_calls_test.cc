// SPDX-License-Identifier: Apache-2.0
// ComputeLoss calls beside their results: what the log says of their ends, and how long retained rows stay.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"
#include "tests/server/service/service_client.h"
#include "tests/server/service/test_server.h"

namespace lossd::app::testing::loss_calls_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kHidden = 8, kRows = 4;

void CreateHead(TestClient& client) {
  v1::CreateHeadRequest request;
  request.mutable_spec()->set_name("head");
  request.mutable_spec()->set_hidden_size(kHidden);
  request.mutable_spec()->set_vocab_size(16);
  ASSERT_TRUE(client.CreateHead(request).ok());
}

v1::OpenMicrobatch Open(const std::string& head) {
  v1::OpenMicrobatch open;
  open.set_head(head);
  open.set_step(0);
  open.set_microbatch_id(3);
  open.set_microbatch_rows(kRows);
  open.mutable_rows()->set_end(kRows);
  open.set_hidden_dtype(v1::DTYPE_FP32);
  open.set_reduction(v1::REDUCTION_NONE);
  for (int32_t row = 0; row < kRows; ++row) open.add_targets(row);
  return open;
}

absl::Status Compute(TestClient& client, const v1::OpenMicrobatch& open, float value) {
  const auto stream = client.OpenLoss();
  stream->SendOpen(open);
  stream->SendSlice(0, kRows, Bytes(std::vector<float>(kRows * kHidden, value)));
  return stream->Finish().status;
}

TEST(LossCallsTest, TheLogNamesCallsThatFailedAndNoOthers) {
  TestServer server;
  const auto client = server.Connect();
  CreateHead(*client);
  log::Configure(log::LogLevel::kInfo, log::LogFormat::kText);
  ::testing::internal::CaptureStderr();
  EXPECT_TRUE(Compute(*client, Open("head"), 0.5f).ok());
  const std::string quiet = ::testing::internal::GetCapturedStderr();
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(Compute(*client, Open("none"), 0.5f).code(), absl::StatusCode::kNotFound);
  const std::string loud = ::testing::internal::GetCapturedStderr();
  log::Configure(log::LogLevel::kOff, log::LogFormat::kText);
  EXPECT_THAT(quiet, Not(HasSubstr("call failed")));
  EXPECT_THAT(loud, HasSubstr("call failed method=ComputeLoss code=NOT_FOUND"));
}

TEST(LossCallsTest, RetainedRowsStayForTheTimeoutAndNoLonger) {
  ServerOptions options = SmallServer();
  options.retained_timeout = absl::Seconds(1);  // looked at ten times as often
  TestServer server(options);
  const auto client = server.Connect();
  CreateHead(*client);
  v1::OpenMicrobatch open = Open("head");
  open.set_retain(true);
  const absl::Time before = clocks::SteadyNow();
  ASSERT_TRUE(Compute(*client, open, 0.5f).ok());
  absl::Time now;
  do {
    absl::SleepFor(absl::Milliseconds(10));
    now = clocks::SteadyNow();
  } while (server.server().stats().retained_microbatches > 0 && now - before < absl::Minutes(5));
  EXPECT_GE(now - before, options.retained_timeout);
  EXPECT_LT(now - before, absl::Minutes(5));
}

}  // namespace
}  // namespace lossd::app::testing::loss_calls_test
