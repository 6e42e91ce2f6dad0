#include "server/app/stop_events.h"

namespace lossd::app {
namespace {

// Wakes the waiting thread; sent to that thread alone.
int WakeSignal() { return SIGRTMIN; }

int NextOf(const sigset_t& signals) {
  int signal = 0;
  while (sigwait(&signals, &signal) != 0) {
  }
  return signal;
}

}  // namespace

StopEvents::StopEvents() : waiter_(pthread_self()) {
  sigemptyset(&signals_);
  sigaddset(&signals_, SIGTERM);
  sigaddset(&signals_, SIGINT);
  sigset_t blocked = signals_;
  sigaddset(&blocked, WakeSignal());
  pthread_sigmask(SIG_BLOCK, &blocked, nullptr);
}

void StopEvents::NotifyDeviceLost() {
  device_lost_ = true;
  pthread_kill(waiter_, WakeSignal());
}

void StopEvents::NotifyStop() {
  // While no thread waits for signals, one may go to a thread of a library, and must not end the process.
  signal(SIGTERM, [](int) {});
  stop_ = true;
  pthread_kill(waiter_, WakeSignal());
}

bool StopEvents::Pending() const {
  sigset_t pending;
  sigpending(&pending);
  return sigismember(&pending, SIGTERM) == 1 || sigismember(&pending, SIGINT) == 1;
}

StopEvents::Event StopEvents::Wait() {
  sigset_t all = signals_;
  sigaddset(&all, WakeSignal());
  while (true) {
    const int signal = NextOf(all);
    if (signal != WakeSignal()) return {.signal = signal};
    if (device_lost_.exchange(false)) return {};
    if (stop_.exchange(false)) return {.signal = SIGTERM, .of_rank = true};
  }
}

int StopEvents::WaitForSignal() { return NextOf(signals_); }

}  // namespace lossd::app
