// SPDX-License-Identifier: Apache-2.0
// Tests of closer.h: the threads that close descriptors of strangers, and the relay between two sockets.
#include "server/connections/closer.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "tests/server/connections/lingering_socket.h"

// ---- Closer ----

namespace lossd::connections::closer_test {
namespace {

using testing::IsOpen;
using testing::LingeringSocket;

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
  EXPECT_LT(absl::Now() - begin, absl::Seconds(2));
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

}  // namespace
}  // namespace lossd::connections::closer_test

// ---- Relay ----

namespace lossd::connections::relay_test {
namespace {

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
  testing::LingeringSocket socket;
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
}  // namespace lossd::connections::relay_test
