// SPDX-License-Identifier: Apache-2.0
#include "server/app/health.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/log/log.h"

namespace lossd::app {
namespace {

std::string Seconds(absl::Duration time) { return absl::FormatDuration(absl::Trunc(time, absl::Seconds(1))); }

metrics::HttpResponse Unavailable(std::string why) { return {.status = 503, .body = std::move(why)}; }

}  // namespace

absl::Status Live(const Health& health, absl::Duration timeout) {
  if (health.device_lost) return absl::UnavailableError("device lost");
  if (health.device_silence > timeout)
    return absl::UnavailableError(
        absl::StrCat("no progress on the device for ", Seconds(health.device_silence)));
  for (const Health::Thread& thread : health.threads) {
    if (thread.silence > std::min(timeout, kThreadTimeout))
      return absl::UnavailableError(
          absl::StrCat("no answer of ", thread.name, " for ", Seconds(thread.silence)));
  }
  return absl::OkStatus();
}

metrics::HttpResponse Liveness(const Health& health, absl::Duration timeout) {
  const absl::Status live = Live(health, timeout);
  return live.ok() ? metrics::HttpResponse{.body = "ok\n"} : Unavailable(absl::StrCat(live.message(), "\n"));
}

metrics::HttpResponse Readiness(const Health& health) {
  if (health.device_lost) return Unavailable("device lost\n");
  if (health.draining) return Unavailable("draining\n");
  return {.body = "ok\n"};
}

std::string Trouble(const Health& health, absl::Duration timeout) {
  if (const absl::Status live = Live(health, timeout); !live.ok()) return std::string(live.message());
  return health.draining ? "draining" : "";
}

std::vector<std::unique_ptr<metrics::GpuMonitor>> WatchGpus(
    const kernels::BackendInfo& backend, const std::vector<engine::EngineObserver*>& observers) {
  std::vector<std::unique_ptr<metrics::GpuMonitor>> monitors;
  if (!backend.uuids.empty()) {
    log::Log(log::LogLevel::kInfo, "how the GPUs are shared with other programs",
             {{"sharing", backend.gpu_sharing}});
  }
  for (const std::string& uuid : backend.uuids) {
    metrics::GpuMonitorOptions options;
    options.uuid = uuid;
    options.on_xid = [uuid](uint64_t xid) {
      log::Log(log::LogLevel::kError, "critical error of the GPU", {{"gpu", uuid}, {"xid", xid}});
    };
    options.on_lost = [observers](const absl::Status& status) {
      for (engine::EngineObserver* observer : observers) observer->OnDeviceError(status);
    };
    if (!backend.mps) {
      options.on_shared = [uuid](unsigned processes) {
        log::Log(log::LogLevel::kWarning, "other programs use the GPU, and it runs them in turns without MPS",
                 {{"gpu", uuid}, {"programs", processes}});
      };
    }
    auto monitor = metrics::GpuMonitor::Start(std::move(options));
    monitors.push_back(monitor.ok() ? *std::move(monitor) : nullptr);
    if (!monitor.ok()) {
      log::Log(log::LogLevel::kInfo, "no metrics of the GPU",
               {{"gpu", uuid}, {"reason", monitor.status().message()}});
    }
  }
  return monitors;
}

}  // namespace lossd::app
