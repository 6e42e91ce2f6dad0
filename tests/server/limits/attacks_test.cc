// SPDX-License-Identifier: Apache-2.0
// What one client can take from a server and from its other clients. Each test attacks a lossd process of its
// own, and meanwhile an honest client trains and saves. "Memory does not grow with traffic" is checked on the
// process: its resident memory stays below the plan and kOverhead.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/server/limits/attacks_fixture.h"

namespace lossd::app::testing::attacks_test {
namespace {

// ---- Memory ----

TEST_F(AttacksTest, UnfinishedRequestsOfOneConnection) {
  Start();
  std::vector<std::unique_ptr<RawHttp2>> connections;
  connections.push_back(std::make_unique<RawHttp2>(server_->target()));
  for (int i = 0; i < 200; ++i) {
    const uint32_t call = connections[0]->Call("/lossd.v1.HeadService/ApplyStep");
    connections[0]->Message(call, 5 * kMebibyte, "", 5 * kMebibyte - 1);
  }
  Pump(connections, absl::Seconds(5));
  ExpectBounded();
  Train();
}

TEST_F(AttacksTest, UnfinishedRequestsOfManyConnections) {
  Start();
  std::vector<std::unique_ptr<RawHttp2>> connections;
  for (int i = 0; i < 40; ++i) {
    connections.push_back(std::make_unique<RawHttp2>(server_->target()));
    for (int j = 0; j < 10; ++j) {
      const char* const path =
          j % 2 == 0 ? "/lossd.v1.HeadService/ApplyStep" : "/lossd.v1.LossService/ComputeLoss";
      connections.back()->Message(connections.back()->Call(path), 5 * kMebibyte, "", 5 * kMebibyte - 1);
    }
  }
  Pump(connections, absl::Seconds(8));
  ExpectBounded();
  connections.clear();
  client_ = TestClient::Connect(server_->target());
  Train();
}

TEST_F(AttacksTest, AbandonedMicrobatches) {
  Start();
  for (uint64_t id = 0; id < 100; ++id) {
    const auto stream = client_->OpenLoss();
    stream->SendOpen(Open(id, 1'000'000, step_));
    EXPECT_TRUE(stream->ReadOne()) << id;
    stream->Cancel();
    stream->Finish();
  }
  ExpectBounded();
  Train();
}

TEST_F(AttacksTest, ManyIdleStreamsWithManyRows) {
  Start();
  std::vector<std::unique_ptr<RawHttp2>> connections;
  for (uint64_t i = 0; i < 10; ++i) {
    connections.push_back(std::make_unique<RawHttp2>(server_->target()));
    for (uint64_t j = 0; j < 20; ++j) {
      const uint32_t call = connections.back()->Call("/lossd.v1.LossService/ComputeLoss");
      connections.back()->Message(call, OpenMessage(100 * i + j, 1'000'000, step_));
    }
  }
  Pump(connections, absl::Seconds(5));
  ExpectBounded();
  Train();
}

TEST_F(AttacksTest, ManyConnections) {
  Start();
  std::vector<std::unique_ptr<RawHttp2>> connections;
  for (int i = 0; i < 1000; ++i) {
    const test::AsUser as(60'000 + i % 100);  // without root all are of one user, and fewer come in
    connections.push_back(
        std::make_unique<RawHttp2>(server_->target(), absl::StrCat("127.0.0.", 2 + i % 100)));
  }
  Pump(connections, absl::Seconds(3));
  ExpectBounded();
  int open = 0;
  for (const auto& connection : connections) open += connection->open() ? 1 : 0;
  EXPECT_LE(open, 512);
  Train();  // its connection is open
  connections.clear();
  client_ = TestClient::Connect(server_->target());
  Train();
}

TEST_F(AttacksTest, ListsOfMicrobatches) {
  Start();
  v1::ApplyStepRequest request;
  request.set_head("head");
  request.set_step(step_);
  request.mutable_optimizer()->mutable_sgd()->set_learning_rate(0.1f);
  for (uint64_t id = 0; id < 1'000'000; ++id) request.add_expected_microbatches(id);
  const absl::Status refused = client_->ApplyStep(request).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
  EXPECT_TRUE(absl::StrContains(refused.message(), "expected_microbatches.size")) << refused;
  ExpectBounded();
  Train();
}

TEST_F(AttacksTest, GradientsThatAreOpenedAndNotSent) {
  Start();
  for (uint64_t id = 0; id < 2000; ++id) {
    v1::OpenGradient open;
    open.set_head("head");
    open.set_step(step_);
    open.set_contribution_id(id);
    open.set_param(v1::PARAM_WEIGHT);
    open.set_dtype(v1::DTYPE_FP32);
    EXPECT_FALSE(client_->AddGradient(open, "").ok());
  }
  EXPECT_EQ(client_->DescribeHead("head")->step_contributions(), 0u);
  ExpectBounded();
  Train();
}

// ---- Places ----

TEST_F(AttacksTest, IdleWritesLeaveRoomForSaves) {
  Start();
  std::vector<std::unique_ptr<RawHttp2>> connections;
  for (int i = 0; i < 32; ++i) {
    connections.push_back(std::make_unique<RawHttp2>(server_->target()));
    for (int j = 0; j < 4; ++j) connections.back()->Call("/lossd.v1.HeadService/WriteTensor");
  }
  Pump(connections, absl::Seconds(1));
  Train();  // with a save
}

TEST_F(AttacksTest, IdleCallsOfOneConnectionLeaveRoomForOthers) {
  Start();
  std::vector<std::unique_ptr<RawHttp2>> connections;
  connections.push_back(std::make_unique<RawHttp2>(server_->target()));
  for (uint64_t i = 0; i < 600; ++i) {
    const uint32_t call = connections[0]->Call("/lossd.v1.LossService/ComputeLoss");
    if (i % 4 != 0) connections[0]->Message(call, OpenMessage(i, 10, step_));
  }
  Pump(connections, absl::Seconds(2));
  Train();
}

TEST_F(AttacksTest, IdleCallsEnd) {
  Start({"--open_timeout=10s", "--idle_timeout=10s", "--turn_timeout=1h", "--send_timeout=1h"});
  std::vector<std::unique_ptr<RawHttp2>> connections;
  connections.push_back(std::make_unique<RawHttp2>(server_->target()));
  for (uint64_t i = 0; i < 30; ++i) {
    connections[0]->Call("/lossd.v1.HeadService/WriteTensor");
    connections[0]->Call("/lossd.v1.HeadService/AddGradient");
    const uint32_t call = connections[0]->Call("/lossd.v1.LossService/ComputeLoss");
    if (i % 2 == 0) connections[0]->Message(call, OpenMessage(i, 10, step_));
  }
  connections[0]->Pump(absl::Milliseconds(100));
  EXPECT_GT(connections[0]->calls(), 0u);
  const absl::Time limit = absl::Now() + absl::Minutes(2);
  while (connections[0]->calls() > 0 && absl::Now() < limit) connections[0]->Pump(absl::Milliseconds(50));
  EXPECT_EQ(connections[0]->calls(), 0u);
  Train();
}

// A client that looks after its connection every few seconds, while a call waits, keeps it.
TEST_F(AttacksTest, PingsOfACallThatWaitsAreTaken) {
  Start();
  RawHttp2 connection(server_->target());
  connection.Call("/lossd.v1.LossService/ComputeLoss");
  for (int i = 0; i < 8; ++i) {
    connection.Ping();
    connection.Pump(absl::Milliseconds(1500));
  }
  EXPECT_TRUE(connection.open());
  EXPECT_EQ(connection.calls(), 1u);
  for (int i = 0; i < 50 && connection.open(); ++i) {  // too many of them are not
    connection.Ping();
    connection.Pump(absl::Milliseconds(10));
  }
  EXPECT_FALSE(connection.open());
  Train();
}

// Every method whose call begins with one request, and does not send more of it than its length.
void BeginRequests(RawHttp2* connection) {
  for (const char* method :
       {"HeadService/ApplyStep", "HeadService/CreateHead", "HeadService/DeleteHead",
        "HeadService/DescribeHead", "HeadService/GradNorm", "HeadService/ListCheckpoints",
        "HeadService/ListHeads", "HeadService/LoadCheckpoint", "HeadService/ReadTensor",
        "HeadService/SaveCheckpoint", "HeadService/ZeroGradients", "LossService/ReleaseMicrobatch",
        "ServerService/GetServer"}) {
    connection->Message(connection->Call(absl::StrCat("/lossd.v1.", method)), 100, "", 50);
  }
}

TEST_F(AttacksTest, UnfinishedRequestsEnd) {
  Start({"--open_timeout=10s", "--idle_timeout=1h", "--turn_timeout=1h", "--send_timeout=1h"});
  RawHttp2 connection(server_->target());
  BeginRequests(&connection);
  connection.Pump(absl::Milliseconds(100));
  EXPECT_GT(connection.calls(), 0u);
  const absl::Time limit = absl::Now() + absl::Minutes(2);
  while (connection.calls() > 0 && absl::Now() < limit) connection.Pump(absl::Milliseconds(50));
  EXPECT_EQ(connection.calls(), 0u);
  EXPECT_TRUE(connection.open());
  Train();
}

TEST_F(AttacksTest, UnfinishedRequestsAreFewForEachPeerAndInAll) {
  Start();
  std::vector<std::unique_ptr<RawHttp2>> connections;
  for (int i = 0; i < 12; ++i) {
    connections.push_back(std::make_unique<RawHttp2>(server_->target()));
    for (int j = 0; j < 23; ++j) BeginRequests(connections.back().get());  // 299
  }
  size_t open = 0;
  const absl::Time limit = absl::Now() + absl::Minutes(2);
  do {  // until the server has seen them all
    Pump(connections, absl::Seconds(1));
    open = 0;
    for (const auto& connection : connections) open += connection->calls();
  } while (open > 256 && absl::Now() < limit);
  EXPECT_LE(open, 256u);  // --max_waiting_calls
  for (const auto& connection : connections) EXPECT_LE(connection->calls(), 128u);
  ExpectBounded();
  Train();  // what holds nothing finds a place
}

}  // namespace
}  // namespace lossd::app::testing::attacks_test
