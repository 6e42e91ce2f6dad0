// SPDX-License-Identifier: Apache-2.0
#include "server/connections/connection_acceptor.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"

namespace lossd::connections::connection_acceptor_test {
namespace {

// A connection to a port from an address of the loopback network.
class Client {
 public:
  Client(int port, const char* from = "127.0.0.1")
      : descriptor_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in own = {.sin_family = AF_INET};
    inet_pton(AF_INET, from, &own.sin_addr);
    EXPECT_EQ(bind(descriptor_, reinterpret_cast<sockaddr*>(&own), sizeof(own)), 0);
    sockaddr_in server = {.sin_family = AF_INET, .sin_port = htons(static_cast<uint16_t>(port))};
    inet_pton(AF_INET, "127.0.0.1", &server.sin_addr);
    EXPECT_EQ(connect(descriptor_, reinterpret_cast<sockaddr*>(&server), sizeof(server)), 0);
  }
  ~Client() { close(descriptor_); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Waits until the server has sent a byte (true) or closed the connection.
  bool Accepted() const {
    char byte = 0;
    return recv(descriptor_, &byte, 1, 0) == 1;
  }
  // Whether something came, or the connection was closed.
  bool Answered() const {
    char byte = 0;
    return recv(descriptor_, &byte, 1, MSG_DONTWAIT) >= 0;
  }
  // Nothing more came, nor was it closed.
  bool Open() const { return !Answered(); }

 private:
  const int descriptor_;
};

class ConnectionAcceptorTest : public ::testing::Test {
 protected:
  // Sends a byte on each connection it takes.
  void Start(EntranceOptions limits) {
    limits.on_refused = [this](int, absl::string_view flag, const Peer&) {
      absl::MutexLock lock(&mutex_);
      refused_.emplace_back(flag);
    };
    auto sockets = ListeningSocket::OpenTcp("127.0.0.1", 0);
    ASSERT_TRUE(sockets.ok()) << sockets.status();
    port_ = sockets->front().port();
    acceptor_ = std::make_unique<ConnectionAcceptor>(*std::move(sockets), limits);
    acceptor_->Start([this](int, int connection) {
      absl::MutexLock lock(&mutex_);
      taken_.push_back(connection);
      EXPECT_EQ(send(connection, "x", 1, MSG_NOSIGNAL), 1);  // last: the client goes on when it has this
    });
  }
  void TearDown() override {
    acceptor_.reset();
    for (const int connection : taken_) close(connection);
  }
  std::vector<std::string> refused() {
    absl::MutexLock lock(&mutex_);
    return refused_;
  }

  absl::Mutex mutex_;
  int port_ = 0;
  std::vector<int> taken_;
  std::vector<std::string> refused_;
  std::unique_ptr<ConnectionAcceptor> acceptor_;
};

TEST_F(ConnectionAcceptorTest, RefusesConnectionsBeyondTheLimit) {
  Start({.in_all = 3, .per_peer = 3});
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 3; ++i) {
    clients.push_back(std::make_unique<Client>(port_));
    ASSERT_TRUE(clients.back()->Accepted()) << i;
  }
  EXPECT_EQ(acceptor_->connections(), 3);
  EXPECT_FALSE(Client(port_).Accepted());
  EXPECT_EQ(refused(), std::vector<std::string>{"max_connections"});
}

// Else they would pile up, open, while strangers on a Unix socket hold the threads that close.
TEST(EntranceTest, ClosesRefusedTcpConnectionsByItself) {
  auto sockets = ListeningSocket::OpenTcp("127.0.0.1", 0);
  ASSERT_TRUE(sockets.ok()) << sockets.status();
  const int listener = sockets->front().descriptor();
  const int port = sockets->front().port();
  int refused = -1;
  Entrance entrance(*std::move(sockets),
                    {.in_all = 0, .on_refused = [&](int connection, absl::string_view, const Peer&) {
                       refused = connection;
                     }});
  for (int i = 0; i < 50; ++i) {
    const Client client(port);
    pollfd ready = {.fd = listener, .events = POLLIN};
    ASSERT_EQ(poll(&ready, 1, 10'000), 1);
    refused = -1;
    EXPECT_FALSE(entrance.Accept(listener).has_value());
    ASSERT_GE(refused, 0);
    ASSERT_EQ(fcntl(refused, F_GETFD), -1) << "still open after refusal " << i;
  }
}

TEST_F(ConnectionAcceptorTest, AnAddressLeavesConnectionsToOthers) {
  Start({.in_all = 8, .per_peer = 2});
  Client a(port_), b(port_);
  ASSERT_TRUE(a.Accepted() && b.Accepted());
  EXPECT_FALSE(Client(port_).Accepted());
  EXPECT_TRUE(Client(port_, "127.0.0.2").Accepted());
  EXPECT_EQ(refused(), std::vector<std::string>{"max_connections_per_address"});
}

TEST_F(ConnectionAcceptorTest, AClosedConnectionMakesRoom) {
  Start({.in_all = 1, .per_peer = 1});
  for (int i = 0; i < 20; ++i) {
    Client client(port_);
    ASSERT_TRUE(client.Accepted()) << i;
    ASSERT_FALSE(Client(port_).Accepted()) << i;
    absl::MutexLock lock(&mutex_);
    close(taken_.back());  // as gRPC does
    taken_.pop_back();
  }
}

// A reader that is done with connections in a moment: HTTP.
class OldestMakesRoomTest : public ConnectionAcceptorTest {
 protected:
  void StartWith(int64_t in_all, int64_t per_peer, absl::Duration age = absl::InfiniteDuration()) {
    Start({.in_all = in_all, .per_peer = per_peer, .oldest_makes_room = true, .age = age});
  }
  // Of those that were taken, as the reader does when it sees the end.
  void Close(size_t index) {
    absl::MutexLock lock(&mutex_);
    acceptor_->Closing(taken_[index]);
    close(taken_[index]);
    taken_.erase(taken_.begin() + static_cast<std::ptrdiff_t>(index));
  }
};

TEST_F(OldestMakesRoomTest, TheOldestOfThePeerEndsFirst) {
  StartWith(3, 2);
  Client other(port_, "127.0.0.2"), a(port_), b(port_);
  ASSERT_TRUE(other.Accepted() && a.Accepted() && b.Accepted());
  Client c(port_);
  ASSERT_TRUE(c.Accepted());
  EXPECT_FALSE(a.Accepted());
  EXPECT_TRUE(other.Open() && b.Open() && c.Open());
  EXPECT_EQ(refused(), std::vector<std::string>{"max_connections_per_address"});
}

TEST_F(OldestMakesRoomTest, TheOldestOfAllEnds) {
  StartWith(2, 2);
  Client a(port_, "127.0.0.2"), b(port_, "127.0.0.3");
  ASSERT_TRUE(a.Accepted() && b.Accepted());
  Client c(port_);
  ASSERT_TRUE(c.Accepted());
  EXPECT_FALSE(a.Accepted());
  EXPECT_TRUE(b.Open() && c.Open());
  EXPECT_EQ(refused(), std::vector<std::string>{"max_connections"});
}

TEST_F(OldestMakesRoomTest, OldConnectionsEndWhenANewOneArrives) {
  StartWith(8, 8, absl::Milliseconds(200));
  Client a(port_);
  ASSERT_TRUE(a.Accepted());
  absl::SleepFor(absl::Milliseconds(300));
  EXPECT_TRUE(a.Open());
  Client b(port_);
  ASSERT_TRUE(b.Accepted());
  EXPECT_FALSE(a.Accepted());
  EXPECT_TRUE(b.Open());
  EXPECT_TRUE(refused().empty());  // no limit was reached
}

// Those that were shut down hold descriptors until the reader closes them: more connections wait meanwhile.
TEST_F(OldestMakesRoomTest, AReaderThatDoesNotCloseGetsNoMore) {
  StartWith(2, 2);
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 34; ++i) {
    clients.push_back(std::make_unique<Client>(port_));
    ASSERT_TRUE(clients.back()->Accepted()) << i;
  }
  Client waits(port_);
  absl::SleepFor(absl::Milliseconds(200));
  EXPECT_FALSE(waits.Answered());
  EXPECT_EQ(acceptor_->connections(), 34);
  Close(0);
  EXPECT_TRUE(waits.Accepted());
}

TEST_F(OldestMakesRoomTest, ClosedConnectionsDoNotCount) {
  StartWith(1, 1);
  for (int i = 0; i < 100; ++i) {
    Client client(port_);
    ASSERT_TRUE(client.Accepted()) << i;
    Close(0);
  }
  EXPECT_TRUE(refused().empty());
  EXPECT_EQ(acceptor_->connections(), 0);
}

}  // namespace
}  // namespace lossd::connections::connection_acceptor_test
