// SPDX-License-Identifier: Apache-2.0
// What /livez and /readyz answer, and the service manager hears. An orchestrator restarts a server that is
// not live, and sends no work to one that is not ready.
//
// All functions are stateless and thread-safe.
#ifndef LOSSD_SERVER_APP_HEALTH_H_
#define LOSSD_SERVER_APP_HEALTH_H_

#include <array>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/metrics/http_router.h"

namespace lossd::app {

struct Health {
  bool draining = false;
  bool device_lost = false;
  absl::Duration device_silence;  // engine::Engine::DeviceSilence
  // Threads that clients cannot do without, and since when they have shown no sign of life. They show one
  // every second.
  struct Thread {
    absl::string_view name;
    absl::Duration silence;
  };
  std::array<Thread, 4> threads;
};

// What keeps a thread busy for longer than that is nothing that it should do.
inline constexpr absl::Duration kThreadTimeout = absl::Seconds(30);

// UNAVAILABLE if the device is lost or has been silent for longer than `timeout`, or a thread for longer than
// that and kThreadTimeout. A server that drains is live.
absl::Status Live(const Health& health, absl::Duration timeout);

// 503 if it is not live.
metrics::HttpResponse Liveness(const Health& health, absl::Duration timeout);

// 503 if the device is lost or the server drains.
metrics::HttpResponse Readiness(const Health& health);

// In a few words for people what keeps the server from work: "device lost", "no progress on the device for
// 11m", "draining"; "" if it is live and ready.
std::string Trouble(const Health& health, absl::Duration timeout);

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_HEALTH_H_
