// SPDX-License-Identifier: Apache-2.0
// Tests of the parts of compute_loss_call.h: the inbox of a call, the table of peers, and the places of
// slices.
#include "server/rpc/compute_loss_call.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"

// ---- Call inbox ----

namespace lossd::rpc::call_inbox_test {
namespace {

using ::testing::ElementsAre;

// Notes what it is given; may be held up in the middle of a slice.
class Notes final : public CallInbox::Handler {
 public:
  bool IsQuick(const CallInbox::Slice& slice) override { return slice.output.rows.begin >= 1000; }
  void Handle(CallInbox::Slice slice) override {
    if (slice.output.rows.begin == 0 && hold_ != nullptr) {
      entered.Notify();
      hold_->WaitForNotification();
    }
    const bool alone = !busy_.exchange(true);
    if (!alone) overlapped_ = true;
    Add("slice " + std::to_string(slice.output.rows.begin));
    if (slice.output.rows.begin == during_ && then_ != nullptr) std::exchange(then_, nullptr)();
    busy_ = false;
  }
  void Handle(CallInbox::End end) override { Add("end " + std::string(end.status.message())); }
  // How many lines the calling thread has added.
  int OfThisThread() {
    absl::MutexLock lock(&mutex_);
    return static_cast<int>(std::count(threads_.begin(), threads_.end(), std::this_thread::get_id()));
  }

  void Add(std::string line) {
    absl::MutexLock lock(&mutex_);
    lines_.push_back(std::move(line));
    threads_.push_back(std::this_thread::get_id());
  }
  // Waits for the last call.
  std::vector<std::string> Lines(size_t count) {
    absl::MutexLock lock(&mutex_);
    const auto all_there = [&] { return lines_.size() >= count; };
    mutex_.Await(absl::Condition(&all_there));
    return lines_;
  }
  void HoldFirstSlice(absl::Notification* until) { hold_ = until; }
  void DuringSlice(int64_t begin, std::function<void()> then) {
    during_ = begin;
    then_ = std::move(then);
  }
  // Whether a slice has come while another one was handled.
  bool overlapped() const { return overlapped_; }

  absl::Notification entered;

 private:
  absl::Notification* hold_ = nullptr;
  int64_t during_ = -1;
  std::function<void()> then_;
  std::atomic<bool> busy_{false};
  std::atomic<bool> overlapped_{false};
  absl::Mutex mutex_;
  std::vector<std::string> lines_;
  std::vector<std::thread::id> threads_;
};

engine::SliceOutput SliceAt(int64_t begin) {
  engine::SliceOutput output;
  output.rows = {begin, begin + 1};
  return output;
}

TEST(CallInboxTest, GivesAllInOrderOneAfterAnother) {
  WorkerPool workers(4, 100);
  auto notes = std::make_shared<Notes>();
  auto inbox = std::make_shared<CallInbox>(notes, &workers);
  absl::Notification go_on;
  notes->HoldFirstSlice(&go_on);
  inbox->OnSlice(SliceAt(0));
  notes->entered.WaitForNotification();
  inbox->OnMemory([&] { notes->Add("received"); });
  inbox->OnSlice(SliceAt(7));
  inbox->OnFinished(absl::CancelledError("over"), {});
  go_on.Notify();
  EXPECT_THAT(notes->Lines(4), ElementsAre("slice 0", "received", "slice 7", "end over"));
}

TEST(CallInboxTest, TheThreadThatBringsWhatIsQuickDeliversIt) {
  WorkerPool workers(1, 100);
  auto notes = std::make_shared<Notes>();
  auto inbox = std::make_shared<CallInbox>(notes, &workers);
  inbox->OnSlice(SliceAt(1000));
  inbox->OnFinished(absl::OkStatus(), {});
  EXPECT_THAT(notes->Lines(2), ElementsAre("slice 1000", "end "));
  EXPECT_EQ(notes->OfThisThread(), 2);
}

TEST(CallInboxTest, WhatIsQuickKeepsItsPlaceBehindWhatIsNot) {
  WorkerPool workers(2, 100);
  auto notes = std::make_shared<Notes>();
  auto inbox = std::make_shared<CallInbox>(notes, &workers);
  absl::Notification go_on;
  notes->HoldFirstSlice(&go_on);
  inbox->OnSlice(SliceAt(0));
  notes->entered.WaitForNotification();
  inbox->OnSlice(SliceAt(1000));
  inbox->OnFinished(absl::OkStatus(), {});
  go_on.Notify();
  EXPECT_THAT(notes->Lines(3), ElementsAre("slice 0", "slice 1000", "end "));
  EXPECT_EQ(notes->OfThisThread(), 0);
}

TEST(CallInboxTest, AQuickTurnLeavesTheRestToAWorker) {
  WorkerPool workers(1, 100);
  auto notes = std::make_shared<Notes>();
  auto inbox = std::make_shared<CallInbox>(notes, &workers);
  // The slice brings another one, which takes its time, while it is delivered.
  notes->DuringSlice(1000, [&] {
    inbox->OnMemory([&] { notes->Add("received"); });
    inbox->OnSlice(SliceAt(1001));
  });
  inbox->OnSlice(SliceAt(1000));
  EXPECT_THAT(notes->Lines(3), ElementsAre("slice 1000", "received", "slice 1001"));
  EXPECT_EQ(notes->OfThisThread(), 1);
}

TEST(CallInboxTest, EventsOfManyThreadsAreDeliveredOneAtATime) {
  WorkerPool workers(3, 100);
  auto notes = std::make_shared<Notes>();
  auto inbox = std::make_shared<CallInbox>(notes, &workers);
  std::vector<std::thread> threads;
  for (int64_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (int64_t i = 0; i < 250; ++i) inbox->OnSlice(SliceAt(i % 3 == 0 ? 1 + thread : 1000 + thread));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(notes->Lines(1000).size(), 1000);
  EXPECT_FALSE(notes->overlapped());
}

TEST(CallInboxTest, TakesItsTurnAtOnceIfTheWorkersHaveStopped) {
  WorkerPool workers(1, 100);
  workers.Stop();
  auto notes = std::make_shared<Notes>();
  auto inbox = std::make_shared<CallInbox>(notes, &workers);
  inbox->OnFinished(absl::UnavailableError("stopping"), {});
  EXPECT_THAT(notes->Lines(1), ElementsAre("end stopping"));
}

TEST(CallInboxTest, KeepsItsHandlerAndATurnKeepsTheInbox) {
  auto notes = std::make_shared<Notes>();
  const std::weak_ptr<Notes> handler = notes;
  {
    WorkerPool workers(1, 100);
    absl::Notification go_on;
    workers.Schedule([&] { go_on.WaitForNotification(); });
    auto inbox = std::make_shared<CallInbox>(std::move(notes), &workers);
    inbox->OnSlice(SliceAt(1));
    inbox.reset();
    ASSERT_FALSE(handler.expired());
    EXPECT_THAT(handler.lock()->Lines(0), ElementsAre());
    go_on.Notify();
  }
  EXPECT_TRUE(handler.expired());
}

}  // namespace
}  // namespace lossd::rpc::call_inbox_test

// ---- Peer table ----

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

// ---- Slice places ----

namespace lossd::rpc::slice_places_test {
namespace {

using engine::RowRange;

constexpr int64_t kRegionBytes = int64_t{64} << 10;
constexpr int64_t kRowBytes = 1024;

class ServerSlicePlacesTest : public ::testing::Test {
 protected:
  ServerSlicePlacesTest() {
    auto region = regions_.Create("holder", /*device=*/"", kRegionBytes);
    EXPECT_TRUE(region.ok()) << region.status();
    region_ = *std::move(region);
    std::fill(region_->bytes().begin(), region_->bytes().end(), kUntouched);
    places_.Use(region_);
  }

  absl::StatusOr<engine::IncomingSlice> Take(RowRange rows, int64_t offset, int64_t bytes) {
    v1::SliceHeader header;
    header.mutable_in_region()->set_offset(static_cast<uint64_t>(offset));
    header.mutable_in_region()->set_bytes(static_cast<uint64_t>(bytes));
    return places_.Take(header, rows, wire::PayloadView());
  }
  absl::StatusOr<engine::IncomingSlice> TakeFromMessage(RowRange rows) {
    return places_.Take(v1::SliceHeader(), rows, wire::PayloadView());
  }
  // Whether the gradients, which the engine has elsewhere, come to the region.
  bool AnswerIsInRegion(RowRange rows) {
    gradients_.assign(static_cast<size_t>(rows.size() * kRowBytes), kGradient);
    engine::SliceOutput output{.rows = rows};
    output.grad_bytes = rows.size() * kRowBytes;
    output.grad_hidden = engine::StagingBuffer(gradients_.data(), output.grad_bytes, [] {});
    v1::ComputeLossResponse response;
    const auto payload = wire::Decode(places_.Answer(std::move(output)), &response);
    EXPECT_TRUE(payload.ok()) << payload.status();
    EXPECT_EQ(payload->size(), response.slice().in_region() ? 0u : gradients_.size());
    return response.slice().in_region();
  }
  // Whether the region has gradients there, and nowhere else.
  void ExpectGradientsAt(int64_t offset, int64_t bytes) const {
    const absl::Span<const uint8_t> all = region_->bytes();
    for (int64_t i = 0; i < kRegionBytes; ++i) {
      const bool inside = i >= offset && i < offset + bytes;
      ASSERT_EQ(all[static_cast<size_t>(i)], inside ? kGradient : kUntouched) << "byte " << i;
    }
  }

  static constexpr uint8_t kUntouched = 0xa5, kGradient = 7;
  const std::unique_ptr<kernels::Backend> backend_ = kernels::CreateCpuBackend({.threads = 1}).value();
  regions::Regions regions_{backend_.get(), {.host_bytes = kRegionBytes}, 1.0};
  std::shared_ptr<regions::Region> region_;
  SlicePlaces places_;
  std::vector<uint8_t> gradients_;  // as long as answers refer to them
};

TEST_F(ServerSlicePlacesTest, GradientsLieWhereTheHiddenStatesWere) {
  ASSERT_TRUE(Take({0, 4}, 512, 4 * kRowBytes).ok());
  ASSERT_TRUE(TakeFromMessage({4, 6}).ok());
  EXPECT_TRUE(AnswerIsInRegion({0, 4}));
  ExpectGradientsAt(512, 4 * kRowBytes);
  EXPECT_FALSE(AnswerIsInRegion({4, 6}));
  ExpectGradientsAt(512, 4 * kRowBytes);
}

// The engine refuses the second one, but the first one's gradients may still be on their way here.
TEST_F(ServerSlicePlacesTest, ASliceThatRepeatsRowsMovesNoGradients) {
  ASSERT_TRUE(Take({0, 4}, 512, 4 * kRowBytes).ok());
  Take({0, 1}, kRegionBytes / 2, 256).IgnoreError();
  EXPECT_TRUE(AnswerIsInRegion({0, 4}));
  ExpectGradientsAt(512, 4 * kRowBytes);
}

TEST_F(ServerSlicePlacesTest, ASliceThatRepeatsRowsOfAMessageHasTheirGradientsWrittenNowhereBehindIt) {
  ASSERT_TRUE(TakeFromMessage({0, 4}).ok());
  Take({0, 1}, kRegionBytes / 2, 256).IgnoreError();
  EXPECT_FALSE(AnswerIsInRegion({0, 4}));
  ExpectGradientsAt(0, 0);
}

}  // namespace
}  // namespace lossd::rpc::slice_places_test
