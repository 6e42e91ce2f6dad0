#include "server/rpc/call_registry.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "absl/time/clock.h"

namespace lossd::rpc {
namespace {

class FakeCall final : public WatchedCall {
 public:
  void CancelIfStuck(absl::Time limit) override {
    ++checks;
    limits_are_in_the_past = limits_are_in_the_past && limit < absl::Now();
  }
  std::atomic<int> checks{0};
  std::atomic<bool> limits_are_in_the_past{true};
};

TEST(CallRegistryTest, BoundsTheNumberOfCalls) {
  CallRegistry registry(2, absl::Seconds(60));
  FakeCall a, b, c;
  EXPECT_TRUE(registry.Add(&a));
  EXPECT_TRUE(registry.Add(&b));
  EXPECT_FALSE(registry.Add(&c));
  registry.Remove(&c);
  registry.Remove(&a);
  EXPECT_TRUE(registry.Add(&c));
  registry.Remove(&b);
  registry.Remove(&c);
}

TEST(CallRegistryTest, LooksAtCallsSeveralTimesPerTimeout) {
  CallRegistry registry(2, absl::Milliseconds(100));
  FakeCall call;
  ASSERT_TRUE(registry.Add(&call));
  const absl::Time limit = absl::Now() + absl::Seconds(10);
  while (call.checks < 3 && absl::Now() < limit) absl::SleepFor(absl::Milliseconds(5));
  registry.Remove(&call);
  const int checks = call.checks;
  EXPECT_GE(checks, 3);
  EXPECT_TRUE(call.limits_are_in_the_past);
  absl::SleepFor(absl::Milliseconds(60));
  EXPECT_EQ(call.checks, checks) << "a removed call was used";
}

TEST(CallRegistryTest, WaitsUntilEmpty) {
  CallRegistry registry(2, absl::Seconds(60));
  EXPECT_TRUE(registry.WaitUntilEmpty(absl::Now()));
  FakeCall call;
  ASSERT_TRUE(registry.Add(&call));
  EXPECT_FALSE(registry.WaitUntilEmpty(absl::Now() + absl::Milliseconds(20)));
  std::thread remover([&] {
    absl::SleepFor(absl::Milliseconds(20));
    registry.Remove(&call);
  });
  EXPECT_TRUE(registry.WaitUntilEmpty(absl::Now() + absl::Seconds(20)));
  remover.join();
}

}  // namespace
}  // namespace lossd::rpc
