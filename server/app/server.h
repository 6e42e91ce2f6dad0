// SPDX-License-Identifier: Apache-2.0
// A lossd server: backend, engine, services, metrics and HTTP, put together from one plain struct.
//
// Thread-safe. Destroying it stops it.
#ifndef LOSSD_SERVER_APP_SERVER_H_
#define LOSSD_SERVER_APP_SERVER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "server/app/server_options.h"
#include "server/engine/engine.h"

namespace grpc {
class Channel;
}  // namespace grpc

namespace lossd::app {

class Server {
 public:
  // Checks the options, allocates staging memory, listens and serves. INVALID_ARGUMENT naming the option
  // and its value, RESOURCE_EXHAUSTED or UNAVAILABLE.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options);
  // Shuts down at once: calls still open are cancelled.
  virtual ~Server() = default;

  // "host:port" with the ports that were chosen, and as `listen` several with commas between them;
  // http_address is empty without HTTP.
  virtual std::string grpc_address() const = 0;
  virtual std::string http_address() const = 0;
  virtual uint64_t incarnation() const = 0;
  // A channel without a network.
  virtual std::shared_ptr<grpc::Channel> InProcessChannel() = 0;
  virtual engine::EngineStats stats() const = 0;
  // What /livez says: OK, or UNAVAILABLE and why. Takes no lock.
  virtual absl::Status Live() const = 0;

  // Reports NOT_SERVING, refuses new calls, lets open ones finish until `deadline`, then cancels the rest
  // and stops. True if none had to be cancelled. Later calls do nothing.
  virtual bool Drain(absl::Time deadline) = 0;
};

// Something that is to be done at most once in a while.

// Ready at most once per `pause`. Thread-compatible.
class Every {
 public:
  explicit Every(absl::Duration pause) : pause_(pause) {}
  bool Ready() {
    const absl::Time now = clocks::SteadyNow();
    if (now < next_) return false;
    next_ = now + pause_;
    return true;
  }

 private:
  const absl::Duration pause_;
  absl::Time next_ = absl::InfinitePast();
};

// A text that becomes known while others ask for it.
//
// Thread-safe.

class LateText {
 public:
  void Set(std::string text) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    text_ = std::move(text);
  }
  // Empty until it is known.
  std::string Get() const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::ReaderMutexLock lock(&mutex_);
    return text_;
  }

 private:
  mutable absl::Mutex mutex_;
  std::string text_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_SERVER_H_
