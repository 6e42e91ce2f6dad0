// SPDX-License-Identifier: Apache-2.0
#include "server/app/stop_events.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "server/log/log.h"

namespace lossd::app {
namespace {

constexpr int kSignals[] = {SIGTERM, SIGINT};
constexpr unsigned char kEnd = 0;  // instead of a signal

// The end of the pipe that handlers write to. It stays open for a handler that is just being called.
volatile sig_atomic_t g_to_reader = -1;

void Write(unsigned char what) {
  const int saved = errno;
  while (write(g_to_reader, &what, 1) < 0 && errno == EINTR) {
  }
  errno = saved;
}

void Handle(int signal) { Write(static_cast<unsigned char>(signal)); }

void Install(void (*handler)(int)) {
  struct sigaction action = {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  for (const int signal : kSignals) sigaction(signal, &action, nullptr);
}

sigset_t Signals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : kSignals) sigaddset(&signals, signal);
  return signals;
}

}  // namespace

StopEvents::StopEvents() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    std::perror("pipe2");
    std::abort();
  }
  pipe_ = ends[0];
  g_to_reader = ends[1];
  Install(&Handle);
  reader_ = std::thread([this] {
    const sigset_t signals = Signals();
    pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
    Read();
  });
  const sigset_t signals = Signals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

StopEvents::~StopEvents() {
  Install(SIG_IGN);
  Write(kEnd);
  reader_.join();
  close(pipe_);
}

void StopEvents::Read() {
  unsigned char what = kEnd;
  while (true) {
    const ssize_t bytes = read(pipe_, &what, 1);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes != 1 || what == kEnd) return;
    Push({.signal = what});
  }
}

void StopEvents::Push(Event event) {
  constexpr size_t kMost = 16;  // more signals say no more
  absl::MutexLock lock(&mutex_);
  if (events_.size() < kMost) events_.push_back(event);
}

void StopEvents::NotifyStop() { Push({.signal = SIGTERM, .of_rank = true}); }

int StopEvents::FirstSignal() const {
  for (const Event& event : events_) {
    if (event.signal != 0 && !event.of_rank) return event.signal;
  }
  return 0;
}

int StopEvents::Pending() const {
  absl::ReaderMutexLock lock(&mutex_);
  return FirstSignal();
}

int StopEvents::AwaitPending(absl::Duration limit) const {
  absl::ReaderMutexLock lock(&mutex_);
  const auto pending = [this] {
    mutex_.AssertReaderHeld();
    return FirstSignal() != 0;
  };
  clocks::AwaitFor(mutex_, absl::Condition(&pending), limit);
  return FirstSignal();
}

StopEvents::Event StopEvents::Wait() {
  absl::MutexLock lock(&mutex_);
  const auto has_event = [this] {
    mutex_.AssertHeld();
    return !events_.empty();
  };
  mutex_.Await(absl::Condition(&has_event));
  const Event event = events_.front();
  events_.pop_front();
  return event;
}

int StopEvents::WaitForSignal() {
  while (true) {
    const Event event = Wait();
    if (event.signal != 0 && !event.of_rank) return event.signal;
  }
}

namespace {

// For a start that stops by itself, or ends and is drained; less than launchers wait before they kill.
constexpr absl::Duration kStartGrace = absl::Seconds(10);
constexpr int kExitFailure = 1;

}  // namespace

StartWatch::StartWatch(const StopEvents* events) : events_(events), thread_([this] { Watch(); }) {}

StartWatch::~StartWatch() {
  started_.Notify();
  thread_.join();
}

void StartWatch::Watch() {
  int signal = 0;
  while (signal == 0) {
    if (started_.happened()) return;
    signal = events_->AwaitPending(kSignalPoll);
  }
  log::Log(log::LogLevel::kInfo, "asked to stop before serving", {{"reason", strsignal(signal)}});
  if (started_.AwaitFor(kStartGrace)) return;
  log::Log(log::LogLevel::kError, "the start does not end: leaving at once",
           {{"waited", absl::FormatDuration(kStartGrace)}});
  _exit(kExitFailure);
}

}  // namespace lossd::app
