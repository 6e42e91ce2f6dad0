// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <optional>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/clocks/clock.h"
#include "kernels/cuda/device/event_waiter.h"

namespace lossd::kernels::cuda::enqueue_watch_test {
namespace {

constexpr absl::Duration kLong = absl::Minutes(5);  // longer than a test

TEST(EnqueueWatchTest, WhatEndsInTimeIsNotLate) {
  std::atomic<int> late = 0;
  {
    EnqueueWatch watch(kLong, [&] { ++late; });
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (int n = 0; n < 100; ++n) const auto under_way = watch.During();
      });
    }
    for (std::thread& thread : threads) thread.join();
    const auto left_behind = watch.During();
  }
  EXPECT_EQ(late, 0);
}

TEST(EnqueueWatchTest, WhatDoesNotEndIsLateOnce) {
  constexpr absl::Duration kLimit = absl::Milliseconds(100);
  std::atomic<int> late = 0;
  absl::Notification noticed;
  EnqueueWatch watch(kLimit, [&] {
    if (++late == 1) noticed.Notify();
  });
  const absl::Time begin = clocks::SteadyNow();
  const auto under_way = watch.During();
  noticed.WaitForNotification();
  EXPECT_GE(clocks::SteadyNow() - begin, kLimit);
  const auto another = watch.During();
  absl::SleepFor(kLimit * 3);
  EXPECT_EQ(late, 1);
}

// One that ends does not hide another that began later, nor is its time that of the other.
TEST(EnqueueWatchTest, EachIsWatched) {
  constexpr absl::Duration kLimit = absl::Milliseconds(200);
  absl::Notification noticed;
  EnqueueWatch watch(kLimit, [&] { noticed.Notify(); });
  std::optional<decltype(watch.During())> first(watch.During());
  absl::SleepFor(kLimit / 4);
  const absl::Time begin = clocks::SteadyNow();
  const auto second = watch.During();
  first.reset();
  noticed.WaitForNotification();
  EXPECT_GE(clocks::SteadyNow() - begin, kLimit);
}

TEST(EnqueueWatchTest, EndsWhileSomethingIsUnderWay) {
  std::atomic<int> late = 0;
  auto watch = std::make_optional<EnqueueWatch>(kLong, [&] { ++late; });
  std::thread([&] { watch->During().Cancel(); }).join();
  watch.reset();
  EXPECT_EQ(late, 0);
}

}  // namespace
}  // namespace lossd::kernels::cuda::enqueue_watch_test
