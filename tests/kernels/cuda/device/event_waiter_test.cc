// SPDX-License-Identifier: Apache-2.0
// Waits for events of a GPU, watches of work that is enqueued, and exchanges that are timed on a stream. What
// cudaEventSynchronize does is played by functions here. The events that a timer takes are played by
// functions that the linker gives to the code: each takes a place in the order of the stream, and has
// happened when the test says so.
#include "kernels/cuda/device/event_waiter.h"

#include <cuda_runtime_api.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/clocks/clock.h"

namespace {

// What is played. Of one thread.
struct Play {
  int created = 0, alive = 0, recorded = 0;
  int happened = 0;  // so many records of the stream
  int most = 1000;   // that can be created
  cudaError_t last_error = cudaSuccess;
  std::map<cudaEvent_t, int> place;  // of the last record
};
Play* play = nullptr;

cudaError_t Said(cudaError_t error) {
  if (error != cudaSuccess) play->last_error = error;
  return error;
}

}  // namespace

// NOLINTBEGIN(bugprone-reserved-identifier): the linker makes these names.
extern "C" {
// The runtime's own function, for the other tests of this program.
#define LOSSD_PLAYED(name, parameters, arguments)        \
  cudaError_t __real_##name parameters;                  \
  static cudaError_t Played_##name parameters;           \
  cudaError_t __wrap_##name parameters {                 \
    if (play == nullptr) return __real_##name arguments; \
    return Played_##name arguments;                      \
  }                                                      \
  static cudaError_t Played_##name parameters

LOSSD_PLAYED(cudaEventCreate, (cudaEvent_t * event), (event)) {
  if (play->created == play->most) return Said(cudaErrorMemoryAllocation);
  ++play->alive;
  *event = reinterpret_cast<cudaEvent_t>(static_cast<intptr_t>(++play->created));
  return cudaSuccess;
}
LOSSD_PLAYED(cudaEventDestroy, (cudaEvent_t event), (event)) {
  --play->alive;
  return cudaSuccess;
}
LOSSD_PLAYED(cudaEventRecord, (cudaEvent_t event, cudaStream_t stream), (event, stream)) {
  play->place[event] = ++play->recorded;
  return cudaSuccess;
}
LOSSD_PLAYED(cudaEventQuery, (cudaEvent_t event), (event)) {
  return Said(play->place[event] <= play->happened ? cudaSuccess : cudaErrorNotReady);
}
// A millisecond between two records.
LOSSD_PLAYED(cudaEventElapsedTime, (float* milliseconds, cudaEvent_t begin, cudaEvent_t end),
             (milliseconds, begin, end)) {
  *milliseconds = static_cast<float>(play->place[end] - play->place[begin]);
  return cudaSuccess;
}
LOSSD_PLAYED(cudaGetLastError, (), ()) {
  const cudaError_t error = play->last_error;
  play->last_error = cudaSuccess;
  return error;
}
#undef LOSSD_PLAYED
}
// NOLINTEND(bugprone-reserved-identifier)

namespace lossd::kernels::cuda::event_waiter_test {
namespace {

constexpr absl::Duration kLong = absl::Minutes(5);  // longer than a test

cudaEvent_t EventOf(int number) { return reinterpret_cast<cudaEvent_t>(static_cast<intptr_t>(number)); }

absl::Status Nothing() { return absl::OkStatus(); }

absl::Duration CpuTime() {
  timespec time = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return absl::DurationFromTimespec(time);
}

TEST(EventWaiterTest, SaysWhatTheEventSays) {
  std::vector<cudaEvent_t> seen;
  EventWaiter waiter(0, [&](cudaEvent_t event) {
    seen.push_back(event);
    return event == EventOf(2) ? cudaErrorLaunchFailure : cudaSuccess;
  });
  for (const int event : {1, 2, 3}) {
    const auto result = waiter.Wait(EventOf(event), kLong, Nothing);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(*result, event == 2 ? cudaErrorLaunchFailure : cudaSuccess);
  }
  EXPECT_EQ(seen, (std::vector<cudaEvent_t>{EventOf(1), EventOf(2), EventOf(3)}));
}

TEST(EventWaiterTest, LooksUntilTheEventHasHappened) {
  absl::Notification happens;
  EventWaiter waiter(0, [&](cudaEvent_t) {
    happens.WaitForNotification();
    return cudaSuccess;
  });
  int looks = 0;
  const auto result = waiter.Wait(EventOf(1), absl::Milliseconds(1), [&] {
    if (++looks == 3) happens.Notify();
    return absl::OkStatus();
  });
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_GE(looks, 3);
}

// As of a GPU that waits for another in an exchange, which the error of the look is the reason to end.
TEST(EventWaiterTest, AnErrorEndsTheWaitAndTheNextEventIsAnother) {
  absl::Notification ends;
  EventWaiter waiter(0, [&](cudaEvent_t event) {
    if (event == EventOf(1)) ends.WaitForNotification();
    return event == EventOf(1) ? cudaErrorLaunchFailure : cudaSuccess;
  });
  const auto fails = [] { return absl::UnavailableError("too late"); };
  EXPECT_EQ(waiter.Wait(EventOf(1), absl::Milliseconds(1), fails).status(),
            absl::UnavailableError("too late"));
  EXPECT_FALSE(waiter.Settle()) << "it is at the event still";
  EXPECT_EQ(waiter.Wait(EventOf(2), absl::Milliseconds(1), fails).status(),
            absl::UnavailableError("too late"));
  ends.Notify();
  EXPECT_TRUE(waiter.Settle());
  const auto result = waiter.Wait(EventOf(2), kLong, Nothing);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(*result, cudaSuccess);
}

TEST(EventWaiterTest, ThreadsTakeTurns) {
  std::atomic<int> at_once = 0, most = 0;
  EventWaiter waiter(0, [&](cudaEvent_t event) {
    most = std::max(most.load(), ++at_once);
    std::this_thread::yield();
    --at_once;
    return event == EventOf(7) ? cudaErrorLaunchFailure : cudaSuccess;
  });
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      for (int n = 0; n < 50; ++n) {
        const auto result = waiter.Wait(EventOf(i), kLong, Nothing);
        ASSERT_TRUE(result.ok());
        EXPECT_EQ(*result, i == 7 ? cudaErrorLaunchFailure : cudaSuccess);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(most, 1);
}

// A GPU that hangs does not hang the end of what waited for it.
TEST(EventWaiterTest, EndsWithoutAThreadThatDoesNotComeBack) {
  const auto ends = std::make_shared<absl::Notification>();
  {
    EventWaiter waiter(0, [ends](cudaEvent_t) {
      ends->WaitForNotification();
      return cudaSuccess;
    });
    EXPECT_FALSE(
        waiter.Wait(EventOf(1), absl::Milliseconds(1), [] { return absl::UnavailableError("too late"); })
            .ok());
  }
  ends->Notify();  // the thread that was left behind has what it needs
  absl::SleepFor(absl::Milliseconds(50));
}

// As many waits at a time as four GPUs have. Asking every 50 us took a tenth of the time of each.
TEST(EventWaiterTest, WaitingTakesNoCpuTime) {
  constexpr absl::Duration kHeld = absl::Seconds(1);
  absl::Notification happens;
  std::vector<std::unique_ptr<EventWaiter>> waiters;
  for (int i = 0; i < 4; ++i) {
    waiters.push_back(std::make_unique<EventWaiter>(i, [&](cudaEvent_t) {
      happens.WaitForNotification();
      return cudaSuccess;
    }));
  }
  std::vector<std::thread> threads;
  const absl::Duration before = CpuTime();
  for (auto& waiter : waiters) {
    threads.emplace_back(
        [&] { EXPECT_TRUE(waiter->Wait(EventOf(1), absl::Milliseconds(100), Nothing).ok()); });
  }
  absl::SleepFor(kHeld);
  happens.Notify();
  for (std::thread& thread : threads) thread.join();
  EXPECT_LT(CpuTime() - before, kHeld / 20);
}

TEST(PauseAfterTest, SpinsBrieflyAndThenIsLateByATenthAtMost) {
  EXPECT_EQ(PauseAfter(absl::ZeroDuration()), absl::ZeroDuration());
  EXPECT_EQ(PauseAfter(absl::Microseconds(19)), absl::ZeroDuration());
  EXPECT_EQ(PauseAfter(absl::Microseconds(20)), kShortestPause);
  EXPECT_EQ(PauseAfter(absl::Microseconds(500)), kShortestPause);
  EXPECT_EQ(PauseAfter(absl::Milliseconds(2)), absl::Microseconds(200));
  EXPECT_EQ(PauseAfter(absl::Milliseconds(20)), kLongestPause);
  EXPECT_EQ(PauseAfter(kLong), kLongestPause);
  // Every 50 us it would be asked 400 times.
  int asked = 0;
  for (absl::Duration waited = kSpin; waited < absl::Milliseconds(20); waited += PauseAfter(waited)) ++asked;
  EXPECT_LT(asked, 80);
}

// ---- watches ----

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

// ---- timers ----

class StreamTimerTest : public ::testing::Test {
 protected:
  StreamTimerTest() { play = &play_; }
  ~StreamTimerTest() override { play = nullptr; }

  void Exchange(StreamTimer& timer, ExchangeKind kind) {
    EXPECT_TRUE(timer
                    .Time(kind, nullptr,
                          [this] {
                            ++enqueued_;
                            return absl::OkStatus();
                          })
                    .ok());
  }
  absl::Duration Total(ExchangeKind kind) { return clocks_.of(kind).Total(); }

  Play play_;
  ExchangeClocks clocks_;
  int enqueued_ = 0;
};

constexpr ExchangeKind kRows = ExchangeKind::kRowStatistics;
constexpr ExchangeKind kHidden = ExchangeKind::kHiddenGradients;

TEST_F(StreamTimerTest, WhatHasEndedCountsByKindAndEventsAreUsedAgain) {
  StreamTimer timer(&clocks_);
  Exchange(timer, kRows);
  Exchange(timer, kHidden);
  timer.Collect();
  EXPECT_EQ(Total(kRows), absl::ZeroDuration());
  play_.happened = 3;  // the second has begun
  timer.Collect();
  EXPECT_EQ(Total(kRows), absl::Milliseconds(1));
  EXPECT_EQ(Total(kHidden), absl::ZeroDuration());
  play_.happened = 4;
  Exchange(timer, kRows);
  EXPECT_EQ(Total(kHidden), absl::Milliseconds(1));
  EXPECT_EQ(play_.created, 4);
  EXPECT_EQ(enqueued_, 3);
}

// The launch of a kernel that follows asks for the last error.
TEST_F(StreamTimerTest, AnEventThatIsStillToComeIsNoErrorOfTheThread) {
  StreamTimer timer(&clocks_);
  Exchange(timer, kRows);
  Exchange(timer, kRows);
  EXPECT_EQ(play_.last_error, cudaSuccess);
}

TEST_F(StreamTimerTest, ThereAreOnlySoManyEvents) {
  {
    StreamTimer timer(&clocks_);
    const int most = static_cast<int>(StreamTimer::kMostUnderWay);
    for (int i = 0; i < most + 5; ++i) Exchange(timer, kRows);
    EXPECT_EQ(enqueued_, most + 5);
    EXPECT_EQ(play_.created, 2 * most);
    play_.happened = play_.recorded;
    timer.Collect();
    EXPECT_EQ(Total(kRows), most * absl::Milliseconds(1));
  }
  EXPECT_EQ(play_.alive, 0);
}

TEST_F(StreamTimerTest, WhatCannotBeTimedIsEnqueuedAllTheSame) {
  StreamTimer timer(&clocks_);
  play_.most = 1;  // the second of a pair is missing
  Exchange(timer, kRows);
  EXPECT_EQ(enqueued_, 1);
  EXPECT_EQ(play_.last_error, cudaSuccess);
  EXPECT_EQ(timer.Time(kRows, nullptr, [] { return absl::UnavailableError("lost"); }),
            absl::UnavailableError("lost"));
  timer.Collect();
  EXPECT_EQ(Total(kRows), absl::ZeroDuration());
  EXPECT_EQ(play_.recorded, 0);
  EXPECT_EQ(play_.alive, 0);
  play_.most = 1000;  // later there are
  Exchange(timer, kRows);
  EXPECT_EQ(play_.created, 3);
}

}  // namespace
}  // namespace lossd::kernels::cuda::event_waiter_test
