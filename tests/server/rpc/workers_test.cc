// SPDX-License-Identifier: Apache-2.0
// Tests of workers.h: the workers of administrative calls, and the pool of workers.
#include "server/rpc/workers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/barrier.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

// ---- Admin workers ----

namespace lossd::rpc::admin_workers_test {
namespace {

using ::testing::HasSubstr;

// Tasks that end when Release is called.
class AdminWorkersTest : public ::testing::Test {
 protected:
  ~AdminWorkersTest() override { Release(); }
  void Release() {
    if (!released_.HasBeenNotified()) released_.Notify();
  }
  void Block(const AdminTask& task) {
    ASSERT_TRUE(workers_
                    ->Schedule(task,
                               [this] {
                                 ++running_;
                                 released_.WaitForNotification();
                               })
                    .ok());
  }
  // Runs one task to its end; it hangs, and the test with it, if it never may.
  void Expect(const AdminTask& task) {
    absl::Notification done;
    ASSERT_TRUE(workers_->Schedule(task, [&done] { done.Notify(); }).ok());
    done.WaitForNotification();
  }

  absl::Notification released_;
  std::atomic<int> running_{0};
  std::vector<std::string> limits_;
  std::unique_ptr<AdminWorkers> workers_ = std::make_unique<AdminWorkers>(AdminWorkersOptions{
      .threads = 8, .max_waiting = 64, .peer_share = 0.5, .on_limit = [this](absl::string_view limit) {
        limits_.emplace_back(limit);
      }});
};

TEST_F(AdminWorkersTest, NineCreationsOfOneNameLeaveTheOtherThreads) {
  for (int i = 0; i < 9; ++i) Block({.peer = "a", .head = "big", .kind = AdminKind::kLong});
  Expect({.peer = "a", .head = "other", .kind = AdminKind::kLong});
  Expect({.peer = "b", .head = "other", .kind = AdminKind::kChange});
  Expect({.peer = "a", .head = "big", .kind = AdminKind::kLook});
  EXPECT_LE(running_, 1);
}

TEST_F(AdminWorkersTest, LongTasksOnManyHeadsLeaveHalfOfTheThreads) {
  for (int i = 0; i < 20; ++i) {
    Block({.peer = absl::StrCat("peer", i), .head = absl::StrCat("head", i), .kind = AdminKind::kLong});
  }
  Expect({.peer = "b", .head = "other", .kind = AdminKind::kChange});
  Expect({.peer = "b", .head = "other", .kind = AdminKind::kRows});
  EXPECT_LE(running_, 4);
}

TEST_F(AdminWorkersTest, APeerLeavesHalfOfTheThreadsToOthers) {
  for (int i = 0; i < 20; ++i)
    Block({.peer = "a", .head = absl::StrCat("head", i), .kind = AdminKind::kChange});
  for (int i = 0; i < 10; ++i)
    Expect({.peer = "b", .head = absl::StrCat("head", i + 10), .kind = AdminKind::kRead});
  EXPECT_LE(running_, 4);
}

TEST_F(AdminWorkersTest, RowsOfOneHeadLeaveThreadsToChangesOfIt) {
  for (int i = 0; i < 30; ++i) {
    Block({.peer = absl::StrCat("peer", i), .head = "head", .kind = AdminKind::kRows});
  }
  Expect({.peer = "b", .head = "head", .kind = AdminKind::kChange});
  EXPECT_LE(running_, AdminWorkers::kRowsOfHead);
}

TEST_F(AdminWorkersTest, RefusalsNameTheLimit) {
  absl::Status refused;
  const auto block = [this] { released_.WaitForNotification(); };
  for (int i = 0; i < 100 && refused.ok(); ++i) {
    refused = workers_->Schedule({.peer = "10.0.0.7", .head = "head", .kind = AdminKind::kChange}, block);
  }
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("10.0.0.7"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("--peer_share"));
  refused = absl::OkStatus();
  for (int i = 0; i < 200 && refused.ok(); ++i) {
    refused = workers_->Schedule(
        {.peer = absl::StrCat("peer", i), .head = "head", .kind = AdminKind::kChange}, block);
  }
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("--max_waiting_calls"));
  EXPECT_THAT(limits_, ::testing::ElementsAre("peer_share", "max_waiting_calls"));
}

TEST_F(AdminWorkersTest, TheEndRunsWhatIsQueued) {
  std::atomic<int> done{0};
  for (int i = 0; i < 30; ++i) {
    ASSERT_TRUE(workers_
                    ->Schedule({.peer = absl::StrCat("peer", i % 3),
                                .head = "head",
                                .kind = i % 2 == 0 ? AdminKind::kLong : AdminKind::kLook},
                               [&done] { ++done; })
                    .ok());
  }
  workers_.reset();
  EXPECT_EQ(done, 30);
}

// A peer that lists without end: neither looks nor lists of others wait for more than one of its lists.
TEST_F(AdminWorkersTest, ListsOfOnePeerLeaveTheLooksOfOthers) {
  for (int i = 0; i < 20; ++i) Block({.peer = "a", .kind = AdminKind::kList});
  for (int i = 0; i < 20; ++i) Expect({.peer = "b", .head = "head", .kind = AdminKind::kLook});
  EXPECT_LE(running_, 1);
}

TEST_F(AdminWorkersTest, PeersTakeTurnsAtLooking) {
  absl::Notification begin;
  absl::Mutex mutex;
  std::vector<std::string> order;
  std::atomic<int> waiting{0};
  absl::BlockingCounter done(34);
  for (int i = 0; i < 2; ++i) {  // both threads
    ASSERT_TRUE(workers_
                    ->Schedule({.peer = absl::StrCat("first", i), .kind = AdminKind::kLook},
                               [&] {
                                 ++waiting;
                                 begin.WaitForNotification();
                                 done.DecrementCount();
                               })
                    .ok());
  }
  while (waiting < 2) absl::SleepFor(absl::Milliseconds(1));
  const auto look = [&](const std::string& peer) {
    ASSERT_TRUE(workers_
                    ->Schedule({.peer = peer, .kind = AdminKind::kLook},
                               [&, peer] {
                                 {
                                   absl::MutexLock lock(&mutex);
                                   order.push_back(peer);
                                 }
                                 done.DecrementCount();
                               })
                    .ok());
  };
  for (int i = 0; i < 30; ++i) look("a");
  look("b");
  look("c");
  begin.Notify();
  done.Wait();
  const auto place = [&](const std::string& peer) {
    return std::find(order.begin(), order.end(), peer) - order.begin();
  };
  EXPECT_LT(place("b"), 6);
  EXPECT_LT(place("c"), 6);
}

}  // namespace
}  // namespace lossd::rpc::admin_workers_test

// ---- Worker pool ----

namespace lossd::rpc::worker_pool_test {
namespace {

TEST(WorkerPoolTest, RunsEverythingBeforeItStops) {
  std::atomic<int> ran{0};
  {
    WorkerPool pool(3, 1000);
    for (int i = 0; i < 500; ++i) ASSERT_TRUE(pool.Schedule([&] { ++ran; }));
  }
  EXPECT_EQ(ran, 500);
}

TEST(WorkerPoolTest, RunsTasksSideBySide) {
  auto* barrier = new absl::Barrier(2);
  WorkerPool pool(2, 10);
  for (int i = 0; i < 2; ++i) {
    pool.Schedule([barrier] {
      if (barrier->Block()) delete barrier;
    });
  }
  pool.Stop();
}

TEST(WorkerPoolTest, OneThreadKeepsTheOrder) {
  std::vector<int> order;
  WorkerPool pool(1, 100);
  for (int i = 0; i < 20; ++i) pool.Schedule([&order, i] { order.push_back(i); });
  pool.Stop();
  for (int i = 0; i < 20; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
}

TEST(WorkerPoolTest, RefusesWhenFullAndWhenStopped) {
  absl::Notification started;
  absl::Notification go;
  WorkerPool pool(1, 1);
  ASSERT_TRUE(pool.Schedule([&] {
    started.Notify();
    go.WaitForNotification();
  }));
  started.WaitForNotification();
  EXPECT_TRUE(pool.Schedule([] {}));
  EXPECT_FALSE(pool.Schedule([] { FAIL() << "ran a refused task"; }));
  go.Notify();
  pool.Stop();
  EXPECT_FALSE(pool.Schedule([] { FAIL() << "ran after the stop"; }));
}

}  // namespace
}  // namespace lossd::rpc::worker_pool_test
