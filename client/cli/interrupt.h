// SPDX-License-Identifier: Apache-2.0
// Turns Ctrl-C and SIGTERM into a flag, so that long commands end in order.
#ifndef LOSSD_CLIENT_CLI_INTERRUPT_H_
#define LOSSD_CLIENT_CLI_INTERRUPT_H_

#include "absl/time/time.h"

namespace lossd::cli {

// While one lives, signals only set the flag; a second one ends the process as usual. At most one at a time.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  // Thread-safe.
  bool received() const;
  // Sleeps for `duration` or until a signal comes.
  void Sleep(absl::Duration duration) const;
};

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_INTERRUPT_H_
