// SPDX-License-Identifier: Apache-2.0
#include "server/connections/closer.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "tests/server/connections/lingering_socket.h"

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
