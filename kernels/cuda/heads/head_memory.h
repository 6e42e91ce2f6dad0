// SPDX-License-Identifier: Apache-2.0
// The device memory of a head: the sizes of a head (SizesFor), the memory of its chunks (Workspace), the
// memory of its tensors (ParamBlock, ValueBuffer), and the plan of all memory (PlanHead). The Carve functions
// lay out a buffer; with a null base they only count bytes. The backend uses the same functions as PlanHead
// when it creates a head. So the server allocates exactly what a plan says, even if the plan was made on
// another machine.
//
// paths/path_memory.h says what each way of computing chunks needs. All functions are pure and thread-safe,
// and programs without CUDA can use them.
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

// The sizes of a head. chunk_rows is the largest number of rows for which workspace and slots together stay
// within the limit: at least 8, and at most max_chunk_rows rounded up. If losses are fused, chunk_rows may be
// somewhat smaller, so that the kernels' tiles have fewer empty rows. The limit is config.workspace_bytes if
// the config sets it, else workspace_bytes.
//
// A head that recomputes logits gets at most kRecomputedChunkRows rows. The rest of its workspace within the
// limit is the arena, the memory for blocks of logits; slots do not count. If the config sets no limit, the
// limit is at most kRecomputedWorkspaceBytes.
//
// `fused`: whether the device can compute fused losses, i.e. the loss as a part of the logits product
// (hopper/plan.h). It has an effect only if the compute dtype has 16 bits.
//
// All parts of a head that is split by vocabulary get the same number of rows.
HeadSizes SizesFor(const HeadConfig& config, int64_t workspace_bytes, int64_t max_chunk_rows,
                   int multiprocessors, bool fused, Replica replica = {});

// The device memory of one chunk slot.
struct SlotMemory {
  // [chunk_rows, padded_hidden] compute dtype: the rows as the products read them. If the head has a norm,
  // these are the normalized rows, made from `raw`, and all slots share one matrix.
  void* hidden = nullptr;
  void* raw = nullptr;         // [chunk_rows, D] hidden dtype of the chunk; only if the head has a norm
  uint8_t* inputs = nullptr;   // RowInputBlock
  uint8_t* outputs = nullptr;  // RowOutputBlock
};

// The device memory of a head's chunks, in two buffers. The first one has the slots and
// Region::kHiddenGradient, and counts as MemoryKind::kSlots. The second one has everything else, and counts
// as MemoryKind::kWorkspace.
struct Workspace {
  SlotMemory slots[kChunkSlots];
  PathMemory paths;
  uint8_t* upload_buffer = nullptr;    // [transfer_bytes]
  uint8_t* download_buffer = nullptr;  // [transfer_bytes]
  int32_t* keep = nullptr;             // [chunk_rows], 0: the row adds nothing (PathContext::keep)
  float* mean = nullptr;               // [chunk_rows], of the raw row; only for heads with a norm
  float* inverse_deviation = nullptr;  // [chunk_rows], of the raw row; only for heads with a norm
  double* square_sums = nullptr;       // [kSquareSumPartials + 1], for GradNorm: partial sums, then the sum
  int64_t bytes = 0;
  int64_t slot_bytes = 0;

  // `base` has `bytes` bytes, and `slot_base` has `slot_bytes` bytes. If both are null, only counts the
  // bytes.
  static Workspace Carve(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors, uint8_t* base,
                         uint8_t* slot_base);
};

// INVALID_ARGUMENT if config.workspace_bytes is too small for the head.
absl::Status CheckWorkspace(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors);

// The memory that is allocated for a head, by kind. A replica has moments only for its shard. A head in host
// memory takes no device memory of its own, because it computes in the pool (HostedBytes).
MemoryBytes PlanMemory(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors,
                       Replica replica = {});

// The device memory that a head in host memory takes while it computes.
struct HostedBytes {
  int64_t values = 0;  // in the pool (kernels/teacher_pool.h)
  // Workspace::bytes; all heads in host memory share the memory of `workspace` and `slots`
  int64_t workspace = 0;
  int64_t slots = 0;

  static HostedBytes Of(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors);
};

// The facts about a GPU, and the options of the backend (cuda_options.h), that a plan depends on.
struct PlanDevice {
  DeviceLimits limits;
  int64_t workspace_bytes = kDefaultWorkspace;  // > 0
  int64_t max_chunk_rows = CudaBackendOptions().max_chunk_rows;
  FusedLoss fused_loss = FusedLoss::kWhereFaster;
  Replica replica;
};

// How the CUDA backend would create a head: the head's memory, the rows of its chunks, and how it computes a
// full chunk.
struct HeadPlan {
  HeadSizes sizes;
  MemoryBytes memory;  // by kind, as allocated
  // The rows of a chunk, the blocks of a chunk whose logits are recomputed, and the kernels of a full chunk
  // with gradients and default options. It has neither the algorithms of cuBLAS, which are chosen when the
  // head is created, nor the kernels of the norm, which depend on the GPU.
  std::vector<Choice> choices;
};

// INVALID_ARGUMENT, which names the field, if the config is invalid or its workspace is too small.
absl::StatusOr<HeadPlan> PlanHead(const HeadConfig& config, const PlanDevice& device);

// How many rows a chunk has, and why not more.
Choice ChunkChoice(const HeadConfig& config, const HeadSizes& sizes, const MemoryBytes& memory,
                   int64_t max_chunk_rows);

// Consecutive floats of a tensor, padding included.
struct ShardRange {
  int64_t begin = 0;
  int64_t count = 0;
};

// The part of each tensor that a replica updates. Of the weight these are whole rows. Of the norm's two
// vectors it is everything or nothing.
struct ShardRanges {
  ShardRange weight, bias, norm;

  static ShardRanges Of(const HeadSizes& sizes, const Shard& shard);
};

// The part of the classes on this device that the replica updates: its shard among the copies of the head
// (validation.h). If there is only one copy, the shard is all classes here. Classes are counted from the
// first class here.
Shard OwnShard(const HeadConfig& config, const HeadSizes& sizes, Replica replica);

// The tensors of one role (value, gradient or a moment) in their buffer: all trained parameters, one after
// the other.
struct ParamBlock {
  float* weight = nullptr;      // [padded_vocab, padded_hidden]
  float* bias = nullptr;        // [padded_vocab] or null
  float* norm_gain = nullptr;   // [padded_hidden] or null
  float* norm_shift = nullptr;  // [padded_hidden] or null
  int64_t bytes = 0;

  static ParamBlock Carve(const HeadConfig& config, const HeadSizes& sizes, uint8_t* base,
                          bool with_weight = true);
  // Lays out only the ranges: the pointer of each tensor is where its range begins. A tensor with an empty
  // range is null.
  static ParamBlock CarveRanges(const HeadConfig& config, const ShardRanges& ranges, uint8_t* base);
  float* first() const { return weight; }
  int64_t floats() const { return bytes / static_cast<int64_t>(sizeof(float)); }
};

// The values of a head in their buffer: parameters, class weights and the 16-bit copy of the weight. A head
// in host memory has no fp32 weight if it has a 16-bit copy.
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
