// Starts watching the GPU of a backend: its metrics, its critical errors in the log, its loss.
#ifndef LOSSD_SERVER_APP_GPU_WATCH_H_
#define LOSSD_SERVER_APP_GPU_WATCH_H_

#include <memory>
#include <vector>

#include "kernels/backend.h"
#include "server/engine/engine_observer.h"
#include "server/metrics/gpu_monitor.h"

namespace lossd::app {

// Null, after a line in the log, if the backend has no GPU or the GPU cannot be watched. The observers are
// told of its loss as of a failed operation, and outlive the result.
std::unique_ptr<metrics::GpuMonitor> WatchGpu(const kernels::BackendInfo& backend,
                                              std::vector<engine::EngineObserver*> observers);

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_GPU_WATCH_H_
