// SPDX-License-Identifier: Apache-2.0
// The memory of a head on one GPU of a server, by the server's own arithmetic (kernels/cuda/heads/head_plan.h).
// Pure functions; thread-safe.
#ifndef LOSSD_CLIENT_PLAN_DEVICE_MEMORY_H_
#define LOSSD_CLIENT_PLAN_DEVICE_MEMORY_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "client/plan/measured.h"
#include "kernels/choice.h"
#include "kernels/head_config.h"
#include "kernels/memory.h"
#include "kernels/replica.h"

namespace lossd::plan {

struct Request;

// One GPU of the server.
struct DeviceMemory {
  kernels::Logits logits = kernels::Logits::kStored;
  kernels::Split split = kernels::Split::kAny;  // kAny: the server has one GPU
  kernels::MemoryBytes memory;                  // by part; of several GPUs, that with most
  int64_t library_bytes = 0;                    // scratch of the library's products, once a GPU
  int64_t device_bytes = 0;                     // of the GPU, in all
  int64_t chunk_rows = 0;
  bool fits = false;
  std::vector<kernels::Choice> choices;
};

// How a head lies on the GPUs of a server.
struct Placement {
  kernels::Logits logits = kernels::Logits::kStored;
  kernels::Split split = kernels::Split::kAny;
  std::vector<int32_t> shares;  // HeadConfig::shares
};

// Of GPU replica.index of replica.count. INVALID_ARGUMENT naming the field of the head.
absl::StatusOr<DeviceMemory> DeviceMemoryOf(const Request& request, const Card& card, const Placement& placement,
                                            kernels::Replica replica);

}  // namespace lossd::plan

#endif  // LOSSD_CLIENT_PLAN_DEVICE_MEMORY_H_
