// SPDX-License-Identifier: Apache-2.0
#include "kernels/clocks/clock.h"

#include <gtest/gtest.h>

#include "absl/time/clock.h"

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

}  // namespace
}  // namespace lossd::clocks::clock_test
