// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/call_timeouts.h"

#include <gtest/gtest.h>

#include <string>

#include "kernels/clocks/clock.h"

namespace lossd::rpc::call_timeouts_test {
namespace {

using Waits = CallClock::Waits;

constexpr CallTimeouts kTimeouts = {
    .open = absl::Seconds(1), .idle = absl::Seconds(2), .turn = absl::Seconds(3), .send = absl::Seconds(4)};

TEST(CallClockTest, SaysWhichLimitWasReached) {
  struct Case {
    Waits what;
    absl::Duration most;
    std::string flag;
  };
  for (const Case& c : {Case{Waits::kOpen, absl::Seconds(1), "open_timeout"},
                        Case{Waits::kMessage, absl::Seconds(2), "idle_timeout"},
                        Case{Waits::kTurn, absl::Seconds(3), "turn_timeout"},
                        Case{Waits::kSend, absl::Seconds(4), "send_timeout"}}) {
    const absl::Time start = absl::UnixEpoch();
    CallClock clock;
    clock.Set(c.what, start);
    absl::string_view limit;
    EXPECT_TRUE(clock.Check(start + c.most - absl::Milliseconds(1), kTimeouts, &limit).ok());
    EXPECT_EQ(limit, "");
    const absl::Status late = clock.Check(start + c.most, kTimeouts, &limit);
    EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_EQ(limit, c.flag);
    EXPECT_NE(late.message().find("--" + c.flag), absl::string_view::npos) << late;
  }
}

TEST(CallClockTest, NothingToWaitForTakesAnyTime) {
  CallClock clock;
  absl::string_view limit;
  EXPECT_TRUE(clock.Check(clocks::SteadyNow() + absl::Hours(100), kTimeouts, &limit).ok());
  clock.Set(Waits::kTurn);
  clock.Set(Waits::kNothing);
  EXPECT_TRUE(clock.Check(clocks::SteadyNow() + absl::Hours(100), kTimeouts, &limit).ok());
}

TEST(CallClockTest, StopsOnceItIsLate) {
  const absl::Time start = absl::UnixEpoch();
  CallClock clock;
  clock.Set(Waits::kSend, start);
  EXPECT_EQ(clock.StopIfLate(start + absl::Seconds(3), kTimeouts), "");
  EXPECT_EQ(clock.what(), Waits::kSend);
  EXPECT_EQ(clock.StopIfLate(start + absl::Seconds(4), kTimeouts), "send_timeout");
  EXPECT_EQ(clock.what(), Waits::kNothing);
  EXPECT_EQ(clock.StopIfLate(start + absl::Seconds(5), kTimeouts), "");
}

}  // namespace
}  // namespace lossd::rpc::call_timeouts_test
