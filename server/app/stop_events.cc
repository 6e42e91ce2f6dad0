#include "server/app/stop_events.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>

namespace lossd::app {
namespace {

int BlockedSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  return signalfd(-1, &signals, SFD_CLOEXEC);
}

// Reads one object; a process that cannot learn that it should stop has to end.
template <typename T>
T ReadOne(int descriptor) {
  T value;
  while (read(descriptor, &value, sizeof(value)) != sizeof(value)) {
    if (errno != EINTR) std::abort();
  }
  return value;
}

}  // namespace

StopEvents::StopEvents() : signals_(BlockedSignals()), device_lost_(eventfd(0, EFD_CLOEXEC)) {
  if (signals_ < 0 || device_lost_ < 0) std::abort();
}

StopEvents::~StopEvents() {
  close(signals_);
  close(device_lost_);
}

void StopEvents::NotifyDeviceLost() {
  const uint64_t one = 1;
  while (write(device_lost_, &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

StopEvents::Event StopEvents::Wait() {
  pollfd descriptors[] = {{.fd = signals_, .events = POLLIN}, {.fd = device_lost_, .events = POLLIN}};
  while (poll(descriptors, 2, -1) < 0 && errno == EINTR) {
  }
  if (descriptors[0].revents != 0) return {.signal = WaitForSignal()};
  ReadOne<uint64_t>(device_lost_);
  return {};
}

int StopEvents::WaitForSignal() { return static_cast<int>(ReadOne<signalfd_siginfo>(signals_).ssi_signo); }

}  // namespace lossd::app
