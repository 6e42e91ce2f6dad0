// SPDX-License-Identifier: Apache-2.0
// The paths of exact gradients for a head that stores logits: StoredPath for every GPU, FusedStoredPath for
// Hopper. StoredGradients is common to the paths of stored logits: it computes dx = ds W and dW += ds^T x
// from a matrix of ds in device memory, by cuBLASLt (LibraryGemms) or by this library's own kernels
// (OwnGemms, hopper/gradient_gemm.h), as the plan of the chunk says. StagedLogits computes fp32 logits for
// StoredPath and for FilteredStoredPath.
//
// Each function enqueues on the device's compute stream. Driven by the backend's thread.
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

// ds over (logit scale * gradient unit), as the loss of a chunk leaves it: row r of `elements` times
// factors[r].
struct StoredGradient {
  void* elements = nullptr;        // [padded_rows, padded_vocab] compute dtype
  const float* factors = nullptr;  // [rows] or null: all 1
};

// The two products dx = ds W and dW += ds^T x, by one library of kernels.
class GradientGemms {
 public:
  virtual ~GradientGemms() = default;

  // Chooses algorithms. Launches nothing.
  virtual absl::Status Prepare(const ChunkJob& job) const = 0;
  // Computes dx into Region::kHiddenGradient.
  virtual absl::Status HiddenGradient(const ChunkJob& job, const StoredGradient& gradient) const = 0;
  // Adds to the accumulated dW. The factors of the rows have been multiplied into job.hidden.
  virtual absl::Status WeightGradient(const ChunkJob& job, const void* elements) const = 0;
  // Adds a description of the GEMMs of a full chunk.
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
  // Adds db and dW. The factors of the rows have been multiplied into job.hidden.
  absl::Status WeightGradient(const ChunkJob& job, const StoredGradient& gradient) const;

 private:
  const PathContext& context_;
  const LibraryGemms library_;
  const OwnGemms own_;
};

// ---- paths ----

// Computes the fp32 logits of a chunk, one block of rows after the other (PlanStaging in path_memory.h). So
// no row result is computed from 16-bit logits.
class StagedLogits {
 public:
  explicit StagedLogits(const PathContext& context);

  // Chooses algorithms. Launches nothing.
  absl::Status Prepare(const ChunkJob& job, Kept kept) const;
  // The number of rows of each block.
  std::vector<int64_t> BlockRows(const ChunkJob& job, Kept kept) const;
  // Whether the logits of some rows lie in Region::kHiddenGradient.
  bool UsesSpare(const ChunkJob& job, Kept kept) const;
  // Enqueues the work on the logits of a block of rows.
  using BlockStep = absl::FunctionRef<absl::Status(const RowBlock&, const LogitMatrix&)>;
  // Enqueues the logits of each block and then calls `step`. If UsesSpare, Region::kHiddenGradient must be
  // free.
  absl::Status ForEachBlock(const ChunkJob& job, Kept kept, BlockStep step) const;
  // Does this for one block of padded rows, with the logits at `at`.
  absl::Status ComputeBlock(const ChunkJob& job, int64_t begin, int64_t count, void* at,
                            BlockStep step) const;

  // The product of the largest block of a full chunk, and where its result lies.
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

// cuBLASLt computes the logits of a block of rows in fp32. The row loss kernel turns them into row results
// and their gradient in the compute dtype. When all rows have their gradient, two GEMMs compute dx and dW
// from it.
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

  // The steps of the phases, for paths that put other steps between them. RowLoss computes row results, and
  // the gradient if it is wanted; Region::kHiddenGradient must be free. `selects`: also the most probable
  // classes.
  absl::Status RowLoss(const ChunkJob& job, bool selects) const;
  // The gradient as a matrix that takes all of Region::kLogits.
  LogitMatrix elements() const;
  // Computes dx, or adds dW, from that gradient. Rows of job.hidden that may not be added are 0 for dW.
  absl::Status HiddenGemm(const ChunkJob& job) const { return gradients_.HiddenGradient(job, Gradient()); }
  absl::Status WeightGemm(const ChunkJob& job) const { return gradients_.WeightGradient(job, Gradient()); }
  // Softmaxes of rows at the temperature of a distillation, as partial results that the products of the
  // logits compute (hopper::SoftmaxPass): [rows, parts] of each head.
  struct SoftmaxParts {
    SoftmaxPart* student = nullptr;
    SoftmaxPart* teacher = nullptr;
    int64_t parts = 0;
    uint32_t* claimed_positions = nullptr;  // [hopper::kMostClusters], scratch
  };
  // For rows whose logits have been computed, and for whose teacher logits there is room: computes the
  // teacher's logits, the row results, `divergence` [rows], and the gradient unless its data is null. Uses no
  // memory of this path. `known`: the student's softmaxes are there, and the teacher's have room; null: the
  // logits are read for both.
  absl::Status Distil(const ChunkJob& job, const RowBlock& rows, const LogitMatrix& logits,
                      const LogitMatrix& gradient, float* divergence,
                      const SoftmaxParts* known = nullptr) const;

 private:
  // How the teacher's memory is divided between the logits of `rows` rows of the teacher, and then of the
  // student. rows == 0: the student's logits lie in its own memory. For other chunks they do not, because
  // there is room for fewer and fewer rows as gradients of earlier rows fill that memory, and a product of
  // few rows reads the weight as often as one of many. The softmaxes (`known`) lie where dx will be, like the
  // partial sums of a fused loss.
  struct TeacherRoom {
    int64_t rows = 0;  // a multiple of 8
    float* student = nullptr;
    SoftmaxParts known;  // parts == 0: the products do not compute the softmaxes
  };
  TeacherRoom RoomOf(const ChunkJob& job) const;
  // Computes the logits of a block of rows, and their softmaxes in `parts`.
  absl::Status LogitsAndSoftmaxes(const hopper::LogitOperands& operands, float temperature, float* logits,
                                  SoftmaxPart* parts, uint32_t* claimed_positions) const;
  StoredGradient Gradient() const { return {context_.memory[Region::kLogits], nullptr}; }
  // As StagedLogits::ForEachBlock, for rows with a teacher, with blocks of equal size in `room`.
  absl::Status ForEachBlockBesideTeacher(const ChunkJob& job, const TeacherRoom& room,
                                         StagedLogits::BlockStep step) const;
  // The loss of a block of rows with a teacher, in parts for whose teacher logits there is room. `known` as
  // in Distil.
  absl::Status DistilledRowLoss(const ChunkJob& job, const RowBlock& rows, const LogitMatrix& logits,
                                const LogitMatrix& gradient, const SoftmaxParts* known) const;
  // Computes the records of the rows (DivergenceRows), over all classes.
  absl::Status SumDivergences(const DivergenceParams& p) const;
  // The loss with targets, for a block of rows.
  absl::Status TargetRowLoss(const ChunkJob& job, const RowBlock& rows, const LogitMatrix& logits,
                             const LogitMatrix& gradient) const;
  // The same where other devices have classes of the rows, or rows have soft targets. Filtered if the plan
  // is.
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

// Exact gradients on Hopper, from one pass that computes logits and loss together (docs/kernels/hopper.md).
// The pass stores exponentials; each of their rows lacks one factor to be the gradient.
class FusedStoredPath final : public ChunkPath {
 public:
  explicit FusedStoredPath(const PathContext& context);
  static bool Takes(const ChunkPlan& plan) { return plan.exact() && plan.fused(); }

  absl::Status Prepare(const ChunkJob& job) override;
  absl::Status Loss(const ChunkJob& job) override;
  absl::Status HiddenGradient(const ChunkJob& job) override;
  absl::Status WeightGradient(const ChunkJob& job) override;
  absl::StatusOr<std::vector<Choice>> Describe(const ChunkPlan& plan) override;

  // The steps of the phases, for paths that put other steps between them. The factors belong to the rows of
  // exponentials in Region::kLogits.
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
  hopper::FusedRows rows_;  // the partial sums lie where dx will be written later
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_STORED_PATH_H_
