// SPDX-License-Identifier: Apache-2.0
#include "server/app/gpu_watch.h"

#include <string>
#include <utility>
#include <vector>

#include "server/log/log.h"

namespace lossd::app {

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
