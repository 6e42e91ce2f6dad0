// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/peer.h"

#include <gtest/gtest.h>

namespace lossd::rpc::peer_test {
namespace {

TEST(PeerTest, IsTheAddressWithoutThePort) {
  EXPECT_EQ(PeerOf("ipv4:10.0.0.7:41234", 1), "10.0.0.7");
  EXPECT_EQ(PeerOf("ipv6:%5B2001:db8::7%5D:41234", 1), "[2001:db8::7]");
  EXPECT_EQ(PeerOf("ipv6:[2001:db8::7]:41234", 1), "[2001:db8::7]");
}

TEST(PeerTest, IsAConnectionOnTheServersOwnMachine) {
  EXPECT_EQ(PeerOf("ipv4:127.0.0.1:41234", 1), "127.0.0.1:41234");
  EXPECT_EQ(PeerOf("ipv6:%5B::1%5D:41234", 1), "[::1]:41234");
  EXPECT_EQ(PeerOf("ipv6:%5B::ffff:127.0.0.1%5D:41234", 1), "[::ffff:127.0.0.1]:41234");
}

TEST(PeerTest, IsNobodyInTheServersOwnProcess) {
  EXPECT_EQ(PeerOf("inproc", 1), "");
  EXPECT_EQ(PeerOf("inproc:server", 1), "");
}

TEST(PeerTest, IsAConnectionOverAUnixSocket) {
  EXPECT_EQ(PeerOf("unix:", 0x1a), "unix#1a");
  EXPECT_NE(PeerOf("unix:", 1), PeerOf("unix:", 2));
}

}  // namespace
}  // namespace lossd::rpc::peer_test
