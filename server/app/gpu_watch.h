// SPDX-License-Identifier: Apache-2.0
// Starts watching the GPUs of a backend: their metrics, their critical errors in the log, their loss.
#ifndef LOSSD_SERVER_APP_GPU_WATCH_H_
#define LOSSD_SERVER_APP_GPU_WATCH_H_

#include <memory>
#include <vector>

#include "kernels/backend.h"
#include "server/engine/engine_observer.h"
#include "server/metrics/gpu_monitor.h"

namespace lossd::app {

// A monitor for each GPU, in order; null, and a line in the log, for one that cannot be watched. The
// observers are told of the loss of a GPU as of a failed operation, and outlive the result.
std::vector<std::unique_ptr<metrics::GpuMonitor>> WatchGpus(
    const kernels::BackendInfo& backend, const std::vector<engine::EngineObserver*>& observers);

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_GPU_WATCH_H_
