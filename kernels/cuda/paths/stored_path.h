// SPDX-License-Identifier: Apache-2.0
// The paths of exact gradients of a chunk whose head stores logits: StoredPath for every GPU, FusedStoredPath
// for Hopper. StagedLogits computes fp32 logits for StoredPath and for the filtered path. StoredGradients is
// what the paths of stored logits have in common: dx = ds W and dW += ds^T x from a matrix of ds in device
// memory, by cuBLASLt (LibraryGemms) or by kernels of our own (OwnGemms, hopper/gradient_gemm.h), as the plan
// of the chunk says.
//
// Each function enqueues on the device's compute stream.
// Driven by the backend's thread.
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

// ds over (logit scale * gradient unit), as the loss of a chunk leaves it: row r of the elements times
// factors[r].
struct StoredGradient {
  void* elements = nullptr;        // [padded_rows, padded_vocab] compute dtype
  const float* factors = nullptr;  // [rows] or null: all 1
};

class GradientGemms {
 public:
  virtual ~GradientGemms() = default;

  // Launches nothing.
  virtual absl::Status Prepare(const ChunkJob& job) const = 0;
  // dx into Region::kHiddenGradient.
  virtual absl::Status HiddenGradient(const ChunkJob& job, const StoredGradient& gradient) const = 0;
  // Adds to the accumulated dW. The factors of the rows are in job.hidden already.
  virtual absl::Status WeightGradient(const ChunkJob& job, const void* elements) const = 0;
  // Adds what is to be said of the GEMMs of a full chunk.
  virtual absl::Status Describe(std::vector<Choice>& choices) const = 0;
};

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

  // The GEMMs that the plan says.
  const GradientGemms& GemmsOf(const ChunkPlan& plan) const;
  // dx into Region::kHiddenGradient.
  absl::Status HiddenGradient(const ChunkJob& job, const StoredGradient& gradient) const;
  // db and dW; the factors of the rows are in job.hidden already.
  absl::Status WeightGradient(const ChunkJob& job, const StoredGradient& gradient) const;

 private:
  const PathContext& context_;
  const LibraryGemms library_;
  const OwnGemms own_;
};

// ---- paths ----

// The fp32 logits of a chunk, a block of rows at a time (PlanStaging in path_memory.h). So no number of 16
// bits decides about a result of a row.
class StagedLogits {
 public:
  explicit StagedLogits(const PathContext& context);

  // Launches nothing.
  absl::Status Prepare(const ChunkJob& job, Kept kept) const;
  // The rows of each block.
  std::vector<int64_t> BlockRows(const ChunkJob& job, Kept kept) const;
  // Whether the logits of some rows lie in Region::kHiddenGradient.
  bool UsesSpare(const ChunkJob& job, Kept kept) const;
  // Enqueues what becomes of the logits of a block of rows.
  using BlockStep = absl::FunctionRef<absl::Status(const RowBlock&, const LogitMatrix&)>;
  // Enqueues the logits of each block and then calls step with them. Region::kHiddenGradient may be written
  // if it is used.
  absl::Status ForEachBlock(const ChunkJob& job, Kept kept, BlockStep step) const;
  // Likewise of these padded rows, whose logits lie at `at`.
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

// The library's GEMM computes the logits of a block of rows in fp32, the row loss kernel turns them into row
// results and their gradient in the compute dtype, and when all rows have that gradient, two GEMMs compute dx
// and dW from it.
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

  // The steps of these phases, for paths that put others between them. Row results, and the gradient if one
  // is wanted; Region::kHiddenGradient may be written. selects: also the most probable classes.
  absl::Status RowLoss(const ChunkJob& job, bool selects) const;
  // The gradient, or what takes its place: all of Region::kLogits.
  LogitMatrix elements() const;
  // dx and dW from that gradient; the rows of job.hidden that may not be added are 0.
  absl::Status HiddenGemm(const ChunkJob& job) const { return gradients_.HiddenGradient(job, Gradient()); }
  absl::Status WeightGemm(const ChunkJob& job) const { return gradients_.WeightGradient(job, Gradient()); }
  // Softmaxes of rows at the temperature of a distillation, in parts that the logits' own products leave
  // (hopper::SoftmaxPass), [rows, parts] of each head.
  struct SoftmaxParts {
    SoftmaxPart* student = nullptr;
    SoftmaxPart* teacher = nullptr;
    int64_t parts = 0;
    uint32_t* claimed_positions = nullptr;  // [hopper::kMostClusters], scratch
  };
  // Of rows whose logits are there, and whose teacher's have room: the teacher's logits, the results of the
  // rows, `divergence` [rows], and the gradient unless its data is null. Memory of a path of its own is not
  // used. `known`: the student's softmaxes are there, and the teacher's have room; null: they are not.
  absl::Status Distil(const ChunkJob& job, const RowBlock& rows, const LogitMatrix& logits,
                      const LogitMatrix& gradient, float* divergence,
                      const SoftmaxParts* known = nullptr) const;

 private:
  // How the logits of both heads lie in the teacher's memory: of `rows` rows the teacher's, then the
  // student's. No rows: the student's logits lie in its own memory. There they have room for fewer and fewer
  // rows, as gradients of rows before fill it, and products of few rows read the weight as often as those of
  // many. What is known of their softmaxes lies where dx will be, as the partials of a fused loss do.
  struct TeacherRoom {
    int64_t rows = 0;  // a multiple of 8
    float* student = nullptr;
    SoftmaxParts known;  // without parts if the logits' products do not leave them
  };
  TeacherRoom RoomOf(const ChunkJob& job) const;
  // The logits of a block of rows, and their softmaxes in `parts`.
  absl::Status LogitsAndSoftmaxes(const hopper::LogitOperands& operands, float temperature, float* logits,
                                  SoftmaxPart* parts, uint32_t* claimed_positions) const;
  StoredGradient Gradient() const { return {context_.memory[Region::kLogits], nullptr}; }
  // As StagedLogits::ForEachBlock, of rows that have a teacher, with blocks of equal size in `room`.
  absl::Status ForEachBlockBesideTeacher(const ChunkJob& job, const TeacherRoom& room,
                                         StagedLogits::BlockStep step) const;
  // Of a block of rows that have a teacher, part by part as its logits have room. `known` as Distil says.
  absl::Status DistilledRowLoss(const ChunkJob& job, const RowBlock& rows, const LogitMatrix& logits,
                                const LogitMatrix& gradient, const SoftmaxParts* known) const;
  // Their records, over all classes.
  absl::Status SumDivergences(const DivergenceParams& p) const;
  // The loss with targets of a block of rows.
  absl::Status TargetRowLoss(const ChunkJob& job, const RowBlock& rows, const LogitMatrix& logits,
                             const LogitMatrix& gradient) const;
  // Of a block of rows of which other devices have classes too, filtered if the plan is.
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

// Exact gradients on Hopper from one pass that computes logits and loss together (docs/kernels/hopper.md): it
// stores exponentials, whose rows lack one factor each to be the gradient.
class FusedStoredPath final : public ChunkPath {
 public:
  explicit FusedStoredPath(const PathContext& context);
  static bool Takes(const ChunkPlan& plan) { return plan.exact() && plan.fused(); }

  absl::Status Prepare(const ChunkJob& job) override;
  absl::Status Loss(const ChunkJob& job) override;
  absl::Status HiddenGradient(const ChunkJob& job) override;
  absl::Status WeightGradient(const ChunkJob& job) override;
  absl::StatusOr<std::vector<Choice>> Describe(const ChunkPlan& plan) override;

  // The steps of these phases, for paths that put others between them. Factors of the rows of exponentials in
  // Region::kLogits:
  const float* factors() const { return rows_.factor; }
  absl::Status HiddenGemm(const ChunkJob& job) const { return gradients_.HiddenGradient(job, Gradient()); }
  // Puts the rows' factors into job.hidden.
  absl::Status WeightGemm(const ChunkJob& job) const;

 private:
  StoredGradient Gradient() const { return {context_.memory[Region::kLogits], rows_.factor}; }

  const PathContext& context_;
  const StoredGradients gradients_;
  const RowMerger merger_;
  const TopSelector top_;
  hopper::FusedRows rows_;  // the partials lie where dx will be: they are free before it is written
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_STORED_PATH_H_
