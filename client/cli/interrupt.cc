// SPDX-License-Identifier: Apache-2.0
#include "client/cli/interrupt.h"

#include <signal.h>

#include <algorithm>
#include <atomic>

#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"

namespace lossd::cli {
namespace {

std::atomic<bool> g_received{false};
static_assert(std::atomic<bool>::is_always_lock_free);

void Install(int signal, void (*handler)(int), int flags) {
  struct sigaction action = {};
  action.sa_handler = handler;
  action.sa_flags = flags;
  sigemptyset(&action.sa_mask);
  sigaction(signal, &action, nullptr);
}

}  // namespace

Interrupt::Interrupt() {
  g_received = false;
  for (int signal : {SIGINT, SIGTERM}) {
    Install(
        signal, [](int) { g_received = true; }, SA_RESETHAND);
  }
}

Interrupt::~Interrupt() {
  for (int signal : {SIGINT, SIGTERM}) Install(signal, SIG_DFL, 0);
}

bool Interrupt::received() const { return g_received; }

void Interrupt::Sleep(absl::Duration duration) const {
  const absl::Time end = clocks::SteadyNow() + duration;
  while (!received() && clocks::SteadyNow() < end)
    absl::SleepFor(std::min(end - clocks::SteadyNow(), absl::Milliseconds(50)));
}

}  // namespace lossd::cli
