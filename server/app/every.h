// SPDX-License-Identifier: Apache-2.0
// Something that is to be done at most once in a while.
#ifndef LOSSD_SERVER_APP_EVERY_H_
#define LOSSD_SERVER_APP_EVERY_H_

#include "absl/time/time.h"
#include "kernels/clocks/clock.h"

namespace lossd::app {

// Ready at most once per `pause`. Thread-compatible.
class Every {
 public:
  explicit Every(absl::Duration pause) : pause_(pause) {}
  bool Ready() {
    const absl::Time now = clocks::SteadyNow();
    if (now < next_) return false;
    next_ = now + pause_;
    return true;
  }

 private:
  const absl::Duration pause_;
  absl::Time next_ = absl::InfinitePast();
};

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_EVERY_H_
