// SPDX-License-Identifier: Apache-2.0
// The health of a server: what /livez and /readyz answer and the service manager hears (Live, Readiness), and
// what watches the devices for their loss (DeviceWatch, WatchGpus). An orchestrator restarts a server that is
// not live, and sends no work to a server that is not ready.
//
// All functions and classes are thread-safe.
#ifndef LOSSD_SERVER_APP_HEALTH_H_
#define LOSSD_SERVER_APP_HEALTH_H_

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "server/admin/head_operations.h"
#include "server/engine/engine_options.h"
#include "server/metrics/gpu_monitor.h"
#include "server/metrics/http_router.h"

namespace lossd::app {

// The state of a server at one moment, from which the functions below judge its health.
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

// A thread that is busy for longer than that does something that it should not do.
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

// Logs how chunks are computed, and notices when the device is lost: a backend whose device is gone answers
// UNAVAILABLE from then on.
class DeviceWatch final : public engine::EngineObserver {
 public:
  // `on_lost` is called once, on a thread of the engine's, and must not call into it.
  explicit DeviceWatch(absl::AnyInvocable<void(const absl::Status&)> on_lost)
      : on_lost_(std::move(on_lost)) {}

  bool lost() const { return lost_; }

  void OnChoices(const engine::ChoicesReport& report) override {
    admin::LogChoices("chunk computed otherwise than the last", report.head, report.choices);
  }
  // These are for the metrics.
  void OnChunk(const engine::ChunkReport&) override {}
  void OnChunkLeft(const engine::ChunkReport&) override {}
  void OnContribution(const engine::ContributionReport&) override {}
  void OnStep(const engine::StepReport&) override {}
  void OnDeviceError(const absl::Status& status) override {
    if (absl::IsUnavailable(status) && !lost_.exchange(true)) on_lost_(status);
  }

 private:
  absl::AnyInvocable<void(const absl::Status&)> on_lost_;
  std::atomic<bool> lost_{false};
};

// Starts watching the GPUs of a backend: their metrics, their critical errors in the log, their loss. Returns
// a monitor for each GPU, in order; null, and a line in the log, for a GPU that cannot be watched. The
// observers are told of the loss of a GPU as of a failed operation, and outlive the result.
std::vector<std::unique_ptr<metrics::GpuMonitor>> WatchGpus(
    const kernels::BackendInfo& backend, const std::vector<engine::EngineObserver*>& observers);

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_HEALTH_H_
