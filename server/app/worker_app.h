// SPDX-License-Identifier: Apache-2.0
// RunWorker is the program as a process that serves no clients: its devices compute for rank 0 until rank 0
// ends.
#ifndef LOSSD_SERVER_APP_WORKER_APP_H_
#define LOSSD_SERVER_APP_WORKER_APP_H_

#include "server/app/server_options.h"
#include "server/app/server_parts.h"
#include "server/app/service_manager.h"
#include "server/app/stop_events.h"

namespace lossd::app {

// Returns how the ranks of this process ended. Unless that is OK, the process should end at once, without
// taking anything down. A signal asks rank 0 to drain and to end all ranks; if rank 0 does not within the
// drain's time, or at a second signal, the process ends by itself. `manager` is told of each of these events,
// is told that the process is ready once the ranks are connected, and outlives the call.
RanksEnd RunWorker(const ServerOptions& options, ServiceManager* manager, StopEvents& events);

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_WORKER_APP_H_
