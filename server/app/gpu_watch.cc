#include "server/app/gpu_watch.h"

#include <utility>
#include <vector>

#include "server/log/log.h"

namespace lossd::app {

std::unique_ptr<metrics::GpuMonitor> WatchGpu(const kernels::BackendInfo& backend,
                                              std::vector<engine::EngineObserver*> observers) {
  if (backend.uuid.empty()) return nullptr;
  metrics::GpuMonitorOptions options;
  options.uuid = backend.uuid;
  options.on_xid = [](uint64_t xid) {
    log::Log(log::LogLevel::kError, "critical error of the GPU", {{"xid", xid}});
  };
  options.on_lost = [observers = std::move(observers)](const absl::Status& status) {
    for (engine::EngineObserver* observer : observers) observer->OnDeviceError(status);
  };
  auto monitor = metrics::GpuMonitor::Start(std::move(options));
  if (monitor.ok()) return *std::move(monitor);
  log::Log(log::LogLevel::kInfo, "no metrics of the GPU", {{"reason", monitor.status().message()}});
  return nullptr;
}

}  // namespace lossd::app
