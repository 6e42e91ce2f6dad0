// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/call_inbox.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

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
