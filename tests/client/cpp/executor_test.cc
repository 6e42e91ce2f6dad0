// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/core.h"
#include "kernels/clocks/clock.h"

namespace lossd::client::internal::executor_test {
namespace {

using ::testing::ElementsAre;

TEST(ExecutorTest, RunsTasksInTheOrderOfTheirTimesAndOfPosting) {
  std::vector<int> order;
  absl::Notification done;
  Executor executor;
  const absl::Time soon = clocks::SteadyNow() + absl::Milliseconds(30);
  executor.PostAt(soon + absl::Milliseconds(10), [&] {
    order.push_back(4);
    done.Notify();
  });
  executor.PostAt(soon, [&] { order.push_back(2); });
  executor.PostAt(soon, [&] { order.push_back(3); });
  executor.Post([&] { order.push_back(1); });
  done.WaitForNotification();
  EXPECT_THAT(order, ElementsAre(1, 2, 3, 4));
}

TEST(ExecutorTest, AnIdleOneRunsATaskOnTheCallersThread) {
  Executor executor;
  std::thread::id ran;
  executor.RunOrPost([&] { ran = std::this_thread::get_id(); });
  EXPECT_EQ(ran, std::this_thread::get_id());
}

TEST(ExecutorTest, ATaskOnTheCallersThreadWaitsForNoneThatIsNotDue) {
  Executor executor;
  bool late = false;
  executor.PostAt(clocks::SteadyNow() + absl::Hours(1), [&] { late = true; });
  std::thread::id ran;
  executor.RunOrPost([&] { ran = std::this_thread::get_id(); });
  EXPECT_EQ(ran, std::this_thread::get_id());
  EXPECT_FALSE(late);
}

TEST(ExecutorTest, ABusyOneRunsItLater) {
  absl::Notification begun;
  absl::Notification go_on;
  absl::Notification done;
  std::vector<int> order;
  std::thread::id ran;
  Executor executor;
  executor.Post([&] {
    begun.Notify();
    go_on.WaitForNotification();
    order.push_back(1);
  });
  begun.WaitForNotification();
  executor.RunOrPost([&] {
    order.push_back(2);
    ran = std::this_thread::get_id();
    done.Notify();
  });
  go_on.Notify();
  done.WaitForNotification();
  EXPECT_THAT(order, ElementsAre(1, 2));
  EXPECT_NE(ran, std::this_thread::get_id());
}

TEST(ExecutorTest, WhatATaskOnTheCallersThreadPostsRunsAfterIt) {
  absl::Notification done;
  std::vector<int> order;
  Executor executor;
  executor.RunOrPost([&] {
    executor.Post([&] { order.push_back(2); });
    executor.RunOrPost([&] {
      order.push_back(3);
      done.Notify();
    });
    absl::SleepFor(absl::Milliseconds(5));
    order.push_back(1);
  });
  done.WaitForNotification();
  EXPECT_THAT(order, ElementsAre(1, 2, 3));
}

TEST(ExecutorTest, TasksOfManyThreadsRunOneAtATimeAndAllOfThem) {
  std::atomic<int> inside{0};
  std::atomic<int> ran{0};
  std::atomic<bool> overlapped{false};
  const auto task = [&] {
    if (++inside != 1) overlapped = true;
    ++ran;
    --inside;
  };
  {
    Executor executor;
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&, thread] {
        for (int i = 0; i < 2000; ++i) {
          if ((i + thread) % 3 == 0) {
            executor.Post(task);
          } else {
            executor.RunOrPost(task);
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_FALSE(overlapped);
  EXPECT_EQ(ran, 4 * 2000);
}

TEST(ExecutorTest, ItsEndWaitsForATaskOnAnotherThread) {
  absl::Notification begun;
  std::atomic<bool> ended{false};
  auto executor = std::make_unique<Executor>();
  Executor* const raw = executor.get();
  std::thread other([&] {
    raw->RunOrPost([&] {
      begun.Notify();
      absl::SleepFor(absl::Milliseconds(20));
      ended = true;
    });
  });
  begun.WaitForNotification();
  executor = nullptr;
  EXPECT_TRUE(ended);
  other.join();
}

}  // namespace
}  // namespace lossd::client::internal::executor_test
