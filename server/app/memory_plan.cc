// SPDX-License-Identifier: Apache-2.0
#include "server/app/memory_plan.h"

#include "absl/strings/str_cat.h"
#include "server/app/check_options.h"
#include "server/log/log.h"

namespace lossd::app {

void LogMemoryPlan(const ServerOptions& options, const kernels::Backend& backend,
                   const SharedMemory* shared) {
  const kernels::MemoryBytes planned = backend.memory().current;
  log::Log(log::LogLevel::kInfo, "memory plan",
           {{"staging_bytes", planned[kernels::MemoryKind::kStaging]},
            {"slice_bytes", options.slice_bytes},
            {"retained_bytes", planned[kernels::MemoryKind::kRetained]},
            {"workspace_bytes_per_head",
             options.workspace_bytes > 0 ? absl::StrCat(options.workspace_bytes) : "default"},
            {"ledger_bytes", planned[kernels::MemoryKind::kLedger]},
            {"transport_bytes", TransportBytes(options)},
            {"shared_memory_bytes", shared == nullptr ? 0 : options.shared_memory_bytes},
            {"shared_device_memory_bytes_per_gpu", shared == nullptr ? 0 : shared->device_bytes()},
            {"sharing_gpus", shared == nullptr ? 0 : static_cast<int64_t>(shared->devices().size())},
            {"limit_bytes", options.memory_limit_bytes}});
}

}  // namespace lossd::app
