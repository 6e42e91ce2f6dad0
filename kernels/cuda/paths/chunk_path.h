// SPDX-License-Identifier: Apache-2.0
// The contract of a path, which is a way of computing the loss and the gradients of a chunk, phase by phase
// (ChunkPath), and what a path works with: the chunk (ChunkJob), some of its rows (RowBlock) and the head
// (PathContext). A head has one object of each path that its chunks may take; HeadPaths (head_paths.h) picks
// one for a chunk.
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
#include "kernels/backend.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/device_branch.h"
#include "kernels/cuda/device/gemm.h"
#include "kernels/cuda/kernels/distill_rows.h"
#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/cuda/paths/chunk_plan.h"
#include "kernels/cuda/paths/head_sizes.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// The shapes of a head's GEMMs over `rows` padded rows and `classes` padded classes. Pure functions.
struct GemmShapes {
  int64_t padded_hidden = 0;
  DType compute = DType::kBFloat16;
  bool scratch = true;  // whether the GEMMs may use scratch memory

  // Z = X W^T in fp32.
  GemmShape Logits(int64_t rows, int64_t classes) const {
    return {.transpose_a = true,
            .m = classes,
            .n = rows,
            .k = padded_hidden,
            .lda = padded_hidden,
            .ldb = padded_hidden,
            .ldc = classes,
            .input = compute,
            .output = DType::kFloat32,
            .scratch = scratch};
  }
  // dX = dZ W in `output`; rows of dZ are `ld` elements apart.
  GemmShape HiddenGradient(int64_t rows, int64_t classes, int64_t ld, DType output) const {
    return {.m = padded_hidden,
            .n = rows,
            .k = classes,
            .lda = padded_hidden,
            .ldb = ld,
            .ldc = padded_hidden,
            .input = compute,
            .output = output,
            .scratch = scratch};
  }
  GemmShape HiddenGradient(int64_t rows, int64_t classes, DType output) const {
    return HiddenGradient(rows, classes, classes, output);
  }
  // dW = dZ^T X in fp32; likewise.
  GemmShape WeightGradient(int64_t rows, int64_t classes, int64_t ld) const {
    return {.transpose_b = true,
            .m = padded_hidden,
            .n = classes,
            .k = rows,
            .lda = padded_hidden,
            .ldb = ld,
            .ldc = padded_hidden,
            .input = compute,
            .output = DType::kFloat32,
            .scratch = scratch};
  }
  GemmShape WeightGradient(int64_t rows, int64_t classes) const {
    return WeightGradient(rows, classes, classes);
  }
};

// Some rows of a chunk that are computed together, from compact row `begin` on. Plain data.
struct RowBlock {
  int64_t begin = 0;
  RowInputs in;
  RowResults out;
};

// The teacher of a chunk's rows, as paths see it: another head of the device, whose hidden states of the rows
// are there when Loss begins. Row r of it is row r of the chunk. Plain data.
struct TeacherRows {
  const void* hidden = nullptr;  // [padded_rows, padded_hidden] the teacher's compute dtype, after its norm
  const void* weight = nullptr;  // [padded_vocab, padded_hidden] likewise
  GemmShapes shapes;
  int64_t element = 2;  // bytes of that dtype
  int64_t padded_vocab = 0;
  LossTerms terms;            // of its logits
  float* logits = nullptr;    // [block_rows, padded_vocab]
  int64_t block_rows = 0;     // a multiple of 8
  DivergenceRows rows;        // [rows]
  bool wants_logprob = true;  // some row's log p of the target is a result
};

// A chunk while it is being enqueued, as paths see it. Pointers are device memory of the chunk's slot unless
// their comment says otherwise. Plain data.
struct ChunkJob {
  Chunk* chunk = nullptr;                // host memory
  const TeacherRows* teacher = nullptr;  // host memory; null: the rows have none
  ChunkLayout layout;
  ChunkPlan plan;

  // The loss of the compact rows.
  LossTerms terms;
  RowInputs in;
  RowResults out;
  const int32_t* accumulate = nullptr;     // [rows], 0: keep this row out of the accumulators
  const int32_t* with_gradient = nullptr;  // [rows], as in RowInputBlock
  float* dropped_mass = nullptr;           // [rows], out, of a chunk whose plan is filtered
  float* divergence = nullptr;             // [rows], out, of a chunk with a teacher
  // Of a chunk whose plan is sampled.
  const float* omega = nullptr;       // [rows]
  float* variance = nullptr;          // [rows], out, over the gradient unit squared
  float* square = nullptr;            // [rows], out, over the gradient unit squared
  float* sample_threshold = nullptr;  // [1], out
  Decision* decision = nullptr;       // [1], out, of a chunk whose plan is not exact
  // Of a chunk that wants something of single classes; pinned memory of the host.
  RowClassBlock classes;

  void* hidden = nullptr;  // x: [padded_rows, padded_hidden] compute dtype, after the norm
  // dx is wanted, or needed for the gradients of the norm. It goes to Region::kHiddenGradient in this dtype:
  // scale times W^T ds, with ds over (logit scale * gradient unit).
  bool wants_hidden_gradient = false;
  DType hidden_gradient_dtype = DType::kFloat32;
  float hidden_gradient_scale = 1.0f;
  // Whose dx is complete here: all, or, of a head that is split by vocabulary, a part of them.
  RowRange rows_here;                  // compact
  RowRange raw_rows_here;              // with those between and beside them that have no target
  bool direct = false;                 // dx is then as the client gets it
  float weight_gradient_scale = 1.0f;  // of dW = scale times ds^T x, and of db

  // For choices that the device makes, in the first phase of the gradients and in the last. Host memory.
  DeviceBranch* loss_branch = nullptr;
  DeviceBranch* weight_branch = nullptr;

  // What dx in Region::kHiddenGradient is still to be multiplied by.
  float hidden_gradient_factor() const { return weight_gradient_scale / hidden_gradient_scale; }
  const LossOptions& options() const { return chunk->options; }
  int64_t rows() const { return layout.compact_rows; }
  int64_t padded_rows() const { return layout.padded_rows; }
  bool wants_gradient() const { return wants_hidden_gradient || layout.accumulate; }
};

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
  void* const* weight_place = nullptr;  // where it says where the weight is, which may move between chunks
  WeightAccumulators* accumulators = nullptr;
  const int32_t* keep = nullptr;         // [chunk_rows]: 0 keeps a row out of the accumulators
  const Event* download_idle = nullptr;  // Region::kHiddenGradient may be written
  const ClassLink* link = nullptr;       // to the other parts of the head

  const void* weight() const { return *weight_place; }  // [padded_vocab, padded_hidden] compute dtype
};

// The head of this file says in which order the phases are called, and by which thread.
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
