// SPDX-License-Identifier: Apache-2.0
// The program as a rank that serves no clients: it computes for rank 0 until that ends.
#ifndef LOSSD_SERVER_APP_WORKER_APP_H_
#define LOSSD_SERVER_APP_WORKER_APP_H_

#include "absl/status/status.h"
#include "server/app/server.h"
#include "server/app/service_manager.h"
#include "server/app/stop_events.h"

namespace lossd::app {

// How it ended; the process had better end with it, without taking anything down, unless it is OK.
struct WorkerEnd {
  absl::Status status;
  bool joined = false;  // before; then an error means that rank 0 or the device is lost
};

// A signal asks rank 0 to drain and to end all ranks; if it does not within the drain's time, or at a second
// signal, the worker ends by itself. `manager` hears of it all, is ready once the ranks are connected, and
// outlives the call.
WorkerEnd RunWorker(const ServerOptions& options, ServiceManager* manager, StopEvents& events);

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_WORKER_APP_H_
