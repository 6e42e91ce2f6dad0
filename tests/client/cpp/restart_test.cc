// SPDX-License-Identifier: Apache-2.0
// What a client notices of a server that was restarted, and when that is an error.
#include <gmock/gmock.h>
#include <grpcpp/support/status.h>
#include <gtest/gtest.h>

#include "tests/client/cpp/faults_fixture.h"

namespace lossd::client::restart_test {
namespace {

using lossd::fake::Faults;
using ::testing::HasSubstr;

using RestartTest = FaultsTest;

TEST_F(RestartTest, DuringTheCallAborts) {
  Faults faults{.fail_slice = [](uint64_t n) { return n == 7 ? grpc::StatusCode::UNAVAILABLE : 0; },
                .restart_on_failure = true};
  server_.SetFaults(faults);
  const uint64_t before = server_.incarnation();
  const auto result = client_->ComputeLoss(AsMicrobatch(), Outputs(),
                                           {.accumulate_gradients = true, .streams = 1, .slice_bytes = 512});
  EXPECT_EQ(result.status().code(), absl::StatusCode::kAborted) << result.status();
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("server restarted (incarnation "));
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("gradients of step 0 are lost"));
  EXPECT_NE(server_.incarnation(), before);
}

TEST_F(RestartTest, BetweenMicrobatchesAbortsUntilAcknowledged) {
  ASSERT_TRUE(Compute().ok());
  server_.Restart();
  for (uint64_t id : {2, 3}) {
    const auto result = client_->ComputeLoss(AsMicrobatch(id), Outputs(), Options());
    EXPECT_EQ(result.status().code(), absl::StatusCode::kAborted) << result.status();
  }
  EXPECT_EQ(client_->GradNorm("head").status().code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(client_->ComputeLoss(AsMicrobatch(), Outputs(), {}).ok()) << "loss alone loses nothing";
  client_->AcknowledgeRestart("head");
  EXPECT_TRUE(Compute().ok());
}

TEST_F(RestartTest, IsSeenInErrorsToo) {
  ASSERT_TRUE(Compute().ok());
  ASSERT_TRUE(Connect()->DeleteHead("head").ok());
  server_.Restart();
  EXPECT_EQ(Compute().status().code(), absl::StatusCode::kAborted);
  v1::ApplyStepRequest apply;
  apply.set_head("head");
  EXPECT_EQ(client_->ApplyStep(apply).status().code(), absl::StatusCode::kAborted);
  v1::CreateHeadRequest create;
  create.mutable_spec()->set_name("head");
  create.mutable_spec()->set_hidden_size(kD);
  create.mutable_spec()->set_vocab_size(10);
  ASSERT_TRUE(client_->CreateHead(create).ok());
  EXPECT_TRUE(Compute().ok()) << "creating the head acknowledges the restart";
}

TEST_F(RestartTest, GradientsOfADeletedHeadAreNotMissed) {
  ASSERT_TRUE(Compute().ok());
  ASSERT_TRUE(client_->DeleteHead("head").ok());
  v1::CreateHeadRequest create;
  create.mutable_spec()->set_name("head");
  create.mutable_spec()->set_hidden_size(kD);
  create.mutable_spec()->set_vocab_size(10);
  ASSERT_TRUE(Connect()->CreateHead(create).ok());
  const auto result = Compute();
  EXPECT_TRUE(result.ok()) << result.status();
}

TEST_F(RestartTest, BetweenStepsLosesNothing) {
  ASSERT_TRUE(Compute().ok());
  v1::ApplyStepRequest apply;
  apply.set_head("head");
  apply.set_expected_rows(kRows);
  ASSERT_TRUE(client_->ApplyStep(apply).ok());
  server_.Restart();
  Microbatch next = AsMicrobatch();
  next.step = 1;
  const auto result = client_->ComputeLoss(next, Outputs(), Options());
  EXPECT_TRUE(result.ok()) << result.status();
}

// Another thread may get the answer to its repeat when the next step has begun.
TEST_F(RestartTest, RepeatedStepDoesNotForgetTheNextOne) {
  ASSERT_TRUE(Compute().ok());
  v1::ApplyStepRequest apply;
  apply.set_head("head");
  ASSERT_TRUE(client_->ApplyStep(apply).ok());
  Microbatch next = AsMicrobatch();
  next.step = 1;
  ASSERT_TRUE(client_->ComputeLoss(next, Outputs(), Options()).ok());
  const auto repeat = client_->ApplyStep(apply);
  ASSERT_TRUE(repeat.ok()) << repeat.status();
  EXPECT_TRUE(repeat->repeated_call());
  server_.Restart();
  next.id = 2;
  EXPECT_EQ(client_->ComputeLoss(next, Outputs(), Options()).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(server_.accumulated("head"), 0) << "refused before anything was accumulated";
}

TEST_F(RestartTest, StepAppliedWithoutLostRowsIsAnError) {
  ASSERT_TRUE(Compute().ok());
  server_.Restart();
  v1::ApplyStepRequest apply;
  apply.set_head("head");
  EXPECT_EQ(client_->ApplyStep(apply).status().code(), absl::StatusCode::kAborted);
}

TEST_F(RestartTest, ContributionsNoticeARestart) {
  ASSERT_TRUE(Compute().ok());
  server_.Restart();
  const absl::Status status = Addition(7).Send(*client_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  const auto restart = RestartOf(status);
  ASSERT_TRUE(restart.has_value());
  EXPECT_EQ(restart->now, server_.incarnation());
  EXPECT_NE(restart->before, restart->now);
  EXPECT_EQ(server_.accumulated("head"), 0.0) << "left behind in the new process";
  client_->AcknowledgeRestart("head");
  EXPECT_TRUE(Addition(7).Send(*client_).ok());
  server_.Restart();
  EXPECT_EQ(Compute().status().code(), absl::StatusCode::kAborted) << "contributions count as gradients";
}

TEST_F(RestartTest, AnExpectedIncarnationIsInsistedOn) {
  const uint64_t before = server_.incarnation();
  const auto connect = [&] {
    return Client::Connect({.target = server_.target(), .expected_incarnation = before});
  };
  auto client = connect();
  ASSERT_TRUE(client.ok()) << client.status();
  server_.Restart();
  const auto restart = RestartOf(connect().status());
  ASSERT_TRUE(restart.has_value()) << connect().status();
  EXPECT_EQ(restart->before, before);
  EXPECT_EQ(restart->now, server_.incarnation());
  for (const absl::Status& status : {(*client)->ComputeLoss(AsMicrobatch(), Outputs(), Options()).status(),
                                     Addition(7).Send(**client).status()}) {
    EXPECT_TRUE(RestartOf(status).has_value()) << status;
  }
  (*client)->AcknowledgeRestart("head");
  EXPECT_TRUE((*client)->ComputeLoss(AsMicrobatch(), Outputs(), Options()).ok());
  EXPECT_FALSE(RestartOf(absl::AbortedError("the step's gradients were zeroed")).has_value());
}

}  // namespace
}  // namespace lossd::client::restart_test
