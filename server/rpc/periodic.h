// SPDX-License-Identifier: Apache-2.0
// Runs a function on a thread of its own, again and again, until destroyed.
#ifndef LOSSD_SERVER_RPC_PERIODIC_H_
#define LOSSD_SERVER_RPC_PERIODIC_H_

#include <thread>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/time/time.h"
#include "kernels/clocks/waits.h"

namespace lossd::rpc {

class Periodic {
 public:
  // The first run is after one `pause`. `run` must be quick: the destructor waits for it.
  Periodic(absl::Duration pause, absl::AnyInvocable<void()> run)
      : thread_([this, pause, run = std::move(run)]() mutable {
          while (!stopping_.AwaitFor(pause)) run();
        }) {}
  ~Periodic() {
    stopping_.Notify();
    thread_.join();
  }

 private:
  clocks::Event stopping_;
  std::thread thread_;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_PERIODIC_H_
