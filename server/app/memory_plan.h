// SPDX-License-Identifier: Apache-2.0
// The line of the log that says what memory a server has planned at its start.
//
// Stateless; thread-safe.
#ifndef LOSSD_SERVER_APP_MEMORY_PLAN_H_
#define LOSSD_SERVER_APP_MEMORY_PLAN_H_

#include "kernels/backend.h"
#include "server/app/server.h"
#include "server/app/shared_memory.h"

namespace lossd::app {

// `shared`: null if none is shared.
void LogMemoryPlan(const ServerOptions& options, const kernels::Backend& backend, const SharedMemory* shared);

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_MEMORY_PLAN_H_
