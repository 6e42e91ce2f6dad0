// SPDX-License-Identifier: Apache-2.0
#include "server/connections/closer.h"

#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <deque>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace lossd::connections {
namespace {

constexpr int kInterrupt = SIGURG;  // whose default is to be ignored: one that comes late does nothing
constexpr long kPatienceNanoseconds = 10'000'000;
constexpr size_t kMostThreads = 16;
constexpr size_t kMostWaiting = 256;

void Ignore(int) {}

// Interrupts what the thread that made it waits for.
class Alarm {
 public:
  Alarm() {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, kInterrupt);
    pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = kInterrupt;
    event._sigev_un._tid = static_cast<pid_t>(syscall(SYS_gettid));
    is_set_ = timer_create(CLOCK_MONOTONIC, &event, &timer_) == 0;
  }
  // Every 10 ms from now on, or not any more.
  void Ring(bool on) {
    if (!is_set_) return;
    const timespec patience = {.tv_sec = 0, .tv_nsec = on ? kPatienceNanoseconds : 0};
    const itimerspec times = {.it_interval = patience, .it_value = patience};
    timer_settime(timer_, 0, &times, nullptr);
  }

 private:
  timer_t timer_ = {};
  bool is_set_ = false;
};

class Closer {
 public:
  Closer() {
    struct sigaction action = {};
    action.sa_handler = &Ignore;  // without SA_RESTART
    sigaction(kInterrupt, &action, nullptr);
  }

  void Take(wire::OwnedDescriptor descriptor) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    waiting_.push_back(std::move(descriptor));
    if (idle_ >= waiting_.size() || threads_ == kMostThreads) return;
    ++threads_;
    std::thread([this] { Run(); }).detach();
  }
  bool behind() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return waiting_.size() > kMostWaiting;
  }
  size_t open() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return waiting_.size() + threads_ - idle_;
  }

 private:
  wire::OwnedDescriptor Next() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    const auto has_work = [this] {
      mutex_.AssertHeld();
      return !waiting_.empty();
    };
    ++idle_;
    mutex_.Await(absl::Condition(&has_work));
    --idle_;
    wire::OwnedDescriptor next = std::move(waiting_.front());
    waiting_.pop_front();
    return next;
  }

  [[noreturn]] void Run() {
    Alarm alarm;
    while (true) {
      wire::OwnedDescriptor descriptor = Next();
      const linger none = {.l_onoff = 0, .l_linger = 0};  // mostly there is nothing to wait for then
      setsockopt(descriptor.get(), SOL_SOCKET, SO_LINGER, &none, sizeof(none));
      alarm.Ring(true);
      descriptor = wire::OwnedDescriptor();
      alarm.Ring(false);
    }
  }

  absl::Mutex mutex_;
  std::deque<wire::OwnedDescriptor> waiting_ ABSL_GUARDED_BY(mutex_);
  size_t threads_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t idle_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Never destroyed: its threads may wait for ever.
Closer& TheCloser() {
  static Closer& closer = *new Closer();
  return closer;
}

}  // namespace

void CloseElsewhere(wire::OwnedDescriptor descriptor) {
  if (descriptor) TheCloser().Take(std::move(descriptor));
}

void CloseElsewhere(std::vector<wire::OwnedDescriptor> descriptors) {
  for (wire::OwnedDescriptor& descriptor : descriptors) CloseElsewhere(std::move(descriptor));
}

bool ClosingIsBehind() { return TheCloser().behind(); }

size_t BeingClosed() { return TheCloser().open(); }

}  // namespace lossd::connections
