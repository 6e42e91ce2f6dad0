// SPDX-License-Identifier: Apache-2.0
// What the CUDA backend would do with a head: its memory, the rows of its chunks, and how a full chunk is
// computed. The backend creates a head by the same arithmetic, so that a plan made on another machine is what
// the server allocates. Pure functions; thread-safe; also of programs without CUDA.
#ifndef LOSSD_KERNELS_CUDA_HEADS_HEAD_PLAN_H_
#define LOSSD_KERNELS_CUDA_HEADS_HEAD_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/choice.h"
#include "kernels/cuda/cuda_options.h"
#include "kernels/cuda/device/device_limits.h"
#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/paths/head_sizes.h"
#include "kernels/head_config.h"
#include "kernels/memory.h"
#include "kernels/replica.h"

namespace lossd::kernels::cuda {

// What a plan needs to know of a GPU and of the backend's options (cuda_options.h).
struct PlanDevice {
  DeviceLimits limits;
  int64_t workspace_bytes = kDefaultWorkspace;  // > 0
  int64_t max_chunk_rows = CudaBackendOptions().max_chunk_rows;
  FusedLoss fused_loss = FusedLoss::kWhereFaster;
  Replica replica;
};

struct HeadPlan {
  HeadSizes sizes;
  MemoryBytes memory;  // by kind, as allocated
  // The rows of a chunk, the blocks of one whose logits are recomputed, and the kernels of a full chunk with
  // gradients and default options. The library's algorithms are chosen when the head is created, and norms by
  // the GPU.
  std::vector<Choice> choices;
};

// INVALID_ARGUMENT naming the field if the config is invalid or its workspace too small.
absl::StatusOr<HeadPlan> PlanHead(const HeadConfig& config, const PlanDevice& device);

// How many rows a chunk has, and why no more.
Choice ChunkChoice(const HeadConfig& config, const HeadSizes& sizes, const MemoryBytes& memory,
                   int64_t max_chunk_rows);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_HEADS_HEAD_PLAN_H_
