// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/call_inbox.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace lossd::rpc {
namespace {

using ::testing::ElementsAre;

// Notes what it is given; may be held up in the middle of a slice.
class Notes final : public CallInbox::Handler {
 public:
  void Handle(CallInbox::Slice slice) override {
    if (slice.output.rows.begin == 0 && hold_ != nullptr) {
      entered.Notify();
      hold_->WaitForNotification();
    }
    Add("slice " + std::to_string(slice.output.rows.begin));
  }
  void Handle(CallInbox::End end) override { Add("end " + std::string(end.status.message())); }

  void Add(std::string line) {
    absl::MutexLock lock(&mutex_);
    lines_.push_back(std::move(line));
  }
  // Waits for the last call.
  std::vector<std::string> Lines(size_t count) {
    absl::MutexLock lock(&mutex_);
    const auto all_there = [&] { return lines_.size() >= count; };
    mutex_.Await(absl::Condition(&all_there));
    return lines_;
  }
  void HoldFirstSlice(absl::Notification* until) { hold_ = until; }

  absl::Notification entered;

 private:
  absl::Notification* hold_ = nullptr;
  absl::Mutex mutex_;
  std::vector<std::string> lines_;
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
    inbox->OnFinished(absl::OkStatus(), {});
    inbox.reset();
    ASSERT_FALSE(handler.expired());
    EXPECT_THAT(handler.lock()->Lines(0), ElementsAre());
    go_on.Notify();
  }
  EXPECT_TRUE(handler.expired());
}

}  // namespace
}  // namespace lossd::rpc
