// SPDX-License-Identifier: Apache-2.0
#include "server/app/exit_watch.h"

#include <unistd.h>

#include <chrono>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/log/log.h"

namespace lossd::app {

void EndWithin(absl::Duration limit, int status, std::string what) {
  std::thread([limit, status, what = std::move(what)] {
    std::this_thread::sleep_for(absl::ToChronoNanoseconds(limit));
    log::Log(log::LogLevel::kError, absl::StrCat(what, " does not end: leaving at once"),
             {{"status", status}});
    _exit(status);
  }).detach();
}

}  // namespace lossd::app
