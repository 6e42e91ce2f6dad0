// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/admin/checkpoints.h"

namespace lossd::admin::named_locks_test {
namespace {

TEST(NamedLocksTest, OneHolderPerName) {
  NamedLocks locks;
  int counters[2] = {};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 2000; ++i) {
        const NamedLocks::Guard guard = locks.Lock(absl::StrCat("name", t % 2));
        ++counters[t % 2];
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(counters[0], 4000);
  EXPECT_EQ(counters[1], 4000);
}

TEST(NamedLocksTest, LetsGoEarly) {
  NamedLocks locks;
  NamedLocks::Guard first = locks.Lock("a");
  first.Unlock();
  NamedLocks::Guard second = locks.Lock("a");
  first.Unlock();
}

TEST(NamedLocksTest, OtherNamesDoNotWait) {
  NamedLocks locks;
  const NamedLocks::Guard guard = locks.Lock("a");
  absl::Notification done;
  std::thread other([&] {
    const NamedLocks::Guard second = locks.Lock("b");
    done.Notify();
  });
  EXPECT_TRUE(done.WaitForNotificationWithTimeout(absl::Seconds(20)));
  other.join();
}

}  // namespace
}  // namespace lossd::admin::named_locks_test
