// SPDX-License-Identifier: Apache-2.0
// Ends the process when its own end takes too long: a thread of it may wait for a device that is lost, or for
// something that nobody has thought of.
#ifndef LOSSD_SERVER_APP_EXIT_WATCH_H_
#define LOSSD_SERVER_APP_EXIT_WATCH_H_

#include <string>

#include "absl/time/time.h"

namespace lossd::app {

// What a drain may take beyond its timeout.
inline constexpr absl::Duration kGrace = absl::Seconds(10);
// What the process may take after that, to give back what it has: other ranks of it may wait for 20 seconds.
inline constexpr absl::Duration kFarewell = absl::Seconds(30);

// Ends the process with `status` after `limit`, with a line in the log that says that `what` does not end,
// unless it has ended by then. Thread-safe.
void EndWithin(absl::Duration limit, int status, std::string what);

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_EXIT_WATCH_H_
