// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/peer_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"

namespace lossd::rpc::peer_table_test {
namespace {

using ::testing::ElementsAre;

// Seconds since some start.
absl::Time At(int seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

std::vector<std::string> Names(const PeerTable& table) {
  std::vector<std::string> names;
  for (const PeerTable::Entry& entry : table.List()) names.push_back(entry.peer);
  return names;
}

TEST(PeerTableTest, AddsUpTheCallsOfAPeer) {
  PeerTable table(4);
  const auto first = table.Open("a", At(1)), second = table.Open("a", At(2)), other = table.Open("b", At(3));
  first->Queued(1000, At(4));
  second->Queued(24, At(5));
  first->Computed(0.5);
  second->Computed(0.25);
  first->Sent(10, 300, At(6));
  first->Close();
  const std::vector<PeerTable::Entry> entries = table.List();
  ASSERT_THAT(Names(table), ElementsAre("a", "b"));
  const PeerTotals& a = entries[0].totals;
  EXPECT_EQ(a.open_streams, 1);
  EXPECT_EQ(a.streams, 2);
  EXPECT_EQ(a.rows, 10);
  EXPECT_EQ(a.received_bytes, 1024);
  EXPECT_EQ(a.sent_bytes, 300);
  EXPECT_DOUBLE_EQ(a.device_wait_seconds, 0.75);
  EXPECT_EQ(a.last_active, At(6));
  EXPECT_EQ(entries[1].totals.rows, 0);
  EXPECT_EQ(entries[1].totals.last_active, At(3));
}

TEST(PeerTableTest, APeerThatComesBackGoesOnWithItsNumbers) {
  PeerTable table(1);
  table.Open("a", At(1))->Close();
  const auto again = table.Open("a", At(2));
  again->Sent(5, 1, At(3));
  ASSERT_THAT(Names(table), ElementsAre("a"));
  EXPECT_EQ(table.List()[0].totals.streams, 2);
  EXPECT_EQ(table.List()[0].totals.open_streams, 1);
}

TEST(PeerTableTest, ThePeerThatWasIdleLongestGoes) {
  PeerTable table(3);
  table.Open("oldest but busy", At(1));  // never closed
  const auto active = table.Open("active", At(2));
  active->Close();
  table.Open("idle", At(3))->Close();
  active->Sent(1, 1, At(4));  // gRPC says so after the end
  table.Open("new", At(5))->Close();
  EXPECT_THAT(Names(table), ElementsAre("active", "new", "oldest but busy"));
  table.Open("idle", At(6));
  EXPECT_THAT(Names(table), ElementsAre("idle", "new", "oldest but busy"));
  for (const PeerTable::Entry& entry : table.List()) {
    if (entry.peer == "idle") {
      EXPECT_EQ(entry.totals.streams, 1) << "a peer that was forgotten begins anew";
    }
  }
}

TEST(PeerTableTest, PeersWithOpenCallsStayAndTheTableShrinksAgain) {
  PeerTable table(2);
  std::vector<std::shared_ptr<PeerTable::Peer>> open;
  for (int i = 0; i < 5; ++i) open.push_back(table.Open(absl::StrCat("peer ", i), At(i)));
  EXPECT_EQ(table.List().size(), 5u);
  for (const auto& peer : open) peer->Close();
  table.Open("last", At(9))->Close();
  EXPECT_THAT(Names(table), ElementsAre("last", "peer 4"));
}

TEST(PeerTableTest, ManyThreads) {
  PeerTable table(3);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&table, thread] {
      for (int i = 0; i < 500; ++i) {
        const auto peer = table.Open(absl::StrCat((thread + i) % 6), At(i));
        peer->Queued(1, At(i));
        peer->Sent(1, 1, At(i));
        for (const PeerTable::Entry& entry : table.List()) EXPECT_GE(entry.totals.open_streams, 0);
        peer->Close();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const PeerTable::Entry& entry : table.List()) EXPECT_EQ(entry.totals.open_streams, 0) << entry.peer;
}

}  // namespace
}  // namespace lossd::rpc::peer_table_test
