// SPDX-License-Identifier: Apache-2.0
// Waits for events of a GPU. What cudaEventSynchronize does is played by functions here.
#include "kernels/cuda/device/event_waiter.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"

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

}  // namespace
}  // namespace lossd::kernels::cuda::event_waiter_test
