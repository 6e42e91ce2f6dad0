// SPDX-License-Identifier: Apache-2.0
// Resets, heads that exist already, and the run that every call of a trainer names.
#include <cstdlib>
#include <set>

#include "tests/client/cpp/faults_fixture.h"

namespace lossd::client::resets_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::SizeIs;

v1::ResetHeadRequest ResetOf(v1::ResetScope scope) {
  v1::ResetHeadRequest request;
  request.set_head("head");
  request.set_scope(scope);
  return request;
}

class ResetsTest : public FaultsTest {
 protected:
  absl::StatusOr<v1::ApplyStepResponse> Apply(uint64_t step) {
    v1::ApplyStepRequest request;
    request.set_head("head");
    request.set_step(step);
    request.mutable_optimizer()->mutable_sgd()->set_learning_rate(1.0);
    return client_->ApplyStep(request);
  }
  v1::CreateHeadRequest Same() {
    v1::CreateHeadRequest request;
    *request.mutable_spec() = client_->DescribeHead("head")->spec();
    return request;
  }
};

TEST_F(ResetsTest, AResetWhoseAnswerIsLostIsDoneOnce) {
  ASSERT_TRUE(Apply(0).ok());
  std::vector<v1::ResetHeadRequest> seen;
  const uint64_t incarnation = client_->DescribeHead("head")->state().incarnation();
  server_.SetFaults({.refuse_calls = 1, .on_reset = [&](const v1::ResetHeadRequest& request) {
                       seen.push_back(request);
                       return lossd::fake::Fault();
                     }});
  v1::ResetHeadRequest request = ResetOf(v1::RESET_SCOPE_ALL);
  request.set_incarnation(incarnation);
  const auto reset = client_->ResetHead(request);
  ASSERT_TRUE(reset.ok()) << reset.status();
  EXPECT_TRUE(reset->repeated_call());
  EXPECT_EQ(reset->head().state().step(), 0u);
  ASSERT_THAT(seen, SizeIs(2));
  EXPECT_EQ(seen[0].SerializeAsString(), seen[1].SerializeAsString());
  EXPECT_THAT(seen[0].reset_id(), SizeIs(32));
  // Another reset has another id.
  ASSERT_TRUE(client_->ResetHead(ResetOf(v1::RESET_SCOPE_OPTIMIZER)).ok());
  EXPECT_NE(seen.back().reset_id(), seen[0].reset_id());
  EXPECT_EQ(seen.back().incarnation(), incarnation);
  // One that the caller names stays.
  v1::ResetHeadRequest named = ResetOf(v1::RESET_SCOPE_OPTIMIZER);
  named.set_reset_id("mine");
  ASSERT_TRUE(client_->ResetHead(named).ok());
  EXPECT_EQ(seen.back().reset_id(), "mine");
}

TEST_F(ResetsTest, AResetMeansTheProcessThatHasTheHead) {
  server_.SetFaults(
      {.on_reset = [&](const v1::ResetHeadRequest&) { return lossd::fake::Fault{.restart = true}; }});
  const uint64_t before = server_.incarnation();
  const absl::Status reset = client_->ResetHead(ResetOf(v1::RESET_SCOPE_ALL)).status();
  EXPECT_EQ(reset.code(), absl::StatusCode::kAborted) << reset;
  ASSERT_TRUE(RestartOf(reset).has_value()) << reset;
  EXPECT_EQ(RestartOf(reset)->before, before);
}

TEST_F(ResetsTest, RowsOfTheStepAreForgotten) {
  for (const v1::ResetScope scope : {v1::RESET_SCOPE_OPTIMIZER, v1::RESET_SCOPE_ALL}) {
    ASSERT_TRUE(Compute().ok());
    ASSERT_TRUE(client_->ResetHead(ResetOf(scope)).ok());
    const auto again = Compute();
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->accumulated_rows, kRows);
    ASSERT_TRUE(client_->ZeroGradients("head", 0).ok());
  }
  EXPECT_EQ(client_->ResetHead(ResetOf(v1::RESET_SCOPE_ALL)).status(), absl::OkStatus());
  v1::ResetHeadRequest unknown = ResetOf(v1::RESET_SCOPE_ALL);
  unknown.set_head("none");
  EXPECT_EQ(client_->ResetHead(unknown).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(ResetsTest, WhatBecomesOfAHeadThatExists) {
  ASSERT_TRUE(Apply(0).ok());
  EXPECT_EQ(client_->CreateHead(Same()).status().code(), absl::StatusCode::kAlreadyExists);
  const auto kept = client_->CreateHead(Same(), absl::ZeroDuration(), IfExists::kKeep);
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_EQ(kept->state().step(), 1u);
  for (const IfExists choice : {IfExists::kKeep, IfExists::kReset}) {
    v1::CreateHeadRequest other = Same();
    other.mutable_spec()->set_vocab_size(11);
    other.mutable_spec()->set_frozen(true);
    const absl::Status refused = client_->CreateHead(other, absl::ZeroDuration(), choice).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kAlreadyExists);
    EXPECT_THAT(std::string(refused.message()),
                AllOf(HasSubstr("vocab_size 10 instead of 11"), HasSubstr("frozen false instead of true")));
    EXPECT_EQ(ErrorDetailOf(refused)->field(), "spec.vocab_size");
  }
  std::vector<v1::ResetHeadRequest> seen;
  server_.SetFaults({.on_reset = [&](const v1::ResetHeadRequest& request) {
    seen.push_back(request);
    return lossd::fake::Fault();
  }});
  v1::CreateHeadRequest seeded = Same();
  seeded.mutable_kaiming_uniform()->set_seed(5);
  const auto reset = client_->CreateHead(seeded, absl::ZeroDuration(), IfExists::kReset);
  ASSERT_TRUE(reset.ok()) << reset.status();
  EXPECT_EQ(reset->state().step(), 0u);
  ASSERT_THAT(seen, SizeIs(1));
  EXPECT_EQ(seen[0].scope(), v1::RESET_SCOPE_ALL);
  EXPECT_EQ(seen[0].kaiming_uniform().seed(), 5u);
}

TEST_F(ResetsTest, EveryCallOfATrainerNamesItsRun) {
  const auto named = Client::Connect({.target = server_.target(), .run = "job 17"});
  ASSERT_TRUE(named.ok()) << named.status();
  std::set<std::string> runs;
  server_.SetFaults({.on_request =
                         [&](const v1::ComputeLossRequest& request) {
                           if (request.has_open()) runs.insert("open " + request.open().run());
                           if (request.has_backward()) runs.insert("backward " + request.backward().run());
                           return lossd::fake::Fault();
                         },
                     .on_add =
                         [&](const v1::OpenGradient& open) {
                           runs.insert("add " + open.run());
                           return lossd::fake::Fault();
                         },
                     .on_apply =
                         [&](const v1::ApplyStepRequest& request) {
                           runs.insert("apply " + request.run());
                           return lossd::fake::Fault();
                         }});
  ASSERT_TRUE((*named)->ComputeLoss(AsMicrobatch(), Outputs(), Options()).ok());
  v1::OpenGradient open;
  open.set_head("head");
  open.set_param(v1::PARAM_WEIGHT);
  open.set_contribution_id(9);
  open.set_dtype(v1::DTYPE_FP32);
  const std::vector<char> values(10 * kD * sizeof(float));
  ASSERT_TRUE((*named)->AddGradient(open, values).ok());
  v1::ApplyStepRequest request;
  request.set_head("head");
  request.mutable_optimizer()->mutable_sgd()->set_learning_rate(1.0);
  ASSERT_TRUE((*named)->ApplyStep(request).ok());
  EXPECT_EQ(runs, (std::set<std::string>{"add job 17", "apply job 17", "open job 17"}));
}

TEST_F(ResetsTest, ARunHasAName) {
  ::unsetenv("LOSSD_RUN");
  EXPECT_THAT(RunFromEnvironment(), MatchesRegex(".*:[0-9]+-[0-9a-f]{8}"));
  EXPECT_NE(RunFromEnvironment(), RunFromEnvironment());
  ::setenv("LOSSD_RUN", "from the environment", 1);
  EXPECT_EQ(ClientOptions().run, "from the environment");
  ::unsetenv("LOSSD_RUN");
  EXPECT_TRUE(Client::Connect({.target = server_.target(), .run = ""}).ok());
  std::string long_name;
  for (int i = 0; i < 128; ++i) long_name += "\u00e4";
  EXPECT_TRUE(Client::Connect({.target = server_.target(), .run = long_name}).ok());
  for (const std::string& run : {long_name + "x", std::string("a\nb"), std::string("\xff")}) {
    const absl::Status refused = Client::Connect({.target = server_.target(), .run = run}).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ErrorDetailOf(refused)->field(), "options.run");
  }
}

}  // namespace
}  // namespace lossd::client::resets_test
