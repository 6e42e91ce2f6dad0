// SPDX-License-Identifier: Apache-2.0
// Packets of the region socket: what was sent before a side closed arrives, whatever was still unread.
#include "proto/wire/region_packets.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <random>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"

namespace lossd::wire::region_packets_test {
namespace {

std::pair<OwnedDescriptor, OwnedDescriptor> Connected() {
  int ends[2] = {-1, -1};
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
  return {OwnedDescriptor(ends[0]), OwnedDescriptor(ends[1])};
}

TEST(RegionPacketsTest, SayWhenTheOtherSideHasClosed) {
  auto [client, server] = Connected();
  EXPECT_EQ(ReceiveRegionPacket(client.get()).status().code(), absl::StatusCode::kUnavailable) << "none yet";
  ASSERT_TRUE(SendRegionPacket(server.get(), "answer", -1).ok());
  server = OwnedDescriptor();
  const auto packet = ReceiveRegionPacket(client.get());
  ASSERT_TRUE(packet.ok()) << packet.status();
  EXPECT_EQ(packet->bytes, "answer");
  const auto end = ReceiveRegionPacket(client.get());
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_TRUE(end->closed);
}

// A server that refuses a connection closes it without reading the request. The kernel then reports a reset,
// once, ahead of the refusal.
TEST(RegionPacketsTest, AnAnswerArrivesAlthoughTheRequestWasNotRead) {
  auto [client, server] = Connected();
  ASSERT_TRUE(SendRegionPacket(client.get(), "request", -1).ok());
  ASSERT_TRUE(SendRegionPacket(server.get(), "refused", -1).ok());
  server = OwnedDescriptor();
  const auto packet = ReceiveRegionPacket(client.get());
  ASSERT_TRUE(packet.ok()) << packet.status();
  EXPECT_EQ(packet->bytes, "refused");
  const auto end = ReceiveRegionPacket(client.get());
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_TRUE(end->closed);
}

TEST(RegionPacketsTest, AResetWithoutAnAnswerIsAnEnd) {
  auto [client, server] = Connected();
  ASSERT_TRUE(SendRegionPacket(client.get(), "request", -1).ok());
  server = OwnedDescriptor();
  const auto end = ReceiveRegionPacket(client.get());
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_TRUE(end->closed);
}

TEST(RegionPacketsTest, PollWaitsForADeadline) {
  EXPECT_EQ(PollMilliseconds(absl::InfiniteFuture()), -1);
  EXPECT_EQ(PollMilliseconds(clocks::SteadyNow() + absl::Hours(1)), 60'000);
  EXPECT_EQ(PollMilliseconds(clocks::SteadyNow() - absl::Hours(1)), 0);
  EXPECT_EQ(PollMilliseconds(absl::InfinitePast()), 0);
  const int soon = PollMilliseconds(clocks::SteadyNow() + absl::Seconds(10));
  EXPECT_TRUE(soon > 0 && soon <= 10'001) << soon;
}

}  // namespace
}  // namespace lossd::wire::region_packets_test
