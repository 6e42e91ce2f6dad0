// SPDX-License-Identifier: Apache-2.0
// Ends the process when it was asked to stop and its start does not end: while it waits for a device, for
// other ranks or for a large checkpoint, nobody takes the signal.
#ifndef LOSSD_SERVER_APP_START_WATCH_H_
#define LOSSD_SERVER_APP_START_WATCH_H_

#include <thread>

#include "absl/synchronization/notification.h"
#include "kernels/clocks/waits.h"
#include "server/app/stop_events.h"

namespace lossd::app {

// Watches until it goes. Thread-compatible.
class StartWatch {
 public:
  // `events` outlives the object.
  explicit StartWatch(const StopEvents* events);
  ~StartWatch();
  StartWatch(const StartWatch&) = delete;
  StartWatch& operator=(const StartWatch&) = delete;

 private:
  void Watch();

  const StopEvents* const events_;
  clocks::Event started_;
  std::thread thread_;
};

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_START_WATCH_H_
