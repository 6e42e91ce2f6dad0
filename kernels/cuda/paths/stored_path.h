// SPDX-License-Identifier: Apache-2.0
// The paths (chunk_path.h) of exact gradients for a head that stores logits: StoredPath for every GPU,
// FusedStoredPath for Hopper. The paths of stored logits share two classes. StoredGradients computes the
// products dx = ds W and dW += ds^T x from a matrix of ds in device memory (dL/ds; s is the logit before the
// softcap). The plan of the chunk says whether cuBLASLt (LibraryGemms) or this library's own kernels
// (OwnGemms, hopper/gradient_gemm.h) compute these products. StagedLogits computes fp32 logits for StoredPath
// and for FilteredStoredPath.
//
// Each function enqueues its work on the device's compute stream. All functions are called by the backend's
// driving thread.
#ifndef LOSSD_KERNELS_CUDA_PATHS_STORED_PATH_H_
#define LOSSD_KERNELS_CUDA_PATHS_STORED_PATH_H_

#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/backend.h"
#include "kernels/cuda/kernels/hopper/fused_rows.h"
#include "kernels/cuda/kernels/hopper/gradient_gemm.h"
#include "kernels/cuda/kernels/hopper/logit_pass.h"
#include "kernels/cuda/paths/chunk_path.h"
#include "kernels/cuda/paths/path_memory.h"
#include "kernels/cuda/paths/path_steps.h"

namespace lossd::kernels::cuda {

// ---- gradients from a matrix of ds ----

// The matrix ds of a chunk, divided by (logit scale * gradient unit), in the form that the loss has stored.
// Its row r is row r of `elements` times factors[r]. The gradient unit is a power of two that keeps 16-bit
// gradients in range (ChunkLayout::unit).
struct StoredGradient {
  void* elements = nullptr;        // [padded_rows, padded_vocab] compute dtype
  const float* factors = nullptr;  // [rows] or null: all 1
};

// Computes the two products dx = ds W and dW += ds^T x. Each derived class uses one library of kernels.
class GradientGemms {
 public:
  virtual ~GradientGemms() = default;

  // Chooses algorithms. Launches nothing.
  virtual absl::Status Prepare(const ChunkJob& job) const = 0;
  // Computes dx into Region::kHiddenGradient.
  virtual absl::Status HiddenGradient(const ChunkJob& job, const StoredGradient& gradient) const = 0;
  // Adds the product to the accumulated dW. Before the call, the rows of job.hidden have been multiplied by
  // the factors of StoredGradient.
  virtual absl::Status WeightGradient(const ChunkJob& job, const void* elements) const = 0;
  // Adds a description of the GEMMs of a full chunk to `choices`.
  virtual absl::Status Describe(std::vector<Choice>& choices) const = 0;
};

// The products by cuBLASLt.
class LibraryGemms final : public GradientGemms {
 public:
  explicit LibraryGemms(const PathContext& context);
  absl::Status Prepare(const ChunkJob& job) const override;
  absl::Status HiddenGradient(const ChunkJob& job, const StoredGradient& gradient) const override;
  absl::Status WeightGradient(const ChunkJob& job, const void* elements) const override;
  absl::Status Describe(std::vector<Choice>& choices) const override;

 private:
  const PathContext& context_;
  const GemmShapes shapes_;
};

// The products by this library's own kernels (hopper/gradient_gemm.h).
class OwnGemms final : public GradientGemms {
 public:
  explicit OwnGemms(const PathContext& context) : context_(context) {}
  absl::Status Prepare(const ChunkJob& job) const override { return absl::OkStatus(); }
  absl::Status HiddenGradient(const ChunkJob& job, const StoredGradient& gradient) const override;
  absl::Status WeightGradient(const ChunkJob& job, const void* elements) const override;
  absl::Status Describe(std::vector<Choice>& choices) const override { return absl::OkStatus(); }

 private:
  absl::Status Run(hopper::GradientGemmParams product, int clusters) const;

  const PathContext& context_;
};

// The gradients of a chunk from its matrix of ds.
class StoredGradients {
 public:
  explicit StoredGradients(const PathContext& context)
      : context_(context), library_(context), own_(context) {}

  // The GEMMs that the plan chooses.
  const GradientGemms& GemmsOf(const ChunkPlan& plan) const;
  // Computes dx into Region::kHiddenGradient.
  absl::Status HiddenGradient(const ChunkJob& job, const StoredGradient& gradient) const;
  // Adds to the accumulated db and dW. Before the call, the rows of job.hidden have been multiplied by the
  // factors of StoredGradient.
  absl::Status WeightGradient(const ChunkJob& job, const StoredGradient& gradient) const;

 private:
  const PathContext& context_;
  const LibraryGemms library_;
  const OwnGemms own_;
};

// ---- paths ----

// Computes the logits of a chunk in fp32, one block of rows after the other, because memory has no room for
// the fp32 logits of all rows. The caller computes row results from each block, so no row result is computed
// from 16-bit logits.
//
// PlanStaging in path_memory.h chooses the blocks and their place. `kept` says what the caller keeps in
// Region::kLogits of each row (path_memory.h). The last blocks lie in the "spare" memory,
// Region::kHiddenGradient.
class StagedLogits {
 public:
  explicit StagedLogits(const PathContext& context);

  // Chooses algorithms. Launches nothing.
  absl::Status Prepare(const ChunkJob& job, Kept kept) const;
  // The number of rows of each block.
  std::vector<int64_t> BlockRows(const ChunkJob& job, Kept kept) const;
  // Whether the logits of some rows lie in the spare memory.
  bool UsesSpare(const ChunkJob& job, Kept kept) const;
  // A function that enqueues the caller's work on the logits of a block of rows.
  using BlockStep = absl::FunctionRef<absl::Status(const RowBlock&, const LogitMatrix&)>;
  // For each block, enqueues the product that computes its logits, and then calls `step`. If UsesSpare,
  // Region::kHiddenGradient must be free.
  absl::Status ForEachBlock(const ChunkJob& job, Kept kept, BlockStep step) const;
  // Does the same for one block, the padded rows [begin, begin + count), with its logits at `at`.
  absl::Status ComputeBlock(const ChunkJob& job, int64_t begin, int64_t count, void* at,
                            BlockStep step) const;

  // The GEMM for the largest block of a full chunk, and the place of its result.
  GemmShape LargestGemm() const;
  void* LargestBlock() const;

 private:
  std::vector<StagedBlock> Blocks(int64_t padded_rows, Kept kept) const {
    return PlanStaging(context_.config, context_.sizes, kept, padded_rows);
  }
  void* At(const StagedBlock& block) const {
    return context_.memory[block.in_spare ? Region::kHiddenGradient : Region::kLogits] + block.offset;
  }

  const PathContext& context_;
  const GemmShapes shapes_;
};

// For each block of rows, cuBLASLt computes the logits in fp32. The row loss kernel computes from them the
// row results, and the gradient of the logits (ds) in the compute dtype. When ds of all rows is complete, two
// GEMMs compute dx and dW from it.
class StoredPath final : public ChunkPath {
 public:
  explicit StoredPath(const PathContext& context);
  static bool Takes(const ChunkPlan& plan) { return plan.exact() && !plan.fused(); }

  absl::Status Prepare(const ChunkJob& job) override;
  absl::Status Loss(const ChunkJob& job) override;
  absl::Status HiddenGradient(const ChunkJob& job) override;
  absl::Status WeightGradient(const ChunkJob& job) override;
  absl::StatusOr<std::vector<Choice>> Describe(const ChunkPlan& plan) override;
  absl::Status Tune(const void* hidden) override;

  // The steps of the phases, for other paths that add steps between them. RowLoss computes row results and,
  // if gradients are wanted, ds; Region::kHiddenGradient must be free. `selects`: whether it also selects the
  // most probable classes.
  absl::Status RowLoss(const ChunkJob& job, bool selects) const;
  // The matrix ds, which takes all of Region::kLogits.
  LogitMatrix elements() const;
  // HiddenGemm computes dx from ds. WeightGemm adds dW, also from ds; before the call, the rows of job.hidden
  // that must not be accumulated are 0 (ZeroDroppedHidden).
  absl::Status HiddenGemm(const ChunkJob& job) const { return gradients_.HiddenGradient(job, Gradient()); }
  absl::Status WeightGemm(const ChunkJob& job) const { return gradients_.WeightGradient(job, Gradient()); }
  // For a distillation: the softmaxes of a block of rows, at its temperature. A softmax has `parts` parts,
  // one for each tile of classes, so student and teacher have [rows, parts] each. The products that compute
  // the logits also write these parts (hopper::SoftmaxPass).
  struct SoftmaxParts {
    SoftmaxPart* student = nullptr;
    SoftmaxPart* teacher = nullptr;
    int64_t parts = 0;
    uint32_t* claimed_positions = nullptr;  // [hopper::kMostClusters], scratch of the product kernels
  };
  // For rows with a teacher whose student logits are in `logits`: computes the teacher's logits (in
  // TeacherRows::logits), the row results, `divergence` [rows], and ds into `gradient` unless its data is
  // null. There are at most TeacherRows::block_rows rows. Uses no region of this path's memory, so other
  // paths may call it. `known`: known->student has the student's softmaxes, and known->teacher is memory for
  // the teacher's softmaxes. Null: a kernel computes both softmaxes from the logits.
  absl::Status Distil(const ChunkJob& job, const RowBlock& rows, const LogitMatrix& logits,
                      const LogitMatrix& gradient, float* divergence,
                      const SoftmaxParts* known = nullptr) const;

 private:
  // How a chunk with a teacher uses the memory of the teacher's logits (TeacherRows::logits). If `rows` is
  // not 0, this memory holds `rows` rows of the teacher's logits, and behind them `rows` rows of the
  // student's logits. If `rows` is 0, the student's logits lie in the student's own memory (StagedLogits).
  //
  // The teacher's memory is the better place. In the student's own memory, the gradients of the rows that are
  // done take more and more room, so each block of logits is smaller than the one before. A small block is
  // expensive, because its product reads the whole weight just as the product of a large block does. The
  // softmaxes (`known`) lie in the memory of dx, like the partial sums of a fused loss.
  struct TeacherRoom {
    int64_t rows = 0;  // of each head; a multiple of 8
    float* student = nullptr;
    SoftmaxParts known;  // its `parts` is 0 if the products do not compute the softmaxes
  };
  TeacherRoom RoomOf(const ChunkJob& job) const;
  // Computes the logits of a block of rows into `logits`, and the parts of their softmaxes into `parts`.
  absl::Status LogitsAndSoftmaxes(const hopper::LogitOperands& operands, float temperature, float* logits,
                                  SoftmaxPart* parts, uint32_t* claimed_positions) const;
  StoredGradient Gradient() const { return {context_.memory[Region::kLogits], nullptr}; }
  // As StagedLogits::ForEachBlock, for rows with a teacher: all blocks have room.rows rows, and their logits
  // lie at room.student.
  absl::Status ForEachBlockBesideTeacher(const ChunkJob& job, const TeacherRoom& room,
                                         StagedLogits::BlockStep step) const;
  // Computes the loss of a block of rows with a teacher. Divides the block into parts of at most
  // TeacherRows::block_rows rows, and calls Distil for each part. `known` as in Distil.
  absl::Status DistilledRowLoss(const ChunkJob& job, const RowBlock& rows, const LogitMatrix& logits,
                                const LogitMatrix& gradient, const SoftmaxParts* known) const;
  // Computes the records of the rows (DivergenceRows::records), summed over all classes.
  absl::Status SumDivergences(const DivergenceParams& p) const;
  // Computes the loss with targets for a block of rows.
  absl::Status TargetRowLoss(const ChunkJob& job, const RowBlock& rows, const LogitMatrix& logits,
                             const LogitMatrix& gradient) const;
  // The same if other devices have some of the classes, or if rows have soft targets. The gradient is
  // filtered if the plan is filtered.
  absl::Status SplitRowLoss(const ChunkJob& job, const RowBlock& rows, const LogitMatrix& logits,
                            const LogitMatrix& gradient) const;

  const PathContext& context_;
  const GemmShapes shapes_;
  const StagedLogits staged_;
  const StoredGradients gradients_;
  const RowMerger merger_;
  const GradientMerger gradient_merger_;
  const TopSelector top_;
  const SoftSteps soft_;
};

// Exact gradients on Hopper. One pass computes logits and loss together, and stores exponentials of the
// logits (docs/kernels/hopper.md). Each row of exponentials times one factor is the row of ds.
class FusedStoredPath final : public ChunkPath {
 public:
  explicit FusedStoredPath(const PathContext& context);
  static bool Takes(const ChunkPlan& plan) { return plan.exact() && plan.fused(); }

  absl::Status Prepare(const ChunkJob& job) override;
  absl::Status Loss(const ChunkJob& job) override;
  absl::Status HiddenGradient(const ChunkJob& job) override;
  absl::Status WeightGradient(const ChunkJob& job) override;
  absl::StatusOr<std::vector<Choice>> Describe(const ChunkPlan& plan) override;

  // The steps of the phases, for other paths that add steps between them. factors(): one factor for each row
  // of the exponentials in Region::kLogits.
  const float* factors() const { return rows_.factor; }
  absl::Status HiddenGemm(const ChunkJob& job) const { return gradients_.HiddenGradient(job, Gradient()); }
  // Multiplies the rows' factors into job.hidden, and adds dW.
  absl::Status WeightGemm(const ChunkJob& job) const;

 private:
  StoredGradient Gradient() const { return {context_.memory[Region::kLogits], rows_.factor}; }

  const PathContext& context_;
  const StoredGradients gradients_;
  const RowMerger merger_;
  const TopSelector top_;
  hopper::FusedRows rows_;  // its partial sums lie in the memory of dx, which is written later
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_STORED_PATH_H_
