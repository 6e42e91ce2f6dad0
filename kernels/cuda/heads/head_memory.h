// SPDX-License-Identifier: Apache-2.0
// What a head keeps on the device for its chunks and where: one function lays out a buffer for counting (null
// base) and for use, so that a plan is what is allocated. The ways of computing chunks say themselves what
// they need (paths/head_paths.h). Pure functions; thread-safe.
#ifndef LOSSD_KERNELS_CUDA_HEADS_HEAD_MEMORY_H_
#define LOSSD_KERNELS_CUDA_HEADS_HEAD_MEMORY_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/paths/head_sizes.h"
#include "kernels/cuda/paths/path_memory.h"
#include "kernels/head_config.h"
#include "kernels/memory.h"
#include "kernels/replica.h"

namespace lossd::kernels::cuda {

inline constexpr int kChunkSlots = 2;  // chunks of a head that may be in flight

// The largest chunk that keeps workspace and slots within workspace_bytes, at least 8 rows and at most
// max_chunk_rows rounded up; where losses are fused, a somewhat smaller one if that leaves less of the
// kernels' tiles empty. config.workspace_bytes goes before workspace_bytes. A head that recomputes logits
// gets at most kRecomputedChunkRows rows, and an arena that keeps the workspace alone within the limit, by
// default kRecomputedWorkspaceBytes if that is less. fused: the device can compute fused losses, if the
// compute dtype is a 16-bit type.
//
// Of a part of a head that is split by vocabulary: as many rows as the other parts have.
HeadSizes SizesFor(const HeadConfig& config, int64_t workspace_bytes, int64_t max_chunk_rows,
                   int multiprocessors, bool fused, Replica replica = {});

// What one chunk slot keeps on the device.
struct SlotMemory {
  void* hidden = nullptr;     // [chunk_rows, padded_hidden] compute dtype; shared by the slots of a norm head
  void* raw = nullptr;        // [chunk_rows, D] hidden dtype of the chunk; norm heads only
  uint8_t* inputs = nullptr;  // RowInputBlock
  uint8_t* outputs = nullptr;  // RowOutputBlock
};

// What chunks need on the device: MemoryKind::kSlots (slots and Region::kHiddenGradient) and kWorkspace.
struct Workspace {
  SlotMemory slots[kChunkSlots];
  PathMemory paths;
  uint8_t* upload_buffer = nullptr;    // [transfer_bytes]
  uint8_t* download_buffer = nullptr;  // [transfer_bytes]
  int32_t* keep = nullptr;             // [chunk_rows]
  float* mean = nullptr;               // [chunk_rows], norm heads only, likewise below
  float* inverse_deviation = nullptr;
  double* square_sums = nullptr;  // [kSquareSumPartials + 1]
  int64_t bytes = 0;
  int64_t slot_bytes = 0;

  // `slot_base`: of slot_bytes, the other: of bytes.
  static Workspace Carve(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors, uint8_t* base,
                         uint8_t* slot_base);
};

// INVALID_ARGUMENT if the head cannot do with config.workspace_bytes.
absl::Status CheckWorkspace(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors);

// What a head takes, by kind, as allocated; of a replica, with the moments of its shard.
MemoryBytes PlanMemory(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors,
                       Replica replica = {});

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_HEADS_HEAD_MEMORY_H_
