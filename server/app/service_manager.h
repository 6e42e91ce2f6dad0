// SPDX-License-Identifier: Apache-2.0
// ServiceManager tells the service manager that has started the process, such as systemd for a unit with
// Type=notify, when the process serves, that it is alive and that it ends. It speaks the protocol of
// sd_notify(3): datagrams to a Unix socket.
//
//   manager->Ready("serving");
//   KeepAlive keep_alive(manager.get(), [&] { return server->Live(); });
//   ...
//   manager->Stopping("draining", limit);
//
// Without NOTIFY_SOCKET nothing is sent and nothing costs anything. The protocol is spoken here instead of by
// libsystemd, which brings six more libraries (of compression and cryptography, mostly) into the process.
//
// Thread-safe.
#ifndef LOSSD_SERVER_APP_SERVICE_MANAGER_H_
#define LOSSD_SERVER_APP_SERVICE_MANAGER_H_

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/rpc/pulse.h"

namespace lossd::app {

class ServiceManager {
 public:
  // What the environment says: NOTIFY_SOCKET (a path, or "@" and a name in the abstract namespace), and
  // WATCHDOG_USEC and WATCHDOG_PID, whether this process is to say regularly that it is alive.
  // INVALID_ARGUMENT naming the variable and its value.
  static absl::StatusOr<std::unique_ptr<ServiceManager>> FromEnvironment();

  // The manager ends the process if it does not hear for so long that the process is alive; infinite: it does
  // not ask for that.
  absl::Duration watchdog() const { return watchdog_; }

  // `status` is a line for people, which `systemctl status` shows.
  void Ready(const std::string& status) ABSL_LOCKS_EXCLUDED(mutex_);
  // The process ends, and takes `limit` for that at the most.
  void Stopping(const std::string& status, absl::Duration limit) ABSL_LOCKS_EXCLUDED(mutex_);
  // The process is alive, with the status of the last of these two calls.
  void Alive() ABSL_LOCKS_EXCLUDED(mutex_);
  void NotAlive(absl::string_view why);

 private:
  ServiceManager(std::string address, absl::Duration watchdog)
      : address_(std::move(address)), watchdog_(watchdog) {}
  void Send(const std::string& message);

  const std::string address_;  // empty: there is none
  const absl::Duration watchdog_;
  absl::Mutex mutex_;
  std::string status_ ABSL_GUARDED_BY(mutex_);
  std::atomic<bool> failed_{false};  // and the log says so
};

// Says that the process is alive, twice in the time of the watchdog, as long as `live` says so; and why not
// when it does not. Nothing without a watchdog.
class KeepAlive {
 public:
  // `live` is called on a thread of this object until that goes, and is quick. `manager` outlives the object.
  KeepAlive(ServiceManager* manager, absl::AnyInvocable<absl::Status()> live);

 private:
  std::optional<rpc::Periodic> thread_;
};

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_SERVICE_MANAGER_H_
