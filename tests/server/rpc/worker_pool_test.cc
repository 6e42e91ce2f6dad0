// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/worker_pool.h"

#include <gtest/gtest.h>

#include <atomic>

#include "absl/synchronization/barrier.h"
#include "absl/synchronization/notification.h"

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
