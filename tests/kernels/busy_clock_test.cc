// SPDX-License-Identifier: Apache-2.0
#include "kernels/busy_clock.h"

#include <gtest/gtest.h>

namespace lossd::kernels::busy_clock_test {
namespace {

BusyClock::Clock::time_point At(int seconds) {
  return BusyClock::Clock::time_point() + std::chrono::seconds(seconds);
}

TEST(BusyClockTest, TimesThatOverlapCountOnce) {
  BusyClock clock;
  EXPECT_EQ(clock.Total(At(5)), absl::ZeroDuration());
  clock.Begin(At(10));
  EXPECT_EQ(clock.Total(At(11)), absl::Seconds(1)) << "what is under way counts";
  clock.Begin(At(12));
  clock.End(At(14));
  EXPECT_EQ(clock.Total(At(15)), absl::Seconds(5));
  clock.End(At(16));
  EXPECT_EQ(clock.Total(At(100)), absl::Seconds(6));
  clock.Begin(At(100));
  clock.End(At(103));
  EXPECT_EQ(clock.Total(At(200)), absl::Seconds(9));
  clock.Add(std::chrono::seconds(4));
  EXPECT_EQ(clock.Total(At(200)), absl::Seconds(13));
}

}  // namespace
}  // namespace lossd::kernels::busy_clock_test
