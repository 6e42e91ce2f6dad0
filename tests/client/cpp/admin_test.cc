// SPDX-License-Identifier: Apache-2.0
// Administration of heads and the connection itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "absl/time/clock.h"
#include "client/cpp/client.h"
#include "kernels/clocks/clock.h"
#include "tests/client/fake_server.h"

namespace lossd::client::admin_test {
namespace {

using ::testing::HasSubstr;

class AdminTest : public ::testing::Test {
 protected:
  void SetUp() override {
    server_.AddHead("head", 3, 7);
    client_ =
        Client::Connect({.target = server_.target(), .retry = {.initial_backoff = absl::Milliseconds(10)}})
            .value();
  }

  lossd::fake::FakeServer server_;
  std::unique_ptr<Client> client_;
};

TEST(ConnectTest, NoServerIsUnavailable) {
  const absl::Time start = clocks::SteadyNow();
  const auto client = Client::Connect({.target = "127.0.0.1:1", .connect_timeout = absl::Milliseconds(300)});
  EXPECT_EQ(client.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(client.status().message()), HasSubstr("no server at 127.0.0.1:1"));
  EXPECT_LT(clocks::SteadyNow() - start, absl::Seconds(5));
}

TEST(ConnectTest, WrongOptionsAreNamed) {
  EXPECT_THAT(std::string(Client::Connect({.channels = 0}).status().message()),
              HasSubstr("options.channels is 0"));
  EXPECT_THAT(std::string(Client::Connect({.target = ""}).status().message()), HasSubstr("options.target"));
  EXPECT_THAT(std::string(Client::Connect({.max_message_bytes = 1}).status().message()),
              HasSubstr("max_message_bytes"));
}

TEST_F(AdminTest, HeadsComeAndGo) {
  v1::CreateHeadRequest request;
  request.mutable_spec()->set_name("other");
  EXPECT_EQ(client_->CreateHead(request).status().code(), absl::StatusCode::kInvalidArgument);
  request.mutable_spec()->set_hidden_size(4);
  request.mutable_spec()->set_vocab_size(5);
  const auto created = client_->CreateHead(request);
  ASSERT_TRUE(created.ok()) << created.status();
  EXPECT_EQ(created->spec().vocab_size(), 5u);
  EXPECT_EQ(client_->CreateHead(request).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(client_->ListHeads()->size(), 2u);
  EXPECT_EQ(client_->DescribeHead("other")->spec().hidden_size(), 4u);
  EXPECT_TRUE(client_->DeleteHead("other").ok());
  EXPECT_EQ(client_->DeleteHead("other").code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(client_->DescribeHead("other").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(AdminTest, AHeadThatExistsIsKeptIfItIsTheSame) {
  v1::CreateHeadRequest request;
  request.mutable_spec()->set_name("other");
  request.mutable_spec()->set_hidden_size(4);
  request.mutable_spec()->set_vocab_size(5);
  EXPECT_EQ(client_->monitoring().KnownHiddenSize("other"), std::nullopt);
  ASSERT_TRUE(client_->CreateHead(request).ok());
  EXPECT_EQ(client_->monitoring().KnownHiddenSize("other"), 4u);
  EXPECT_TRUE(client_->CreateHead(request, absl::ZeroDuration(), IfExists::kKeep).ok());
  request.mutable_spec()->add_shares(2);
  request.mutable_spec()->add_shares(1);
  request.mutable_spec()->set_vocab_size(6);
  const absl::Status status = client_->CreateHead(request, absl::ZeroDuration(), IfExists::kReset).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(status.message()), HasSubstr("vocab_size 5 instead of 6"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("shares [] instead of [2, 1]"));
}

TEST_F(AdminTest, TensorsGoThereAndBack) {
  std::mt19937 random(std::random_device{}());
  std::vector<float> weight(7 * 3);
  for (float& value : weight) value = static_cast<float>(random() % 256) / 8;
  const auto written = client_->WriteTensor("head", v1::PARAM_WEIGHT, weight);
  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_EQ(written->rows().end(), 7u);
  const auto read = client_->ReadTensor("head", v1::PARAM_WEIGHT);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->rows, 7u);
  EXPECT_EQ(read->cols, 3u);
  EXPECT_EQ(read->values, weight);

  v1::OpenTensor open;
  open.set_head("head");
  open.set_param(v1::PARAM_WEIGHT);
  open.set_dtype(v1::DTYPE_FP32);
  open.mutable_rows()->set_begin(2);
  open.mutable_rows()->set_end(4);
  const std::vector<float> rows = {1, 2, 3, 4, 5, 6};
  ASSERT_TRUE(client_->WriteTensor(open, {reinterpret_cast<const char*>(rows.data()), 24}).ok());
  std::copy(rows.begin(), rows.end(), weight.begin() + 6);
  EXPECT_EQ(client_->ReadTensor("head", v1::PARAM_WEIGHT)->values, weight);

  v1::ReadTensorRequest request;
  request.set_head("head");
  request.set_param(v1::PARAM_WEIGHT);
  request.set_dtype(v1::DTYPE_BF16);
  request.mutable_rows()->set_begin(2);
  request.mutable_rows()->set_end(6);
  std::vector<char> raw(4 * 3 * 2);
  const auto shape = client_->ReadTensor(request, absl::MakeSpan(raw));
  ASSERT_TRUE(shape.ok()) << shape.status();
  EXPECT_EQ(shape->rows, 4u);
  EXPECT_EQ(shape->cols, 3u);
  float second = 0;
  std::copy(raw.begin() + 2, raw.begin() + 4, reinterpret_cast<char*>(&second) + 2);
  EXPECT_EQ(second, 2.0f);
}

TEST_F(AdminTest, WrongSizesOfTensorsAreErrors) {
  const std::vector<float> few(20);
  EXPECT_THAT(std::string(client_->WriteTensor("head", v1::PARAM_WEIGHT, few).status().message()),
              HasSubstr("payload has 80 bytes; 7 rows of 12 bytes"));
  v1::ReadTensorRequest request;
  request.set_head("head");
  request.set_param(v1::PARAM_WEIGHT);
  request.set_dtype(v1::DTYPE_FP32);
  std::vector<char> raw(83);
  EXPECT_THAT(std::string(client_->ReadTensor(request, absl::MakeSpan(raw)).status().message()),
              HasSubstr("out has 83 bytes; the rows have 7 x 3 elements of 4 bytes"));
  v1::OpenTensor open;
  open.set_head("head");
  open.set_param(v1::PARAM_WEIGHT);
  open.set_dtype(v1::DTYPE_FP32);
  const auto written = [&](std::vector<uint64_t> shape) {
    return std::string(
        client_->WriteTensor(open, {raw.data(), 84}, absl::ZeroDuration(), shape).status().message());
  };
  raw.resize(84);
  EXPECT_EQ(written({3, 7}), "values has shape [3, 7]; weight of head \"head\" takes [7, 3]");
  EXPECT_EQ(written({21}), "values has shape [21]; weight of head \"head\" takes [7, 3]");
  EXPECT_EQ(written({7, 3}), "");
  open.mutable_rows()->set_begin(2);
  open.mutable_rows()->set_end(8);
  EXPECT_EQ(written({}), "rows is [2, 8); weight of head \"head\" has rows [0, 7)");
  EXPECT_EQ(client_->ReadTensor("head", v1::PARAM_NORM_GAIN).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(client_->ReadTensor("head", v1::PARAM_UNSPECIFIED).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->ReadTensor("none", v1::PARAM_WEIGHT).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(AdminTest, ReadsAreRepeatedAndChangesAreNot) {
  server_.SetFaults({.refuse_calls = 2});
  EXPECT_TRUE(client_->ListHeads().ok());
  server_.SetFaults({.refuse_calls = 2});
  EXPECT_TRUE(client_->DescribeHead("head").ok());
  server_.SetFaults({.refuse_calls = 2});
  EXPECT_TRUE(client_->GetServer().ok());
  server_.SetFaults({.refuse_calls = 3});
  EXPECT_EQ(client_->ListHeads().status().code(), absl::StatusCode::kUnavailable);
  server_.SetFaults({.refuse_calls = 1});
  EXPECT_EQ(client_->ZeroGradients("head", 0).status().code(), absl::StatusCode::kUnavailable);
  server_.SetFaults({.refuse_calls = 1});
  v1::CreateHeadRequest request;
  EXPECT_EQ(client_->CreateHead(request).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(AdminTest, ZeroingNamesTheStep) {
  EXPECT_EQ(client_->ZeroGradients("head", 1).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(client_->ZeroGradients("head", 0).ok());
}

TEST_F(AdminTest, StepWhoseAnswerWasLostIsAppliedOnce) {
  server_.SetFaults({.refuse_calls = 1});
  v1::ApplyStepRequest request;
  request.set_head("head");
  request.set_step(0);
  const auto result = client_->ApplyStep(request);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(result->repeated_call());
  EXPECT_EQ(result->state().step(), 1u);
}

// A server of an earlier version would apply the step and pass the option over, at a new head too.
TEST_F(AdminTest, LazyRowsAreAskedOfServersThatKnowThem) {
  std::vector<bool> asked;
  const auto note = [&](const v1::ApplyStepRequest& request) {
    asked.push_back(request.optimizer().lazy_rows());
    return fake::Fault();
  };
  v1::ApplyStepRequest request;
  request.set_head("head");
  request.mutable_optimizer()->mutable_adamw()->set_learning_rate(0.1);
  request.mutable_optimizer()->set_lazy_rows(true);
  server_.SetFaults({.on_apply = note});
  EXPECT_TRUE(client_->ApplyStep(request).ok());
  EXPECT_EQ(asked, std::vector<bool>{true});

  fake::FakeServer earlier({.histories = false});
  earlier.AddHead("head", 4, 10);
  earlier.SetFaults({.on_apply = note});
  const auto client = Client::Connect({.target = earlier.target()});
  ASSERT_TRUE(client.ok()) << client.status();
  const absl::Status refused = (*client)->ApplyStep(request).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("does not know lazy_rows"));
  EXPECT_EQ(asked.size(), 1u);
  request.mutable_optimizer()->set_lazy_rows(false);
  EXPECT_TRUE((*client)->ApplyStep(request).ok());
  EXPECT_EQ(asked, (std::vector<bool>{true, false}));
}

TEST_F(AdminTest, CheckpointWhoseDeletionsAnswerWasLostIsDeletedOnce) {
  server_.SetFaults({.refuse_calls = 2});
  const auto deleted = client_->DeleteCheckpoint("head/old");
  ASSERT_TRUE(deleted.ok()) << deleted.status();
  EXPECT_TRUE(deleted->repeated_call());
  EXPECT_EQ(deleted->bytes(), 3u << 20);
  EXPECT_EQ(server_.deletions(), 1u);
  // Another call is another deletion.
  EXPECT_FALSE(client_->DeleteCheckpoint("head/old")->repeated_call());
  EXPECT_EQ(server_.deletions(), 2u);
  const absl::Status status = client_->DeleteCheckpoint("head/missing").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ErrorDetailOf(status)->field(), "checkpoint");
}

TEST_F(AdminTest, RefusedStepSaysWhatIsMissing) {
  v1::ApplyStepRequest request;
  request.set_head("head");
  request.set_expected_rows(5);
  const auto status = client_->ApplyStep(request).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ErrorDetailOf(status)->field(), "expected_rows");
}

TEST_F(AdminTest, CheckpointsServerAndHealth) {
  EXPECT_EQ(client_->SaveCheckpoint("head", "best")->checkpoint(), "head/best");
  EXPECT_EQ(client_->LoadCheckpoint("head/best")->spec().name(), "head");
  EXPECT_EQ(client_->LoadCheckpoint("gone/best").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(client_->GetServer()->incarnation(), server_.incarnation());
  EXPECT_EQ(client_->monitoring().CheckHealth().value(), Health::kServing);
  EXPECT_EQ(client_->monitoring().CheckHealth("no.such.Service").value(), Health::kUnknownService);
}

}  // namespace
}  // namespace lossd::client::admin_test
