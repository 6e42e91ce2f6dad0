// SPDX-License-Identifier: Apache-2.0
// What a head keeps on the device and where: the sizes of a head (SizesFor), the memory of its chunks
// (Workspace), the memory of its tensors (ParamBlock, ValueBuffer), and the plan of all that (PlanHead). One
// function lays out a buffer for counting (null base) and for use. The backend creates a head by the same
// arithmetic as PlanHead, so that a plan made on another machine is what the server allocates.
//
// The ways of computing chunks say themselves what they need (paths/path_memory.h). Pure functions;
// thread-safe; also of programs without CUDA.
#ifndef LOSSD_KERNELS_CUDA_HEADS_HEAD_MEMORY_H_
#define LOSSD_KERNELS_CUDA_HEADS_HEAD_MEMORY_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cuda/cuda_options.h"
#include "kernels/cuda/device/device_limits.h"
#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/paths/head_sizes.h"
#include "kernels/head_config.h"
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
// The parts of a head that is split by vocabulary all get the same number of rows.
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
  float* mean = nullptr;               // [chunk_rows], norm heads only
  float* inverse_deviation = nullptr;  // [chunk_rows], norm heads only
  double* square_sums = nullptr;       // [kSquareSumPartials + 1]
  int64_t bytes = 0;
  int64_t slot_bytes = 0;

  // `slot_base`: of slot_bytes, the other: of bytes.
  static Workspace Carve(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors, uint8_t* base,
                         uint8_t* slot_base);
};

// INVALID_ARGUMENT if the head cannot do with config.workspace_bytes.
absl::Status CheckWorkspace(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors);

// What a head takes, by kind, as allocated; of a replica, with the moments of its shard.
// A head in host memory takes nothing of the device for itself: its values have room in the pool
// (HostedBytes).
MemoryBytes PlanMemory(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors,
                       Replica replica = {});

// What a head in host memory takes of the device while it computes.
struct HostedBytes {
  int64_t values = 0;     // of the pool (kernels/teacher_pool.h)
  int64_t workspace = 0;  // Workspace::bytes and slot_bytes, of memory that all such heads share
  int64_t slots = 0;

  static HostedBytes Of(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors);
};

// What a plan needs to know of a GPU and of the backend's options (cuda_options.h).
struct PlanDevice {
  DeviceLimits limits;
  int64_t workspace_bytes = kDefaultWorkspace;  // > 0
  int64_t max_chunk_rows = CudaBackendOptions().max_chunk_rows;
  FusedLoss fused_loss = FusedLoss::kWhereFaster;
  Replica replica;
};

// What the CUDA backend would do with a head: its memory, the rows of its chunks, and how a full chunk is
// computed.
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

// Consecutive floats of a tensor, padding included.
struct ShardRange {
  int64_t begin = 0;
  int64_t count = 0;
};

// What a replica updates of each tensor: whole rows of the weight; all of the norm's two vectors or nothing.
struct ShardRanges {
  ShardRange weight, bias, norm;

  static ShardRanges Of(const HeadSizes& sizes, const Shard& shard);
};

// What a replica updates, its classes counted as those here: its shard among the copies of the head
// (validation.h), which is all that it has where there is one copy.
Shard OwnShard(const HeadConfig& config, const HeadSizes& sizes, Replica replica);

// The tensors of one role (value, gradient or a moment) and where they lie in their buffer: all trained
// parameters one after the other.
struct ParamBlock {
  float* weight = nullptr;      // [padded_vocab, padded_hidden]
  float* bias = nullptr;        // [padded_vocab] or null
  float* norm_gain = nullptr;   // [padded_hidden] or null
  float* norm_shift = nullptr;  // [padded_hidden] or null
  int64_t bytes = 0;

  static ParamBlock Carve(const HeadConfig& config, const HeadSizes& sizes, uint8_t* base,
                          bool with_weight = true);
  // Of the ranges alone: every tensor begins with its range, and those with none are null.
  static ParamBlock CarveRanges(const HeadConfig& config, const ShardRanges& ranges, uint8_t* base);
  float* first() const { return weight; }
  int64_t floats() const { return bytes / static_cast<int64_t>(sizeof(float)); }
};

// Values, class weights and the 16-bit copy of the weight, which of a head in host memory has no fp32 weight
// beside it.
struct ValueBuffer {
  ParamBlock params;
  float* class_weights = nullptr;  // [all_classes], rounded up, or null
  void* compute_weight = nullptr;  // [padded_vocab, padded_hidden] compute dtype; fp32: the weight itself
  int64_t bytes = 0;

  static ValueBuffer Carve(const HeadConfig& config, const HeadSizes& sizes, uint8_t* base);
};

// How many moments a head keeps of each parameter.
int MomentCount(const HeadConfig& config);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_HEADS_HEAD_MEMORY_H_
