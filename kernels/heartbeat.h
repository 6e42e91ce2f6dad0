// SPDX-License-Identifier: Apache-2.0
// A sign of life: one side beats whenever it makes progress, the other asks how long ago that was.
//
// Thread-safe; neither member blocks.
#ifndef LOSSD_KERNELS_HEARTBEAT_H_
#define LOSSD_KERNELS_HEARTBEAT_H_

#include <atomic>
#include <chrono>

#include "absl/time/time.h"

namespace lossd::kernels {

class Heartbeat {
 public:
  void Beat() { last_ = Clock::now(); }
  // Since the last beat, or since this object began.
  absl::Duration Silence() const { return absl::FromChrono(Clock::now() - last_.load()); }

 private:
  using Clock = std::chrono::steady_clock;  // does not jump when the time of day is set
  std::atomic<Clock::time_point> last_ = Clock::now();
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_HEARTBEAT_H_
