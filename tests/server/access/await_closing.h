// SPDX-License-Identifier: Apache-2.0
// AwaitClosing, for tests that count the file descriptors of their process.
#ifndef LOSSD_TESTS_SERVER_ACCESS_AWAIT_CLOSING_H_
#define LOSSD_TESTS_SERVER_ACCESS_AWAIT_CLOSING_H_

#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"
#include "server/access/closer.h"

namespace lossd::access {

// Waits, at most a minute, until the other threads have closed the descriptors that they were given.
inline void AwaitClosing() {
  const absl::Time end = clocks::SteadyNow() + absl::Minutes(1);
  while (BeingClosed() > 0 && clocks::SteadyNow() < end) absl::SleepFor(absl::Milliseconds(1));
}

}  // namespace lossd::access

#endif  // LOSSD_TESTS_SERVER_ACCESS_AWAIT_CLOSING_H_
