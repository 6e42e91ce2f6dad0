// SPDX-License-Identifier: Apache-2.0
// Tests of clock.h: the steady clock, heartbeats, and waits until a time.
#include "absl/time/clock.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "kernels/clocks/clock.h"
#include "tests/support/system_clock.h"

// ---- Clock ----

namespace lossd::clocks::clock_test {
namespace {

TEST(ClockTest, TheWallClockMovesAndTheSteadyOneDoesNot) {
  const absl::Time wall = WallNow();
  const absl::Time steady = SteadyNow();
  for (const absl::Duration ahead : {absl::Hours(2), -absl::Hours(2)}) {
    SetWallClockForTesting(ahead);
    EXPECT_LT(absl::AbsDuration(WallNow() - wall - ahead), absl::Minutes(1));
    EXPECT_GE(SteadyNow(), steady);
    EXPECT_LT(SteadyNow() - steady, absl::Minutes(1));
    EXPECT_LT(absl::AbsDuration(OnTheWall(steady) - wall - ahead), absl::Minutes(1));
  }
  SetWallClockForTesting(absl::ZeroDuration());
  EXPECT_LT(absl::AbsDuration(WallNow() - absl::Now()), absl::Minutes(1));
}

TEST(ClockTest, InfiniteTimesStay) {
  EXPECT_EQ(OnTheWall(absl::InfiniteFuture()), absl::InfiniteFuture());
  EXPECT_EQ(OnTheWall(absl::InfinitePast()), absl::InfinitePast());
}

TEST(ClockTest, AsksBeforeSleepingAtLeastOnceAndNotForEver) {
  int asked = 0;
  EXPECT_TRUE(AskBeforeSleeping([&] { return ++asked > 0; }));
  EXPECT_EQ(asked, 1);
  EXPECT_FALSE(AskBeforeSleeping([] { return false; }));
}

TEST(HeartbeatTest, SilenceIsTheTimeSinceTheLastBeat) {
  Heartbeat beating;
  Heartbeat silent;
  absl::SleepFor(absl::Milliseconds(50));
  beating.Beat();
  const absl::Duration since_the_beat = beating.Silence();
  EXPECT_GE(since_the_beat, absl::ZeroDuration());
  EXPECT_GE(silent.Silence(), since_the_beat + absl::Milliseconds(50));
}

}  // namespace
}  // namespace lossd::clocks::clock_test

// ---- Waits ----
// Waits end when their time has passed, whatever the wall clock says. This program has a clock_gettime of its
// own, so that its wall clock can be ahead or behind of the kernel's.

namespace lossd::clocks::waits_test {
namespace {

using test::system_ahead;

constexpr absl::Duration kShort = absl::Milliseconds(60);
constexpr absl::Duration kPatience = absl::Seconds(30);

absl::Duration Took(const std::function<void()>& work) {
  const absl::Time begin = SteadyNow();
  work();
  return SteadyNow() - begin;
}

class WaitsTest : public testing::TestWithParam<int64_t> {
 protected:
  WaitsTest() {
    system_ahead = GetParam();
    if (kMovesTheSystemsClock && GetParam() != 0) {
      const int64_t seconds = absl::ToUnixSeconds(absl::Now()) - GetParam();
      timespec real{};
      syscall(SYS_clock_gettime, CLOCK_REALTIME, &real);
      EXPECT_LE(std::abs(seconds - real.tv_sec), 5) << "the program's clock is not the test's";
    }
  }
  ~WaitsTest() override { system_ahead = 0; }

  absl::Mutex mutex_;
};

TEST_P(WaitsTest, EndsInTime) {
  bool never = false;
  absl::MutexLock lock(&mutex_);
  const absl::Duration took = Took([&] { EXPECT_FALSE(AwaitFor(mutex_, absl::Condition(&never), kShort)); });
  EXPECT_GE(took, kShort);
  EXPECT_LT(took, kPatience);
  EXPECT_FALSE(AwaitUntil(mutex_, absl::Condition(&never), SteadyNow() + kShort));
  absl::CondVar changed;
  EXPECT_LT(Took([&] { WaitFor(changed, mutex_, kShort); }), kPatience);
  const Event event;
  EXPECT_LT(Took([&] { EXPECT_FALSE(event.AwaitFor(kShort)); }), kPatience);
}

TEST_P(WaitsTest, SeesWhatHappens) {
  for (const absl::Duration limit : {absl::Hours(1), absl::InfiniteDuration()}) {
    bool happened = false;
    std::thread other([&] {
      absl::SleepFor(absl::Milliseconds(20));
      absl::MutexLock lock(&mutex_);
      happened = true;
    });
    {
      absl::MutexLock lock(&mutex_);
      EXPECT_TRUE(AwaitFor(mutex_, absl::Condition(&happened), limit));
    }
    other.join();
  }
  Event event;
  std::thread other([&] { event.Notify(); });
  EXPECT_TRUE(event.AwaitFor(absl::Hours(1)));
  EXPECT_TRUE(event.happened());
  other.join();
}

TEST_P(WaitsTest, ASignalEndsAWait) {
  absl::CondVar changed;
  std::atomic<bool> stop{false};
  std::thread other([&] {
    while (!stop) {
      absl::MutexLock lock(&mutex_);
      changed.Signal();
    }
  });
  EXPECT_LT(Took([&] {
              absl::MutexLock lock(&mutex_);
              WaitFor(changed, mutex_, absl::Hours(1));
            }),
            kPatience);
  stop = true;
  other.join();
}

TEST_P(WaitsTest, OnlyAsks) {
  const bool no = false;
  const bool yes = true;
  absl::MutexLock lock(&mutex_);
  EXPECT_FALSE(AwaitUntil(mutex_, absl::Condition(&no), SteadyNow() - absl::Hours(1)));
  EXPECT_TRUE(AwaitUntil(mutex_, absl::Condition(&yes), absl::InfinitePast()));
}

INSTANTIATE_TEST_SUITE_P(WallClock, WaitsTest, testing::Values(0, 7200, -7200));

// Waits of many threads that come and go, on mutexes that others hold.
TEST(ManyWaitsTest, EachEnds) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 16; ++i) {
    threads.emplace_back([i] {
      for (int round = 0; round < 40; ++round) {
        absl::Mutex mutex;
        bool done = false;
        std::thread setter([&] {
          absl::MutexLock lock(&mutex);
          absl::SleepFor(absl::Microseconds(100 * (round % 7)));
          done = i % 2 == 0;
        });
        {
          absl::MutexLock lock(&mutex);
          const absl::Duration limit = absl::Microseconds(150 * (round % 5 + 1));
          const bool told = AwaitFor(mutex, absl::Condition(&done), limit);
          EXPECT_TRUE(!told || done);
        }
        setter.join();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void LockBoth(absl::Mutex& first, absl::Mutex& second) {
  absl::MutexLock outer(&first);
  absl::MutexLock inner(&second);
}

// An Abseil that was compiled for debugging ends the program at the second call of LockBoth, unless the
// search for cycles is switched off.
TEST(LocksTest, AreTakenInAnyOrderWithoutTheSearch) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer searches, too";
#endif
  const auto take = [] {
    TakeLocksWithoutSearch();
    absl::Mutex a, b;
    LockBoth(a, b);
    LockBoth(b, a);
    _exit(0);
  };
  EXPECT_EXIT(take(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace lossd::clocks::waits_test
