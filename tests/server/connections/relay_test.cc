// SPDX-License-Identifier: Apache-2.0
#include "server/connections/relay.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <string>
#include <thread>
#include <utility>

#include "tests/server/connections/lingering_socket.h"

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
