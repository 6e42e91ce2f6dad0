// SPDX-License-Identifier: Apache-2.0
// What an engine needs of the system besides a device: threads for its loops, a way to wait, and the time. A
// server has the system's (SystemRuntime). The simulation (tests/server/engine/simulation) has a scheduler in
// its place, which decides what happens next.
//
// Thread-safe.
#ifndef LOSSD_SERVER_ENGINE_RUNTIME_H_
#define LOSSD_SERVER_ENGINE_RUNTIME_H_

#include <cstdint>

#include "absl/functional/any_invocable.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

namespace lossd::engine {

class Runtime {
 public:
  // Work of the engine's own that goes on beside its callers. Whoever runs a loop calls either Run, or, one
  // call at a time, RunSome until it returns kEnded.
  class Loop {
   public:
    enum class Progress : uint8_t { kWorked, kIdle, kEnded };

    virtual ~Loop() = default;
    // Returns when the loop has been stopped and nothing is left to do.
    virtual void Run() = 0;
    // Does what is to be done next. kIdle: there is nothing, and there will be nothing before HasNews.
    virtual Progress RunSome() = 0;
    // True if there may be something to do that was not there when RunSome returned kIdle.
    virtual bool HasNews() = 0;
  };

  virtual ~Runtime() = default;
  // Lets a loop, which outlives its run, run from now on. Returns what waits for its end, to be called once.
  virtual absl::AnyInvocable<void()> Start(Loop* loop) = 0;
  // Blocks until `done` has been notified.
  virtual void Wait(const absl::Notification& done) = 0;
  // Of the steady clock, and of the wall clock: kernels/clocks/clock.h.
  virtual absl::Time Now() = 0;
  virtual absl::Time WallNow() = 0;
};

// A thread for each loop, and the system's clock. Lives as long as the process.
Runtime* SystemRuntime();

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_RUNTIME_H_
