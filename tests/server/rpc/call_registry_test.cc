// SPDX-License-Identifier: Apache-2.0
// Tests of call_registry.h: the registry of open calls and the timeouts of calls.
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"
#include "server/rpc/request_call.h"

// ---- Call registry ----

namespace lossd::rpc::call_registry_test {
namespace {

class FakeCall final : public WatchedCall {
 public:
  absl::string_view EndIfLate(absl::Time, const CallTimeouts&) override {
    ++checks;
    return late ? "idle_timeout" : "";
  }
  void GiveUpPlace(absl::Status why) override { given_up = std::move(why); }
  absl::Status given_up;
  std::atomic<int> checks{0};
  std::atomic<bool> late{false};
};

TEST(CallRegistryTest, BoundsTheNumberOfCalls) {
  std::vector<std::string> limits;
  CallRegistry registry({.max_calls = 2,
                         .flag = "max_tensor_calls",
                         .on_limit = [&](absl::string_view limit) { limits.emplace_back(limit); }});
  FakeCall a, b, c;
  EXPECT_TRUE(registry.Add(&a, "x").ok());
  EXPECT_TRUE(registry.Add(&b, "y").ok());
  const absl::Status refused = registry.Add(&c, "z");
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(refused.message().find("--max_tensor_calls"), absl::string_view::npos) << refused;
  registry.Remove(&c);
  registry.Remove(&a);
  EXPECT_TRUE(registry.Add(&c, "z").ok());
  registry.Remove(&b);
  registry.Remove(&c);
  EXPECT_EQ(limits, std::vector<std::string>{"max_tensor_calls"});
}

TEST(CallRegistryTest, APeerLeavesPlacesToOthers) {
  CallRegistry registry({.max_calls = 8, .peer_share = 0.5});
  FakeCall calls[6];
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(registry.Add(&calls[i], "greedy").ok()) << i;
  const absl::Status refused = registry.Add(&calls[4], "greedy");
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(refused.message().find("greedy has 4"), absl::string_view::npos) << refused;
  EXPECT_NE(refused.message().find("--peer_share"), absl::string_view::npos) << refused;
  EXPECT_TRUE(registry.Add(&calls[5], "other").ok());
  for (FakeCall& call : calls) registry.Remove(&call);
}

TEST(CallRegistryTest, WhoHasNoPlaceGetsTheOldestCallsPlace) {
  CallRegistry registry({.max_calls = 3, .flag = "max_waiting_calls", .peer_share = 0.5, .end_oldest = true});
  FakeCall calls[6];
  ASSERT_TRUE(registry.Add(&calls[0], "a").ok());
  ASSERT_TRUE(registry.Add(&calls[1], "b").ok());
  ASSERT_TRUE(registry.Add(&calls[2], "c").ok());
  EXPECT_EQ(registry.Add(&calls[3], "b").code(), absl::StatusCode::kResourceExhausted);  // it has one
  EXPECT_TRUE(calls[0].given_up.ok());
  EXPECT_TRUE(registry.Add(&calls[4], "d").ok());
  EXPECT_EQ(calls[0].given_up.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(calls[0].given_up.message().find("--max_waiting_calls"), absl::string_view::npos)
      << calls[0].given_up;
  EXPECT_TRUE(registry.Add(&calls[5], "e").ok());
  EXPECT_FALSE(calls[1].given_up.ok());
  EXPECT_TRUE(calls[2].given_up.ok());
  for (FakeCall& call : calls) registry.Remove(&call);
}

TEST(CallRegistryTest, LooksAtCallsSeveralTimesPerTimeout) {
  std::atomic<int> ended{0};
  CallRegistry registry({.max_calls = 2,
                         .timeouts = {.idle = absl::Milliseconds(100)},
                         .on_limit = [&](absl::string_view) { ++ended; }});
  FakeCall call;
  ASSERT_TRUE(registry.Add(&call, "x").ok());
  const absl::Time limit = clocks::SteadyNow() + absl::Minutes(2);
  while (call.checks < 3 && clocks::SteadyNow() < limit) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_EQ(ended, 0);
  call.late = true;
  while (ended == 0 && clocks::SteadyNow() < limit) absl::SleepFor(absl::Milliseconds(5));
  registry.Remove(&call);
  const int checks = call.checks;
  EXPECT_GE(checks, 3);
  EXPECT_GE(ended, 1);
  absl::SleepFor(absl::Milliseconds(60));
  EXPECT_EQ(call.checks, checks) << "a removed call was used";
}

TEST(CallRegistryTest, LooksAtEachOpenCallFromTheOldestToTheYoungest) {
  CallRegistry registry({.max_calls = 64, .peer_share = 1.0});
  std::vector<FakeCall> calls(20);
  for (size_t i = 0; i < calls.size(); ++i) {
    ASSERT_TRUE(registry.Add(&calls[i], i % 2 == 0 ? "even" : "odd").ok());
  }
  for (size_t i = 0; i < calls.size(); i += 3) registry.Remove(&calls[i]);
  std::vector<size_t> seen;
  registry.ForEach([&](WatchedCall& call, const std::string& peer, uint64_t number) {
    const auto index = static_cast<size_t>(number);
    ASSERT_LT(index, calls.size());
    EXPECT_EQ(&call, &calls[index]);
    EXPECT_EQ(peer, index % 2 == 0 ? "even" : "odd");
    seen.push_back(index);
  });
  std::vector<size_t> open;
  for (size_t i = 0; i < calls.size(); ++i) {
    if (i % 3 != 0) open.push_back(i);
  }
  EXPECT_EQ(seen, open);
  for (FakeCall& call : calls) registry.Remove(&call);
}

TEST(CallRegistryTest, WaitsUntilEmpty) {
  CallRegistry registry({.max_calls = 2});
  EXPECT_TRUE(registry.WaitUntilEmpty(clocks::SteadyNow()));
  FakeCall call;
  ASSERT_TRUE(registry.Add(&call, "x").ok());
  EXPECT_FALSE(registry.WaitUntilEmpty(clocks::SteadyNow() + absl::Milliseconds(20)));
  std::thread remover([&] {
    absl::SleepFor(absl::Milliseconds(20));
    registry.Remove(&call);
  });
  EXPECT_TRUE(registry.WaitUntilEmpty(clocks::SteadyNow() + absl::Minutes(2)));
  remover.join();
}

}  // namespace
}  // namespace lossd::rpc::call_registry_test

// ---- Call timeouts ----

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
