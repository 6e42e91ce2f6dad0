// SPDX-License-Identifier: Apache-2.0
// gRPC over a Unix socket, alone and beside TCP, with the C++ client.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "tests/server/service/small_head.h"
#include "tests/server/service/test_server.h"

namespace lossd::app::testing::unix_socket_test {
namespace {

using ::testing::HasSubstr;

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
}  // namespace lossd::app::testing::unix_socket_test
