// SPDX-License-Identifier: Apache-2.0
#include "server/engine/runtime.h"

#include <thread>
#include <utility>

#include "kernels/clocks/clock.h"

namespace lossd::engine {
namespace {

class ThreadsAndClock final : public Runtime {
 public:
  absl::AnyInvocable<void()> Start(Loop* loop) override {
    return [thread = std::thread([loop] { loop->Run(); })]() mutable { thread.join(); };
  }
  void Wait(const absl::Notification& done) override { done.WaitForNotification(); }
  absl::Time Now() override { return clocks::SteadyNow(); }
  absl::Time WallNow() override { return clocks::WallNow(); }
};

}  // namespace

Runtime* SystemRuntime() {
  static ThreadsAndClock runtime;
  return &runtime;
}

}  // namespace lossd::engine
