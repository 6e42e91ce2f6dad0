// SPDX-License-Identifier: Apache-2.0
// What a backend would make of a head, without making it. Backends that can tell implement HeadPlanner too.
//
// The file is shorter than 60 lines because few sources include it: the backends that can tell, and the one
// file of the engine that asks.
#ifndef LOSSD_KERNELS_HEAD_PLANNER_H_
#define LOSSD_KERNELS_HEAD_PLANNER_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/head_config.h"

namespace lossd::kernels {

// What HeadKernels would say.
struct PlannedHead {
  MemoryBytes memory;
  DType compute_dtype = DType::kFloat32;
  int64_t chunk_rows = 0;
  int64_t slice_rows = 0;
  // As HeadKernels::Describe, without what is known of a head on its device alone.
  std::vector<Choice> choices;
};

// Thread-safe.
class HeadPlanner {
 public:
  virtual ~HeadPlanner() = default;
  // What Backend::CreateHead would make now, if `beside` were in use too; or the error that it would end
  // with. Nothing is held or counted. That a library or another device then fails is not foreseen.
  virtual absl::StatusOr<PlannedHead> PlanWholeHead(const HeadConfig& config,
                                                    const MemoryBytes& beside) const = 0;
};

// The plan of any backend. If the backend is no HeadPlanner, the plan has the memory alone.
inline absl::StatusOr<PlannedHead> PlanWholeHead(const Backend& backend, const HeadConfig& config,
                                                 const MemoryBytes& beside = {}) {
  const auto* const planner = dynamic_cast<const HeadPlanner*>(&backend);
  if (planner != nullptr) return planner->PlanWholeHead(config, beside);
  absl::StatusOr<MemoryBytes> memory = backend.PlanHead(config);
  if (!memory.ok()) return memory.status();
  PlannedHead planned;
  planned.memory = *memory;
  planned.compute_dtype = config.compute_dtype;
  return planned;
}

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_HEAD_PLANNER_H_
