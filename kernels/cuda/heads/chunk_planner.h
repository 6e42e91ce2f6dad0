// SPDX-License-Identifier: Apache-2.0
// The plans of a head's chunks, one after the other: from options and device alone, but that a chunk is
// planned to be exact where filtering pauses after it has been in vain (paths/filter_backoff.h). Driven by
// the backend's thread.
#ifndef LOSSD_KERNELS_CUDA_HEADS_CHUNK_PLANNER_H_
#define LOSSD_KERNELS_CUDA_HEADS_CHUNK_PLANNER_H_

#include "kernels/backend.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/heads/chunk_slots.h"
#include "kernels/cuda/heads/head_norm.h"
#include "kernels/cuda/paths/chunk_plan.h"
#include "kernels/cuda/paths/filter_backoff.h"

namespace lossd::kernels::cuda {

class ChunkPlanner {
 public:
  // `norm` outlives it.
  ChunkPlanner(const Device& device, const HeadConfig& config, const HeadSizes& sizes, const HeadNorm* norm);

  // What a chunk by itself is planned to be.
  ChunkPlan Plan(const LossOptions& options, const ChunkFacts& facts, DType hidden_dtype) const;
  // The plan of the next chunk, which gets `slot`; notes what became of the slot's last chunk.
  ChunkPlan Next(const Chunk& chunk, const ChunkFacts& facts, ChunkSlot& slot);

 private:
  const PlanLimits limits_;
  const HeadNorm* const norm_;
  FilterBackoff backoff_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_HEADS_CHUNK_PLANNER_H_
