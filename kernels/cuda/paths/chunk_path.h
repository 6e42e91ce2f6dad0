// SPDX-License-Identifier: Apache-2.0
// ChunkPath: the interface of a path. A path is a way of computing the loss and the gradients of a chunk,
// phase by phase. The file also has the structs that a path works with: the chunk (ChunkJob), a block of its
// rows (RowBlock) and the head (PathContext). A head has one object of each path that its chunks may take;
// HeadPaths (head_paths.h) picks one for each chunk.
//
// The head calls the phases of a chunk in this order: Prepare, Loss, HiddenGradient if
// job.wants_hidden_gradient, WeightGradient if job.layout.accumulate. It calls all phases of a chunk before
// the first phase of the next chunk. Every phase but Prepare enqueues its work on the device's compute stream
// and returns. After an error of such a phase the device cannot be trusted.
//
// The head enqueues work of its own on that stream: before Loss, it computes job.hidden and, if a path claims
// it, Region::kTargetDots; after Loss, it computes PathContext::keep from the row results.
//
// All functions are called by the backend's driving thread.
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

// The shapes of a head's GEMMs over `rows` padded rows and `classes` padded classes. Matrices are stored row
// by row, and GemmShape counts in columns, so each shape is that of the transposed product: for the logits, A
// is the weight, B has the hidden states, and C has a column for each row of the chunk. Pure functions.
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
  // dX = dZ W in `output`. Rows of dZ are `ld` elements apart.
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
  // dW = dZ^T X in fp32. Rows of dZ are `ld` elements apart.
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

// A block of consecutive rows of a chunk that are computed together, from compact row `begin` on. Plain data.
struct RowBlock {
  int64_t begin = 0;
  RowInputs in;
  RowResults out;
};

// The teacher of a chunk's rows, as paths see it. The teacher is another head on the device. Row r of its
// matrices belongs to compact row r of the chunk. The teacher's hidden states are ready when Loss begins.
// Plain data.
struct TeacherRows {
  const void* hidden = nullptr;  // [padded_rows, padded_hidden] the teacher's compute dtype, after its norm
  const void* weight = nullptr;  // [padded_vocab, padded_hidden] the same dtype
  GemmShapes shapes;
  int64_t element = 2;  // bytes of the teacher's compute dtype
  int64_t padded_vocab = 0;
  LossTerms terms;            // of the teacher's logits
  float* logits = nullptr;    // [block_rows, padded_vocab]
  int64_t block_rows = 0;     // a multiple of 8
  DivergenceRows rows;        // [rows]
  bool wants_logprob = true;  // the log p of some row's target is wanted as a result
};

// A chunk while it is being enqueued, as paths see it. Pointers are to device memory of the chunk's slot,
// unless their comment says otherwise. Plain data.
struct ChunkJob {
  Chunk* chunk = nullptr;                // host memory
  const TeacherRows* teacher = nullptr;  // host memory; null: the rows have none
  ChunkLayout layout;
  ChunkPlan plan;

  // The loss of the compact rows.
  LossTerms terms;
  RowInputs in;
  RowResults out;
  const int32_t* accumulate = nullptr;     // [rows], 0: the row is not accumulated
  const int32_t* with_gradient = nullptr;  // [rows], as in RowInputBlock
  float* dropped_mass = nullptr;           // [rows], out; if the plan is filtered
  float* divergence = nullptr;             // [rows], out; if the rows have a teacher
  // Only if the plan is sampled.
  const float* omega = nullptr;       // [rows]
  float* variance = nullptr;          // [rows], out, divided by the gradient unit squared
  float* square = nullptr;            // [rows], out, divided by the gradient unit squared
  float* sample_threshold = nullptr;  // [1], out
  Decision* decision = nullptr;       // [1], out; if the plan is not exact
  // Only if slices want results of single classes. In pinned host memory.
  RowClassBlock classes;

  void* hidden = nullptr;  // x: [padded_rows, padded_hidden] compute dtype, after the norm
  // Whether dx is wanted as a result, or needed for the gradients of the norm. The path writes it to
  // Region::kHiddenGradient in hidden_gradient_dtype, as hidden_gradient_scale times W^T ds, where ds is
  // divided by (logit scale * gradient unit).
  bool wants_hidden_gradient = false;
  DType hidden_gradient_dtype = DType::kFloat32;
  float hidden_gradient_scale = 1.0f;
  // The rows whose dx is complete on this device: all rows, or a part of them if the head is split by
  // vocabulary.
  RowRange rows_here;                  // compact rows
  RowRange raw_rows_here;              // raw rows, including those without a target
  bool direct = false;                 // dx goes to the client without conversion
  float weight_gradient_scale = 1.0f;  // dW is this times ds^T x; the same factor for db

  // Branches for choices that the device makes: loss_branch in the first phase of the gradients,
  // weight_branch in the last phase. Host memory.
  DeviceBranch* loss_branch = nullptr;
  DeviceBranch* weight_branch = nullptr;

  // The factor that dx in Region::kHiddenGradient still lacks: the gradient unit, or 1 if dx is direct.
  float hidden_gradient_factor() const { return weight_gradient_scale / hidden_gradient_scale; }
  const LossOptions& options() const { return chunk->options; }
  int64_t rows() const { return layout.compact_rows; }
  int64_t padded_rows() const { return layout.padded_rows; }
  bool wants_gradient() const { return wants_hidden_gradient || layout.accumulate; }
};

// Where weight gradients are accumulated. Owned by the head.
struct WeightAccumulators {
  float* weight = nullptr;  // [padded_vocab, padded_hidden]; null: not trainable
  float* bias = nullptr;    // [padded_vocab] or null
  // All of `weight` is 0. The first product then overwrites it instead of adding to it, which saves reading
  // it.
  bool weight_is_zero = true;
};

// The head, as all its paths see it. All objects that it points to outlive the paths.
struct PathContext {
  Device* device = nullptr;
  HeadConfig config;
  HeadSizes sizes;
  PathMemory memory;
  // Points to the pointer to the weight; the weight may move between chunks.
  void* const* weight_place = nullptr;
  WeightAccumulators* accumulators = nullptr;
  const int32_t* keep = nullptr;  // [chunk_rows], 0: the row must not be accumulated (LaunchGuard)
  // After this event the dx of earlier chunks has left Region::kHiddenGradient, so the region may be written.
  const Event* download_idle = nullptr;
  const ClassLink* link = nullptr;  // connects the parts of a split head

  const void* weight() const { return *weight_place; }  // [padded_vocab, padded_hidden] compute dtype
};

// A way of computing chunks. The comment at the top of this file says in which order and by which thread the
// phases are called.
class ChunkPath {
 public:
  virtual ~ChunkPath() = default;

  // Begins a chunk: makes the choices that must be made before anything is enqueued. Launches nothing.
  virtual absl::Status Prepare(const ChunkJob& job) = 0;
  // Computes the row results, and the data from which the gradients are computed. If the plan is filtered,
  // also makes the decision (job.decision).
  virtual absl::Status Loss(const ChunkJob& job) = 0;
  // Computes dx. A path that goes over its logits once for both gradients also adds the weight gradient.
  virtual absl::Status HiddenGradient(const ChunkJob& job) = 0;
  // Adds the part of the weight gradient that HiddenGradient has not added.
  virtual absl::Status WeightGradient(const ChunkJob& job) = 0;

  // Describes for people how the path computes a full chunk with gradients and this plan.
  virtual absl::StatusOr<std::vector<Choice>> Describe(const ChunkPlan& plan) = 0;
  // Describes for people the memory that the head keeps for the path, even if the path does not compute
  // chunks with this plan.
  virtual std::vector<Choice> DescribeMemory(const ChunkPlan& plan) const { return {}; }
  // Times the algorithms of cuBLASLt for a full chunk with these hidden states [chunk_rows, padded_hidden],
  // and keeps the fastest. Overwrites the path's memory and adds to the weight gradient.
  virtual absl::Status Tune(const void* hidden) { return absl::OkStatus(); }
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_CHUNK_PATH_H_
