// SPDX-License-Identifier: Apache-2.0
// Tests of what a server says of its clients and their calls (ListStreams), and of clients that come over a
// Unix socket.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/client.h"
#include "client/cpp/regions.h"
#include "kernels/clocks/clock.h"
#include "proto/wire/status_details.h"
#include "tests/server/service/service_client.h"
#include "tests/server/service/service_fixture.h"
#include "tests/server/service/small_training.h"

namespace lossd::app::testing::list_streams_test {
namespace {

using client::internal::SharedRegion;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr int64_t kRows = 8;
constexpr uint64_t kRowBytes = kSmallHidden * sizeof(float);

class ListStreamsTest : public ::testing::Test {
 protected:
  ListStreamsTest() : client_(server_.Connect()), observer_(server_.Connect()) {
    EXPECT_TRUE(client_->CreateHead(SmallHead()).ok());
  }

  static v1::OpenMicrobatch Open(uint64_t id, int64_t rows = kRows) {
    v1::OpenMicrobatch open = OpenSum(std::vector<int32_t>(static_cast<size_t>(rows), 1));
    open.set_step(0);
    open.set_microbatch_id(id);
    return open;
  }
  static std::string Rows(int64_t rows) {
    return Bytes(std::vector<float>(static_cast<size_t>(rows) * kSmallHidden, 0.25f));
  }

  // One that has room for 64 KiB of answers that it has not read.
  std::unique_ptr<TestClient> SlowClient() const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);  // else the room grows
    return TestClient::Over(
        grpc::CreateCustomChannel(server_.target(), grpc::InsecureChannelCredentials(), arguments));
  }

  v1::ListStreamsResponse List(uint32_t max_streams = 0) {
    const auto answer = observer_->ListStreams(max_streams);
    EXPECT_TRUE(answer.ok()) << answer.status();
    return answer.value_or(v1::ListStreamsResponse());
  }
  // What is listed once `there` is true of it.
  v1::ListStreamsResponse ListWhen(const std::function<bool(const v1::ListStreamsResponse&)>& there) {
    const absl::Time limit = clocks::SteadyNow() + absl::Minutes(1);
    v1::ListStreamsResponse answer = List();
    while (!there(answer) && clocks::SteadyNow() < limit) {
      absl::SleepFor(absl::Milliseconds(2));
      answer = List();
    }
    EXPECT_TRUE(there(answer)) << answer.DebugString();
    return answer;
  }
  static bool NoneOpen(const v1::ListStreamsResponse& answer) { return answer.streams().empty(); }

  TestServer server_;
  std::unique_ptr<TestClient> client_;
  std::unique_ptr<TestClient> observer_;  // by a connection of its own
};

TEST_F(ListStreamsTest, AServerWithoutClientsListsNone) {
  const v1::ListStreamsResponse first = List();
  EXPECT_EQ(first.incarnation(), server_.server().incarnation());
  EXPECT_GT(first.time_seconds(), 0);
  EXPECT_TRUE(first.peers().empty()) << "who only asks sends no rows: " << first.DebugString();
  EXPECT_TRUE(first.streams().empty());
  EXPECT_EQ(first.streams_left_out(), 0u);
  absl::SleepFor(absl::Milliseconds(5));
  EXPECT_GT(List().time_seconds(), first.time_seconds());
}

TEST_F(ListStreamsTest, AStreamFromItsBeginningToItsEnd) {
  const auto stream = client_->OpenLoss();
  v1::ListStreamsResponse answer = ListWhen([](const auto& now) { return now.streams_size() == 1; });
  ASSERT_EQ(answer.streams_size(), 1);
  EXPECT_EQ(answer.streams(0).waits_for(), v1::STREAM_WAIT_OPEN);
  EXPECT_EQ(answer.streams(0).head(), "");
  EXPECT_THAT(answer.streams(0).peer(), StartsWith("127.0.0.1:"));
  const uint64_t number = answer.streams(0).number();

  ASSERT_TRUE(stream->SendOpen(Open(/*id=*/7)));
  ASSERT_TRUE(stream->SendSlice(0, 5, Rows(5)));
  answer = ListWhen([](const auto& now) {
    return now.streams_size() == 1 && now.streams(0).sent_rows() == 5 &&
           now.streams(0).waits_for() == v1::STREAM_WAIT_CLIENT;
  });
  ASSERT_EQ(answer.streams_size(), 1);
  const v1::StreamDescription& open = answer.streams(0);
  EXPECT_EQ(open.number(), number);
  EXPECT_EQ(open.head(), "head");
  EXPECT_EQ(open.microbatch_id(), 7u);
  EXPECT_FALSE(open.backward());
  EXPECT_FALSE(open.shared_memory());
  EXPECT_EQ(open.rows(), 8u);
  EXPECT_EQ(open.queued_rows(), 5u);
  EXPECT_EQ(open.received_bytes(), 5 * kRowBytes);
  EXPECT_EQ(open.sent_bytes(), 5 * kRowBytes);
  EXPECT_EQ(open.staging_bytes(), 0u);
  EXPECT_GE(open.age_seconds(), open.wait_seconds());
  ASSERT_EQ(answer.peers_size(), 1);
  EXPECT_EQ(answer.peers(0).peer(), open.peer());
  EXPECT_EQ(answer.peers(0).open_streams(), 1u);

  ASSERT_TRUE(stream->SendSlice(5, 8, Rows(3)));
  stream->HalfClose();
  ASSERT_TRUE(stream->Finish().status.ok());
  answer = ListWhen(NoneOpen);
  ASSERT_EQ(answer.peers_size(), 1);
  const v1::PeerDescription& peer = answer.peers(0);
  EXPECT_EQ(peer.open_streams(), 0u);
  EXPECT_EQ(peer.streams(), 1u);
  EXPECT_EQ(peer.rows(), 8u);
  EXPECT_EQ(peer.received_bytes(), 8 * kRowBytes);
  EXPECT_EQ(peer.sent_bytes(), 8 * kRowBytes);
  EXPECT_EQ(peer.staging_bytes(), 0u);
  EXPECT_GE(peer.idle_seconds(), 0);
}

TEST_F(ListStreamsTest, AClientThatTakesNothingIsSeenToHoldMemory) {
  // 2 MiB there and back: more than the server holds, and more than the client does before it reads.
  constexpr int64_t kSlices = 32, kSliceRows = 640;
  const auto client = SlowClient();
  const auto stream = client->OpenLoss(absl::Minutes(5));
  ASSERT_TRUE(stream->SendOpen(Open(1, kSlices * kSliceRows)));
  std::thread sender([&] {
    const std::string rows = Rows(kSliceRows);
    for (int64_t i = 0; i < kSlices; ++i) {
      if (!stream->SendSlice(i * kSliceRows, (i + 1) * kSliceRows, rows)) return;
    }
  });
  const v1::ListStreamsResponse answer = ListWhen([](const auto& now) {
    return now.streams_size() == 1 && now.streams(0).waits_for() == v1::STREAM_WAIT_SEND &&
           now.streams(0).wait_seconds() > 0.1;
  });
  stream->Cancel();
  sender.join();
  ASSERT_EQ(answer.streams_size(), 1);
  EXPECT_GT(answer.streams(0).staging_bytes(), 0u);
  EXPECT_LT(answer.streams(0).sent_rows(), answer.streams(0).queued_rows());
  ASSERT_EQ(answer.peers_size(), 1);
  EXPECT_EQ(answer.peers(0).staging_bytes(), answer.streams(0).staging_bytes());
  const v1::ListStreamsResponse after = ListWhen(NoneOpen);
  ASSERT_EQ(after.peers_size(), 1);
  EXPECT_EQ(after.peers(0).staging_bytes(), 0u);
}

TEST_F(ListStreamsTest, GradientsOfRetainedRows) {
  constexpr int64_t kRetained = 2400, kSliceRows = 600;
  v1::OpenMicrobatch open = Open(3, kRetained);
  open.set_reduction(v1::REDUCTION_NONE);
  open.set_want_grad_hidden(false);
  open.set_retain(true);
  const auto forward = client_->OpenLoss();
  ASSERT_TRUE(forward->SendOpen(open));
  for (int64_t row = 0; row < kRetained; row += kSliceRows) {
    ASSERT_TRUE(forward->SendSlice(row, row + kSliceRows, Rows(kSliceRows)));
  }
  forward->HalfClose();
  ASSERT_TRUE(forward->Finish().status.ok());

  v1::ComputeLossRequest request;
  request.mutable_backward()->set_head("head");
  request.mutable_backward()->set_microbatch_id(3);
  request.mutable_backward()->mutable_rows()->set_end(kRetained);
  request.mutable_backward()->mutable_grad_loss()->Resize(kRetained, 1.0f);
  request.mutable_backward()->set_want_grad_hidden(true);
  const auto client = SlowClient();
  const auto backward = client->OpenLoss();
  ASSERT_TRUE(backward->Send(request));
  const v1::ListStreamsResponse answer = ListWhen([](const auto& now) {
    return now.streams_size() == 1 && now.streams(0).waits_for() == v1::STREAM_WAIT_SEND &&
           now.streams(0).queued_rows() == kRetained;
  });
  ASSERT_EQ(answer.streams_size(), 1);
  EXPECT_TRUE(answer.streams(0).backward());
  EXPECT_EQ(answer.streams(0).microbatch_id(), 3u);
  EXPECT_EQ(answer.streams(0).rows(), static_cast<uint64_t>(kRetained));
  EXPECT_EQ(answer.streams(0).received_bytes(), 0u) << "the server has had the rows before";
  EXPECT_EQ(answer.streams(0).sent_bytes(), answer.streams(0).sent_rows() * kRowBytes);
  backward->HalfClose();
  EXPECT_TRUE(backward->Finish().status.ok());
}

TEST_F(ListStreamsTest, StreamsInSharedMemorySaySo) {
  const auto region = SharedRegion::Open(client_->GetServer()->region_socket(), 64 << 10, absl::Seconds(60));
  ASSERT_TRUE(region.ok()) << region.status();
  v1::OpenMicrobatch open = Open(1);
  open.set_region((*region)->id());
  const auto stream = client_->OpenLoss();
  ASSERT_TRUE(stream->SendOpen(open));
  v1::ComputeLossRequest slice;
  slice.mutable_slice()->mutable_rows()->set_end(kRows / 2);
  slice.mutable_slice()->mutable_in_region()->set_bytes(kRows / 2 * kRowBytes);
  ASSERT_TRUE(stream->Send(slice));
  const v1::ListStreamsResponse answer = ListWhen(
      [](const auto& now) { return now.streams_size() == 1 && now.streams(0).sent_rows() == kRows / 2; });
  ASSERT_EQ(answer.streams_size(), 1);
  EXPECT_TRUE(answer.streams(0).shared_memory());
  EXPECT_EQ(answer.streams(0).received_bytes(), kRows / 2 * kRowBytes);
  stream->Cancel();
}

TEST_F(ListStreamsTest, EachConnectionOfThisMachineIsAPeer) {
  const auto other = server_.Connect();
  std::vector<std::unique_ptr<LossStream>> streams;
  for (TestClient* client : {client_.get(), client_.get(), other.get()}) {
    streams.push_back(client->OpenLoss());
    ASSERT_TRUE(streams.back()->SendOpen(Open(streams.size())));
    ListWhen([&](const auto& now) { return now.streams_size() == static_cast<int>(streams.size()); });
  }
  const v1::ListStreamsResponse answer =
      ListWhen([](const auto& now) { return now.streams_size() == 3 && now.streams(2).rows() == kRows; });
  ASSERT_EQ(answer.peers_size(), 2);
  ASSERT_EQ(answer.streams_size(), 3);
  EXPECT_LT(answer.peers(0).peer(), answer.peers(1).peer());
  EXPECT_EQ(answer.peers(0).open_streams() + answer.peers(1).open_streams(), 3u);
  EXPECT_EQ(answer.streams(0).peer(), answer.streams(1).peer());
  EXPECT_NE(answer.streams(0).peer(), answer.streams(2).peer());
  EXPECT_LT(answer.streams(0).number(), answer.streams(1).number());
  EXPECT_LT(answer.streams(1).number(), answer.streams(2).number());

  // The oldest come first; peers count all of them.
  const v1::ListStreamsResponse two = List(2);
  ASSERT_EQ(two.streams_size(), 2);
  EXPECT_EQ(two.streams(1).number(), answer.streams(1).number());
  EXPECT_EQ(two.streams_left_out(), 1u);
  EXPECT_EQ(two.peers_size(), 2);
  for (const auto& stream : streams) stream->Cancel();
}

TEST_F(ListStreamsTest, TheNumberOfStreamsIsBounded) {
  EXPECT_TRUE(observer_->ListStreams(10'000).ok());
  for (const uint32_t most : {10'001u, 4'294'967'295u}) {
    const absl::Status refused = observer_->ListStreams(most).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
    const v1::ErrorDetail detail = wire::GetErrorDetail(refused).value_or(v1::ErrorDetail());
    EXPECT_EQ(detail.field(), "max_streams");
    EXPECT_EQ(detail.value(), absl::StrCat(most));
    EXPECT_THAT(std::string(refused.message()), HasSubstr("at most 10000"));
  }
}

TEST_F(ListStreamsTest, WhileStreamsComeAndGo) {
  std::atomic<bool> over{false};
  std::vector<std::thread> trainers;
  for (uint64_t trainer = 0; trainer < 3; ++trainer) {
    trainers.emplace_back([&, trainer] {
      const auto client = server_.Connect();
      for (uint64_t i = 0; !over; ++i) {
        const auto stream = client->OpenLoss();
        stream->SendOpen(Open(trainer * 1'000'000 + i));
        stream->SendSlice(0, i % 3 == 0 ? 4 : kRows, Rows(i % 3 == 0 ? 4 : kRows));
        if (i % 3 == 0) {
          stream->Cancel();
        } else {
          stream->HalfClose();
        }
        const absl::Status status = stream->Finish().status;
        EXPECT_TRUE(status.ok() || absl::IsCancelled(status)) << status;
      }
    });
  }
  uint64_t rows = 0;
  const absl::Time limit = clocks::SteadyNow() + absl::Minutes(2);
  while (rows < 4000 && clocks::SteadyNow() < limit) {
    const v1::ListStreamsResponse answer = List();
    uint64_t now = 0, staging = 0, of_streams = 0;
    for (const v1::PeerDescription& peer : answer.peers()) {
      now += peer.rows();
      staging += peer.staging_bytes();
      EXPECT_LE(peer.open_streams(), peer.streams());
    }
    for (const v1::StreamDescription& stream : answer.streams()) {
      of_streams += stream.staging_bytes();
      EXPECT_LE(stream.sent_rows(), stream.queued_rows());
      EXPECT_LE(stream.queued_rows(), static_cast<uint64_t>(kRows));
      EXPECT_LE(stream.staging_bytes(), uint64_t{64} << 10) << "one slice at the most";
    }
    EXPECT_EQ(staging, of_streams);
    EXPECT_GE(now, rows) << "what a peer has had only grows";
    rows = now;
  }
  over = true;
  for (std::thread& trainer : trainers) trainer.join();
  EXPECT_GE(rows, 4000u);
  EXPECT_EQ(ListWhen(NoneOpen).peers_size(), 3);
}

// ---- Unix sockets ----
// gRPC over a Unix socket, alone and beside TCP, with the C++ client.

class UnixSocketTest : public ::testing::Test {
 protected:
  ServerOptions Options() const {
    ServerOptions options = SmallServer();
    options.listen = target_;
    return options;
  }
  static std::unique_ptr<client::Client> Connect(const std::string& target) {
    auto client = client::Client::Connect({.target = target, .channels = 1});
    EXPECT_TRUE(client.ok()) << client.status();
    return client.ok() ? *std::move(client) : nullptr;
  }

  test::TempFolder folder_;
  const std::string path_ = folder_.File("grpc");
  const std::string target_ = absl::StrCat("unix:", path_);
};

TEST_F(UnixSocketTest, ComputesBesideTcp) {
  ServerOptions options = Options();
  options.listen = absl::StrCat("127.0.0.1:0,", target_);
  TestServer server(options);
  ASSERT_THAT(server.target(), ::testing::EndsWith(absl::StrCat(",", target_)));
  const std::string tcp = server.target().substr(0, server.target().find(','));
  const auto over_tcp = Connect(tcp), over_unix = Connect(target_);
  ASSERT_TRUE(over_tcp != nullptr && over_unix != nullptr);
  ASSERT_TRUE(over_tcp->CreateHead(SmallHead()).ok());
  std::mt19937_64 rng(1);
  const SmallRows rows = MakeSmallRows(300, rng);
  std::vector<std::vector<float>> gradients;
  for (client::Client* client : {over_tcp.get(), over_unix.get()}) {
    gradients.emplace_back(rows.hidden.size());
    const auto result = client->ComputeLoss(SmallMicrobatch(rows, 0, gradients.size()),
                                            {.grad_hidden = gradients.back().data()});
    ASSERT_TRUE(result.ok()) << result.status();
  }
  EXPECT_EQ(gradients[0], gradients[1]);
  server.Stop();
  struct stat status = {};
  EXPECT_NE(stat(path_.c_str(), &status), 0) << "the server has not removed its socket";
}

TEST_F(UnixSocketTest, BelongsToTheServersUserUnlessSaidOtherwise) {
  for (const uint32_t mode : {0600u, 0666u}) {
    ServerOptions options = Options();
    if (mode != 0600) options.unix_socket_mode = mode;
    const TestServer server(options);
    struct stat status = {};
    ASSERT_EQ(stat(path_.c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, mode);
  }
}

TEST_F(UnixSocketTest, TwoServersDoNotShareAPath) {
  const TestServer first(Options());
  const auto second = Server::Start(Options());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("another lossd listens"));
  EXPECT_NE(Connect(target_), nullptr);
}

// As on the loopback, each connection is a peer of its own: one that takes all it can leaves others their
// share.
TEST_F(UnixSocketTest, ConnectionsHaveSharesOfTheirOwn) {
  ServerOptions options = Options();
  options.max_streams = 4;
  const TestServer server(options);
  const auto greedy = TestClient::Connect(target_), modest = TestClient::Connect(target_);
  v1::CreateHeadRequest request = SmallHead();
  ASSERT_TRUE(greedy->CreateHead(request).ok());
  const v1::OpenMicrobatch open = OpenSum({1});
  std::vector<std::unique_ptr<LossStream>> streams;
  for (int i = 0; i < 2; ++i) {
    streams.push_back(greedy->OpenLoss());
    streams.back()->SendOpen(open);
    ASSERT_TRUE(streams.back()->ReadOne()) << streams.back()->Finish().status;
  }
  const auto too_many = greedy->OpenLoss();
  too_many->SendOpen(open);
  EXPECT_EQ(too_many->Finish().status.code(), absl::StatusCode::kResourceExhausted);
  const auto of_another = modest->OpenLoss();
  of_another->SendOpen(open);
  EXPECT_TRUE(of_another->ReadOne()) << of_another->Finish().status;
  for (const auto& stream : streams) stream->Cancel();
  of_another->Cancel();
}

TEST_F(UnixSocketTest, BoundsConnections) {
  ServerOptions options = Options();
  options.max_connections_per_address = 2;
  const TestServer server(options);
  const auto first = TestClient::Connect(target_), second = TestClient::Connect(target_);
  ASSERT_TRUE(first->GetServer().ok());
  ASSERT_TRUE(second->GetServer().ok());
  EXPECT_FALSE(TestClient::Connect(target_)->GetServer().ok());
}

}  // namespace
}  // namespace lossd::app::testing::list_streams_test
