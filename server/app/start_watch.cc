// SPDX-License-Identifier: Apache-2.0
#include "server/app/start_watch.h"

#include <string.h>
#include <unistd.h>

#include "absl/time/time.h"
#include "server/log/log.h"

namespace lossd::app {
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
