// SPDX-License-Identifier: Apache-2.0
#include "server/app/service_manager.h"

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "kernels/errors/field_error.h"
#include "server/log/log.h"

namespace lossd::app {
namespace {

// The longest that a thread waits for a manager that does not read.
constexpr time_t kSendSeconds = 5;
// Not more often, however short the time of the watchdog.
constexpr absl::Duration kLeastPause = absl::Milliseconds(10);

absl::string_view Variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

absl::Status CheckAddress(absl::string_view address) {
  const bool path_or_name = address.size() > 1 && (address[0] == '/' || address[0] == '@');
  if (path_or_name && address.size() < sizeof(sockaddr_un::sun_path)) return absl::OkStatus();
  return errors::FieldError("NOTIFY_SOCKET",
                            absl::StrCat("be a path that begins with / or @ and a name, of less than ",
                                         sizeof(sockaddr_un::sun_path), " bytes"),
                            address);
}

absl::StatusOr<absl::Duration> WatchdogOfThisProcess() {
  const absl::string_view time = Variable("WATCHDOG_USEC");
  if (time.empty()) return absl::InfiniteDuration();
  int64_t microseconds = 0;
  if (!absl::SimpleAtoi(time, &microseconds) || microseconds <= 0)
    return errors::FieldError("WATCHDOG_USEC", "be a number of microseconds above 0", time);
  const absl::string_view process = Variable("WATCHDOG_PID");
  int64_t id = getpid();
  if (!process.empty() && !absl::SimpleAtoi(process, &id))
    return errors::FieldError("WATCHDOG_PID", "be the id of a process", process);
  return id == getpid() ? absl::Microseconds(microseconds) : absl::InfiniteDuration();
}

// A message is lines; this is one.
std::string StatusLine(absl::string_view text) {
  return absl::StrCat("STATUS=", absl::StrReplaceAll(text, {{"\n", " "}}), "\n");
}

int SendTo(const std::string& address, const std::string& message) {
  const int descriptor = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (descriptor < 0) return errno;
  const timeval limit = {.tv_sec = kSendSeconds, .tv_usec = 0};
  setsockopt(descriptor, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
  sockaddr_un to = {};
  to.sun_family = AF_UNIX;
  std::copy(address.begin(), address.end(), to.sun_path);
  if (address[0] == '@') to.sun_path[0] = '\0';
  // A name in the abstract namespace has no zero at its end.
  const auto bytes =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + address.size() + (address[0] == '/' ? 1 : 0));
  ssize_t sent = -1;
  do {
    sent = sendto(descriptor, message.data(), message.size(), MSG_NOSIGNAL,
                  reinterpret_cast<const sockaddr*>(&to), bytes);
  } while (sent < 0 && errno == EINTR);
  const int error = sent < 0 ? errno : 0;
  close(descriptor);
  return error;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ServiceManager>> ServiceManager::FromEnvironment() {
  const absl::string_view address = Variable("NOTIFY_SOCKET");
  if (address.empty())
    return std::unique_ptr<ServiceManager>(new ServiceManager("", absl::InfiniteDuration()));
  if (absl::Status status = CheckAddress(address); !status.ok()) return status;
  const absl::StatusOr<absl::Duration> watchdog = WatchdogOfThisProcess();
  if (!watchdog.ok()) return watchdog.status();
  return std::unique_ptr<ServiceManager>(new ServiceManager(std::string(address), *watchdog));
}

void ServiceManager::Ready(const std::string& status) {
  absl::MutexLock lock(&mutex_);
  status_ = status;
  Send(absl::StrCat("READY=1\n", StatusLine(status)));
}

void ServiceManager::Stopping(const std::string& status, absl::Duration limit) {
  absl::MutexLock lock(&mutex_);
  status_ = status;
  Send(absl::StrCat("STOPPING=1\n", StatusLine(status),
                    "EXTEND_TIMEOUT_USEC=", absl::ToInt64Microseconds(limit), "\n"));
}

void ServiceManager::Alive() {
  absl::MutexLock lock(&mutex_);
  Send(absl::StrCat("WATCHDOG=1\n", StatusLine(status_)));
}

void ServiceManager::NotAlive(absl::string_view why) { Send(StatusLine(absl::StrCat("not alive: ", why))); }

void ServiceManager::Send(const std::string& message) {
  if (address_.empty()) return;
  const int error = SendTo(address_, message);
  if (error == 0 || failed_.exchange(true)) return;
  log::Log(log::LogLevel::kWarning, "the service manager cannot be told",
           {{"NOTIFY_SOCKET", address_}, {"error", strerror(error)}});
}

KeepAlive::KeepAlive(ServiceManager* manager, absl::AnyInvocable<absl::Status()> live) {
  if (manager->watchdog() == absl::InfiniteDuration()) return;
  thread_.emplace(std::max(manager->watchdog() / 2, kLeastPause),
                  [manager, live = std::move(live)]() mutable {
                    const absl::Status alive = live();
                    alive.ok() ? manager->Alive() : manager->NotAlive(alive.message());
                  });
}

}  // namespace lossd::app
