// SPDX-License-Identifier: Apache-2.0
// Tests of connection_acceptor.h and closer.h: connections up to the limits, the threads that close
// descriptors of strangers, and the relay between two sockets.
#include "server/access/connection_acceptor.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/wire/region_packets.h"
#include "server/access/closer.h"

namespace lossd::access::connection_acceptor_test {
namespace {

// ---- Acceptor ----

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
  int port() const {
    sockaddr_in own = {};
    socklen_t size = sizeof(own);
    EXPECT_EQ(getsockname(descriptor_, reinterpret_cast<sockaddr*>(&own), &size), 0);
    return ntohs(own.sin_port);
  }

 private:
  const int descriptor_;
};

// Plays peers: as if an address of the loopback said who somebody is.
Peer PeerByAddress(int connection, const sockaddr_storage& from) {
  Peer peer = PeerOf(connection, from);
  peer.name = absl::StrCat("played ", ntohl(reinterpret_cast<const sockaddr_in&>(from).sin_addr.s_addr));
  return peer;
}

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
    acceptor_->Start("test-acceptor", [this](int, int connection) {
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
  Start({.in_all = 8, .per_peer = 2, .peer_of = &PeerByAddress});
  Client a(port_), b(port_);
  ASSERT_TRUE(a.Accepted() && b.Accepted());
  EXPECT_FALSE(Client(port_).Accepted());
  EXPECT_TRUE(Client(port_, "127.0.0.2").Accepted());
  EXPECT_EQ(refused(), std::vector<std::string>{"max_connections_per_address"});
}

// 127.0.0.1 to 127.255.255.254 are all the loopback's, and a program chooses among them.
TEST_F(ConnectionAcceptorTest, AUserIsOnePeerWhateverAddressOfTheLoopbackHeTakes) {
  if (!KnowsLoopbackUsers()) GTEST_SKIP() << "this kernel has no sock_diag";
  Start({.in_all = 8, .per_peer = 2});
  Client a(port_, "127.0.0.2"), b(port_, "127.0.0.3");
  ASSERT_TRUE(a.Accepted() && b.Accepted());
  for (const char* const from : {"127.0.0.1", "127.0.0.4", "127.9.9.9"})
    EXPECT_FALSE(Client(port_, from).Accepted()) << from;
  EXPECT_EQ(refused(), std::vector<std::string>(3, "max_connections_per_address"));
}

TEST_F(ConnectionAcceptorTest, SaysWhoseAConnectionIs) {
  Start({});
  Client a(port_, "127.0.0.2");
  ASSERT_TRUE(a.Accepted());
  const std::string name = KnowsLoopbackUsers() ? absl::StrCat("uid ", geteuid()) : "loopback";
  EXPECT_EQ(acceptor_->NameAt(absl::StrCat("127.0.0.2:", a.port())), name);
  EXPECT_EQ(acceptor_->NameAt(absl::StrCat("127.0.0.1:", a.port())), "");
  EXPECT_EQ(acceptor_->NameAt(""), "");
  absl::MutexLock lock(&mutex_);
  EXPECT_EQ(acceptor_->NameOf(taken_.back()), name);
  EXPECT_EQ(acceptor_->NameOf(-1), "");
  close(taken_.back());
  taken_.pop_back();
  EXPECT_EQ(acceptor_->NameAt(absl::StrCat("127.0.0.2:", a.port())), "") << "it was closed";
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
    Start({.in_all = in_all,
           .per_peer = per_peer,
           .oldest_makes_room = true,
           .age = age,
           .peer_of = &PeerByAddress});
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

// A TCP socket that whoever closes it last waits for, for a minute: it lingers, and the other end takes
// nothing.

bool IsOpen(int descriptor) { return fcntl(descriptor, F_GETFD) >= 0; }

// Thread-compatible.
struct LingeringSocket {
  LingeringSocket() {
    const wire::OwnedDescriptor listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address = {.sin_family = AF_INET};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(bind(listener.get(), any, size), 0);
    EXPECT_EQ(listen(listener.get(), 1), 0);
    EXPECT_EQ(getsockname(listener.get(), any, &size), 0);
    near = wire::OwnedDescriptor(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(connect(near.get(), any, size), 0);
    far = wire::OwnedDescriptor(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const linger wait = {.l_onoff = 1, .l_linger = 60};
    setsockopt(near.get(), SOL_SOCKET, SO_LINGER, &wait, sizeof(wait));
    const std::vector<char> block(size_t{1} << 16);
    while (send(near.get(), block.data(), block.size(), MSG_DONTWAIT | MSG_NOSIGNAL) > 0) {
    }
  }

  wire::OwnedDescriptor near;
  wire::OwnedDescriptor far;
};

// ---- Closer ----

bool BecomesClosed(int descriptor) {
  for (const absl::Time limit = absl::Now() + absl::Seconds(30); absl::Now() < limit;) {
    if (!IsOpen(descriptor)) return true;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return false;
}

TEST(CloserTest, ClosesWhatOthersWouldWaitFor) {
  LingeringSocket socket;
  const int descriptor = socket.near.get();
  const absl::Time begin = absl::Now();
  CloseElsewhere(std::move(socket.near));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(30));
  EXPECT_TRUE(BecomesClosed(descriptor));
}

// The socket lies in a connection that is closed, so that its own linger cannot be turned off before.
TEST(CloserTest, ClosesConnectionsInWhichItLies) {
  std::vector<int> descriptors;
  std::vector<LingeringSocket> sockets(40);
  for (LingeringSocket& socket : sockets) {
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    const wire::OwnedDescriptor sender(ends[0]);
    wire::OwnedDescriptor receiver(ends[1]);
    ASSERT_TRUE(wire::SendRegionPacket(sender.get(), "x", socket.near.get()).ok());
    CloseElsewhere(std::move(socket.near));  // not the last: the connection has it
    descriptors.push_back(receiver.get());
    CloseElsewhere(std::move(receiver));
  }
  for (const int descriptor : descriptors) EXPECT_TRUE(BecomesClosed(descriptor));
}

TEST(CloserTest, NothingIsNothing) {
  CloseElsewhere(wire::OwnedDescriptor());
  CloseElsewhere(std::vector<wire::OwnedDescriptor>());
  EXPECT_FALSE(ClosingIsBehind());
}

// ---- Relay ----

constexpr int kLimit = 30'000;  // milliseconds

class RelayTest : public ::testing::Test {
 protected:
  RelayTest() {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    stranger_ = wire::OwnedDescriptor(ends[0]);
    reader_ = relay_.Stand(wire::OwnedDescriptor(ends[1]));
    EXPECT_TRUE(reader_);
  }

  static void Send(int to, const std::string& bytes) {
    for (size_t sent = 0; sent < bytes.size();) {
      pollfd ready = {.fd = to, .events = POLLOUT};
      ASSERT_EQ(poll(&ready, 1, kLimit), 1);
      const ssize_t part = send(to, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      ASSERT_GT(part, 0);
      sent += static_cast<size_t>(part);
    }
  }
  // Until `size` bytes have come, or the end.
  static std::string Receive(int from, size_t size) {
    std::string bytes;
    while (bytes.size() < size) {
      char part[4096];
      pollfd ready = {.fd = from, .events = POLLIN};
      if (poll(&ready, 1, kLimit) != 1) break;
      const ssize_t received = recv(from, part, std::min(sizeof(part), size - bytes.size()), MSG_DONTWAIT);
      if (received <= 0) break;
      bytes.append(part, static_cast<size_t>(received));
    }
    return bytes;
  }
  static bool HasEnded(int descriptor) { return Receive(descriptor, 1).empty(); }

  Relay relay_;
  wire::OwnedDescriptor stranger_;
  wire::OwnedDescriptor reader_;
};

TEST_F(RelayTest, PassesBytesOnInBothDirectionsAtOnce) {
  std::string there(3 << 20, '\0'), back(2 << 20, '\0');
  for (size_t i = 0; i < there.size(); ++i) there[i] = static_cast<char>(i * 7 / 3);
  for (size_t i = 0; i < back.size(); ++i) back[i] = static_cast<char>(i / 5);
  std::thread writes([&] { Send(stranger_.get(), there); });
  std::thread answers([&] { Send(reader_.get(), back); });
  std::thread reads([&] { EXPECT_TRUE(Receive(stranger_.get(), back.size()) == back); });
  EXPECT_TRUE(Receive(reader_.get(), there.size()) == there);
  writes.join();
  answers.join();
  reads.join();
}

TEST_F(RelayTest, TheLastWordsOfOneEndReachTheOther) {
  Send(stranger_.get(), "last words");
  stranger_ = wire::OwnedDescriptor();
  EXPECT_EQ(Receive(reader_.get(), 10), "last words");
  EXPECT_TRUE(HasEnded(reader_.get()));
}

TEST_F(RelayTest, TheReaderEndsAConnection) {
  Send(reader_.get(), "no");
  reader_ = wire::OwnedDescriptor();
  EXPECT_EQ(Receive(stranger_.get(), 2), "no");
  EXPECT_TRUE(HasEnded(stranger_.get()));
}

TEST_F(RelayTest, ADescriptorEndsAConnectionAndReachesNobody) {
  LingeringSocket socket;
  Send(stranger_.get(), "first");
  EXPECT_EQ(Receive(reader_.get(), 5), "first");
  ASSERT_TRUE(wire::SendRegionPacket(stranger_.get(), "x", socket.near.get()).ok());
  EXPECT_TRUE(HasEnded(reader_.get()));
  EXPECT_TRUE(HasEnded(stranger_.get()));
}

TEST(RelayEndTest, EndsWithConnectionsThatStand) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const wire::OwnedDescriptor stranger(ends[0]);
  wire::OwnedDescriptor reader;
  {
    Relay relay;
    reader = relay.Stand(wire::OwnedDescriptor(ends[1]));
  }
  char byte = 0;
  EXPECT_EQ(recv(reader.get(), &byte, 1, 0), 0);
}

}  // namespace
}  // namespace lossd::access::connection_acceptor_test
