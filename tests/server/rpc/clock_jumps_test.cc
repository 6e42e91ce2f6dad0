// SPDX-License-Identifier: Apache-2.0
// Calls that wait end after the time that was set, also while somebody sets the machine's clock.
#include <gtest/gtest.h>

#include <atomic>

#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"
#include "server/log/log.h"
#include "server/rpc/request_call.h"
#include "server/rpc/workers.h"
#include "tests/support/system_clock.h"

namespace lossd::rpc::clock_jumps_test {
namespace {

constexpr int64_t kJump = 2 * 3600;  // seconds
constexpr absl::Duration kPatience = absl::Seconds(60);

// Waits for its next message since it was made.
class WaitingCall final : public WatchedCall {
 public:
  WaitingCall() { clock_.Set(CallClock::Waits::kMessage); }
  absl::string_view EndIfLate(absl::Time now, const CallTimeouts& timeouts) override {
    ++checks;
    const absl::string_view limit = clock_.StopIfLate(now, timeouts);
    if (!limit.empty()) ended = true;
    return limit;
  }
  std::atomic<int> checks{0};
  std::atomic<bool> ended{false};

 private:
  CallClock clock_;  // of the registry's thread from now on
};

class ClockJumpsTest : public testing::Test {
 protected:
  ~ClockJumpsTest() override { test::system_ahead = 0; }
  // Does not ask again once the condition held, since asking may use up what there is.
  template <typename Condition>
  static bool Becomes(Condition condition) {
    const absl::Time end = clocks::SteadyNow() + kPatience;
    while (!condition()) {
      if (clocks::SteadyNow() >= end) return false;
      absl::SleepFor(absl::Milliseconds(2));
    }
    return true;
  }
};

TEST_F(ClockJumpsTest, TwoHoursAheadEndNoCall) {
  // The shortest timeout says how often the registry looks.
  CallRegistry registry(
      {.max_calls = 2, .timeouts = {.open = absl::Milliseconds(80), .idle = absl::Hours(1)}});
  WaitingCall call;
  ASSERT_TRUE(registry.Add(&call, "x").ok());
  EXPECT_TRUE(Becomes([&] { return call.checks > 1; }));
  test::system_ahead = kJump;
  const int before = call.checks;
  EXPECT_TRUE(Becomes([&] { return call.checks > before + 3; }));
  EXPECT_FALSE(call.ended);
  registry.Remove(&call);
}

TEST_F(ClockJumpsTest, TwoHoursBackKeepNoCall) {
  CallRegistry registry({.max_calls = 2, .timeouts = {.idle = absl::Milliseconds(200)}});
  WaitingCall call;
  ASSERT_TRUE(registry.Add(&call, "x").ok());
  test::system_ahead = -kJump;
  EXPECT_TRUE(Becomes([&] { return call.ended.load(); }));
  EXPECT_FALSE(registry.WaitUntilEmpty(clocks::SteadyNow() + absl::Milliseconds(20)));
  registry.Remove(&call);
}

TEST_F(ClockJumpsTest, WhatIsDonePeriodicallyGoesOn) {
  for (const int64_t jump : {kJump, -kJump}) {
    std::atomic<int> runs{0};
    const Periodic periodic(absl::Milliseconds(5), [&runs] { ++runs; });
    test::system_ahead = jump;
    const int before = runs;
    EXPECT_TRUE(Becomes([&] { return runs > before + 3; })) << jump;
  }
}

TEST_F(ClockJumpsTest, BudgetsOfLinesAreFilledAsEver) {
  log::LineBudget budget(1);
  EXPECT_TRUE(budget.Take().has_value());
  test::system_ahead = kJump;
  EXPECT_FALSE(budget.Take().has_value());
  test::system_ahead = -kJump;
  EXPECT_TRUE(Becomes([&] { return budget.Take().has_value(); }));
}

}  // namespace
}  // namespace lossd::rpc::clock_jumps_test
