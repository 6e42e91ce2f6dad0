// SPDX-License-Identifier: Apache-2.0
// A way of computing the loss and the gradients of a chunk, phase by phase. A head has one object of each way
// that its chunks may take; the planner (head_paths.h) picks one for a chunk.
//
// The head calls the phases of a chunk in this order, and all of them before those of the next chunk:
// Prepare, Loss, HiddenGradient if job.wants_hidden_gradient, WeightGradient if job.layout.accumulate. Each
// but Prepare enqueues its work on the device's compute stream and returns; after an error of one of these
// the device cannot be trusted. When Loss begins, job.hidden and, if it is claimed, Region::kTargetDots are
// computed on that stream. After Loss the head computes PathContext::keep from the row results. Driven by the
// backend's thread.
#ifndef LOSSD_KERNELS_CUDA_PATHS_CHUNK_PATH_H_
#define LOSSD_KERNELS_CUDA_PATHS_CHUNK_PATH_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/choice.h"
#include "kernels/cuda/device/class_exchange.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/paths/chunk_job.h"
#include "kernels/cuda/paths/head_sizes.h"
#include "kernels/cuda/paths/path_memory.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// Where weight gradients are added. Owned by the head.
struct WeightAccumulators {
  float* weight = nullptr;  // [padded_vocab, padded_hidden]; null: not trainable
  float* bias = nullptr;    // [padded_vocab] or null
  bool weight_is_zero = true;
};

// What the paths of a head work with. Everything outlives them.
struct PathContext {
  Device* device = nullptr;
  HeadConfig config;
  HeadSizes sizes;
  PathMemory memory;
  const void* weight = nullptr;  // [padded_vocab, padded_hidden] compute dtype
  WeightAccumulators* accumulators = nullptr;
  const int32_t* keep = nullptr;         // [chunk_rows]: 0 keeps a row out of the accumulators
  const Event* download_idle = nullptr;  // Region::kHiddenGradient may be written
  const ClassLink* link = nullptr;       // to the other parts of the head
};

class ChunkPath {
 public:
  virtual ~ChunkPath() = default;

  // Begins a chunk: chooses what has to be chosen before anything is enqueued. Launches nothing.
  virtual absl::Status Prepare(const ChunkJob& job) = 0;
  // Row results, and whatever the gradients start from. A filtered path also leaves the decision.
  virtual absl::Status Loss(const ChunkJob& job) = 0;
  // dx. A path that goes over its logits once for both gradients adds the weight gradient too.
  virtual absl::Status HiddenGradient(const ChunkJob& job) = 0;
  // Adds to the accumulators what HiddenGradient has not.
  virtual absl::Status WeightGradient(const ChunkJob& job) = 0;

  // How the path computes a full chunk with gradients whose plan this is, for people.
  virtual absl::StatusOr<std::vector<Choice>> Describe(const ChunkPlan& plan) = 0;
  // The memory that the head keeps for the path whether or not it computes such a chunk, for people.
  virtual std::vector<Choice> DescribeMemory(const ChunkPlan& plan) const { return {}; }
  // Times the library's algorithms for a full chunk of these hidden states [chunk_rows, padded_hidden] and
  // keeps the fastest. Overwrites the path's memory and adds to the weight gradient.
  virtual absl::Status Tune(const void* hidden) { return absl::OkStatus(); }
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_CHUNK_PATH_H_
