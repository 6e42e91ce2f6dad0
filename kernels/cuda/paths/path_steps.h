// SPDX-License-Identifier: Apache-2.0
// Steps of a chunk that several paths (chunk_path.h) have in common.
//
// The first group of steps stands between kernels that know only the classes on this device and kernels that
// need all classes. If the head is split by vocabulary, these steps exchange data with the other devices.
// Otherwise they have nothing to exchange. They are:
// - RowMerger: sums of rows,
// - GradientMerger: the level (how often the sampling threshold is doubled) and the errors of gradients that
//   are not exact,
// - TopSelector: the most probable classes,
// - SoftSteps: classes that soft targets name.
//
// The second group is for gradients from a list of elements of ds, the matrix dL/ds of a chunk. The kept list
// (KeptBuffers) has the elements of the rows that are accumulated, each with a key that names class and row.
// Steps:
// - FilterBackoff: which chunks try filtering or sampling,
// - CandidateFilter: filtered gradients from candidates,
// - AddEntries: the weight gradient from the list, with AddUniform for the uniform part of label smoothing,
// - BranchByDecision: how a chunk continues after the device's decision.
//
// Every function except those of FilterBackoff enqueues on the device's compute stream. Called by the
// backend's driving thread.
#ifndef LOSSD_KERNELS_CUDA_PATHS_PATH_STEPS_H_
#define LOSSD_KERNELS_CUDA_PATHS_PATH_STEPS_H_

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/backend.h"
#include "kernels/cuda/device/device_branch.h"
#include "kernels/cuda/device/gemm.h"
#include "kernels/cuda/kernels/distill_rows.h"
#include "kernels/cuda/kernels/filtered/filtered.h"
#include "kernels/cuda/kernels/recomputed_rows.h"
#include "kernels/cuda/kernels/row_classes.h"
#include "kernels/cuda/kernels/sampled.h"
#include "kernels/cuda/kernels/split_rows.h"
#include "kernels/cuda/paths/chunk_path.h"
#include "kernels/cuda/paths/path_memory.h"
#include "kernels/decision.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// ---- heads that are split by vocabulary ----

// For a head that is split by vocabulary: adds up, for each row of a chunk, the sums over the classes of all
// devices (kernels/split_rows.h). Does nothing for other heads.
class RowMerger {
 public:
  explicit RowMerger(const PathContext& context);

  // Replaces the rows' sums over the classes here by the sums over the classes of all parts.
  absl::Status Merge(const LossTerms& terms, const RowInputs& in, const hopper::FusedRows& rows) const;
  absl::Status Merge(const LossTerms& terms, const RowInputs& in, RunningRow* rows) const;
  // For rows with a teacher: replaces the records of this part by the sums of the records of all parts.
  // `launch` adds the records up.
  absl::Status Merge(const DivergenceParams& p,
                     cudaError_t (*launch)(const MergeTaughtParams& params, cudaStream_t stream)) const;
  // If the head is split, points rows.sum_reference to memory of its own. Merged sums are relative to
  // sum_reference, but stored exponentials are relative to rows.reference.
  void UseIn(hopper::FusedRows& rows) const;

 private:
  const PathContext& context_;
  const SplitRows rows_;
};

// Exchanges data between the parts of a split head, for gradients that are not exact: the level of the
// sampling threshold (kSampleLevels), and for each row the predicted error or the dropped mass. All parts use
// the highest level that one of them needs for its list. So all parts make the same decision and report the
// same values.
class GradientMerger {
 public:
  explicit GradientMerger(const PathContext& context);

  // The memory to which kernels write the variance and the square of each row, summed over the classes here.
  // MergeErrors then adds up the sums of all parts.
  float* variance(const ChunkJob& job) const;
  float* square(const ChunkJob& job) const;
  // Does the work of LaunchSampleRows(), with the same level on all devices.
  absl::Status Sample(const SampleRowsParams& params) const;
  // Sets job.variance and job.square to the sums over all classes.
  absl::Status MergeErrors(const ChunkJob& job) const;

  // The memory to which kernels write, for each row of the chunk, the dropped mass of the classes here.
  float* dropped_mass(const ChunkJob& job) const {
    return context_.sizes.is_split() ? rows_.own_sums : job.dropped_mass;
  }
  // Sets job.dropped_mass to the sum over all classes.
  absl::Status MergeDroppedMass(const ChunkJob& job) const;
  // Decides whether a chunk is exact: it is if its kept elements do not fit into the list of at least one
  // device. Then it also zeroes the dropped mass, so call it after MergeDroppedMass.
  absl::Status DecideListed(const ChunkJob& job, const SampleCounters* counters) const;

 private:
  // Gathers `n` sums of each part into all_sums.
  absl::Status GatherSums(int64_t n) const;

  const PathContext& context_;
  const SplitRows rows_;
};

// ---- single classes of rows ----

// Selects the most probable classes of rows, if the chunk wants them. Select must be called while the fp32
// logits of the rows are in memory. A path that does not compute whole rows of logits calls Select with one
// block of classes after the other. Until the last block, Region::kHiddenGradient holds the lists, so the
// path must not use this region.
class TopSelector {
 public:
  explicit TopSelector(const PathContext& context)
      : context_(context), scratch_(TopScratch::Carve(context.sizes, context.memory[Region::kTopClasses])) {}

  // Selects from the logits of a block of classes. `first_class`: the first class of the block, counted from
  // the first class here. `last`: whether the block ends with the last class here. After the last block
  // job.classes is complete, on all devices if the head is split. Does nothing if the chunk wants no top
  // classes.
  absl::Status Select(const ChunkJob& job, const RowBlock& rows, const LogitMatrix& logits,
                      int64_t first_class, bool last) const;
  // Selects from logits of all classes here.
  absl::Status Select(const ChunkJob& job, const RowBlock& rows, const LogitMatrix& logits) const {
    return Select(job, rows, logits, 0, true);
  }
  // Selects for all rows of the chunk from the exponentials that the fused pass has stored. For a head that
  // is not split.
  absl::Status SelectOfExponentials(const ChunkJob& job, const void* exponentials) const;

 private:
  absl::Status Exchange(const ChunkJob& job, int64_t begin, const SelectTopParams& select) const;

  const PathContext& context_;
  const TopScratch scratch_;
};

// ---- rows with soft targets ----

// The additional steps of rows with soft targets (kernels/soft_rows.h). The named classes of a row are the
// classes that its soft targets name. The steps do nothing for a chunk without soft targets. For each block
// of rows, call
// - ExtractNamed before the statistics of each block of classes,
// - SummariseNamed after the last block of classes and before LaunchFinishRunning,
// - Write after the gradient of each block of classes.
class SoftSteps {
 public:
  explicit SoftSteps(const PathContext& context) : context_(context) {}

  // Copies the logits of the named classes out of the block, and masks these classes in the block, except the
  // target. So the statistics of the block leave the named classes out.
  absl::Status ExtractNamed(const ChunkJob& job, const RowBlock& rows, const ClassBlock& block) const;
  // Computes the statistics of the named classes of each row (NamedRow) from the copied logits. If the head
  // is split, the named classes of all devices count.
  absl::Status SummariseNamed(const ChunkJob& job, const RowBlock& rows) const;
  // Writes the elements of the named classes into the gradient of the block.
  absl::Status Write(const ChunkJob& job, const RowBlock& rows, const ClassBlock& block,
                     const GradientRule* rules) const;

 private:
  // Replaces each of `logits` [entries] by its sum over all devices.
  absl::Status Exchange(float* logits, int64_t entries) const;

  const PathContext& context_;
};

// ---- the gradient of a block of classes ----

// Writes the gradient of a block from its logits and `rules` [padded rows of `rows`]. LaunchFinishRunning has
// written the rules, except those of padding rows. If the plan says so, filters the gradient and writes the
// dropped mass to `dropped_mass` [rows of `rows`]. The gradient includes the gradient of soft targets.
absl::Status WriteBlockGradient(const PathContext& context, const SoftSteps& soft, const ChunkJob& job,
                                const RowBlock& rows, const ClassBlock& block, GradientRule* rules,
                                float* dropped_mass);

// ---- sampled gradients ----

// The threshold of the list. Elements of at least this size are listed as they are; smaller elements are
// sampled. It is 0 for filtered gradients, because their list has all elements that the filter has left.
inline float ThresholdOf(const ChunkJob& job) {
  return job.plan.sampled() ? job.options().sample_threshold : 0.0f;
}

// Enqueues the decision about a chunk, which is written to job.decision and job.sample_threshold. Call after
// all rows of the chunk have been sampled.
absl::Status DecideSampled(const PathContext& context, const ChunkJob& job, SampleCounters* counters);

// The parameters of the kernel that computes dx of the rows from `begin` on; `in` has the inputs of these
// rows. The caller sets the members for kept entries, hot classes and the uniform part of label smoothing. A
// pure function.
SampledHiddenParams HiddenParamsOf(const PathContext& context, const ChunkJob& job, const SampleList& list,
                                   const RowInputs& in, int64_t begin);

// ---- gradients from a list of elements of ds ----

// After this many exact chunks in a row, FilterBackoff pauses: then only one of this many chunks tries to be
// filtered or sampled.
inline constexpr int kFilterPatience = 16;

// The back-off: decides, for each chunk that may be filtered or sampled, whether it tries to be. Suppose that
// kFilterPatience chunks in a row have tried and turned out to be exact, because they had too many candidates
// or too large a predicted error. Then only one chunk in kFilterPatience tries. The chunks that do not try
// are exact from the start. They need no selection, and their loss can be fused even where filtered chunks
// store their logits.
// docs/lab/2026-11-21-filter-trials.md has the arithmetic.
//
// The answers depend only on the order of the calls. Thread-compatible.
class FilterBackoff {
 public:
  // Whether the next chunk, with these options, tries. If the options differ from those of the last chunk,
  // the count of exact chunks starts again.
  bool Next(const LossOptions& options);
  // Reports the decision about an earlier chunk that tried with these options.
  void Note(const LossOptions& options, Decision decision);

 private:
  bool Paused() const { return exact_in_a_row_ >= kFilterPatience; }

  LossOptions options_;
  int exact_in_a_row_ = 0;
  int without_trial_ = 0;  // chunks since the last chunk that tried
};

// Zeroes the rows of job.hidden that must not be accumulated (PathContext::keep), so that they add nothing to
// dW.
absl::Status ZeroDroppedHidden(const PathContext& context, const ChunkJob& job);

// Makes the first `count` entries empty: sets all bits of their keys.
absl::Status ClearEntries(const PathContext& context, const KeptBuffers& buffers, int64_t count);
// Adds the first `count` entries to the weight gradients, without those that are empty. Before the call, the
// rows of job.hidden that must not be accumulated are 0 (ZeroDroppedHidden), and *runs is zero.
absl::Status AddEntries(const PathContext& context, const ChunkJob& job, const KeptBuffers& buffers,
                        int64_t count, RunCounters* runs);

// Sets buffers.weight_sum to the sum of u_v w_v over the classes here (u_v: the weight of class v in the
// loss, w_v: row v of the head's weight). dx needs it for the uniform part of label smoothing.
absl::Status SumWeights(const PathContext& context, const ChunkJob& job, const KeptBuffers& buffers);
// Adds to the weight gradients the part of label smoothing that every class gets.
absl::Status AddUniform(const PathContext& context, const ChunkJob& job, const KeptBuffers& buffers);

// Computes filtered gradients of a chunk after its candidates have been found (docs/kernels/filtered.md): dx
// row by row, the list of kept elements, the decision whether the chunk is filtered, and dW from the list.
// The path that uses it finds the candidates, and decides where the lists lie.
class CandidateFilter {
 public:
  // `context` and `buffers` outlive the object.
  CandidateFilter(const PathContext& context, const FilterBuffers& buffers)
      : context_(context), buffers_(buffers) {}

  // Empties the pool of candidates.
  absl::Status Begin(const ChunkJob& job) const;
  // The place for the candidates of the rows from `begin` on, which the path selects.
  RowSelection Selection(const ChunkJob& job, int64_t begin) const;
  // Decides from the candidates of all rows whether the chunk is filtered; writes job.decision.
  absl::Status Decide(const ChunkJob& job) const;
  // Prepares FilterRows, once for each chunk: empties the list of kept elements, and computes the sum of the
  // weights.
  absl::Status PrepareRows(const ChunkJob& job) const;
  // For the rows from `begin` on, computes from their candidates: the row results in fp32, dx in the form
  // that the GEMM of an exact chunk has, the dropped mass, and the kept elements. `in` and `out` are the
  // inputs and the results of these rows.
  absl::Status FilterRows(const ChunkJob& job, const RowInputs& in, const RowResults& out,
                          int64_t begin) const;
  // Adds the kept elements to the weight gradients. Before the call, the rows of job.hidden that must not be
  // accumulated are 0 (ZeroDroppedHidden).
  absl::Status AddKept(const ChunkJob& job) const;

 private:
  const PathContext& context_;
  const FilterBuffers& buffers_;
};

// Zeroes job.dropped_mass, for a filtered chunk that turns out to be exact.
absl::Status ZeroDroppedMass(const ChunkJob& job, cudaStream_t stream);

// Continues a chunk by the device's decision (kernels/decision.h): the device does the work that `exact`
// enqueues if job.decision says "exact", else the work that `planned` enqueues. Returns the errors of
// DeviceBranch::Enqueue(). If the chunk is sampled in any case, enqueues `planned` without a branch.
absl::Status BranchByDecision(const PathContext& context, const ChunkJob& job, DeviceBranch& branch,
                              absl::FunctionRef<absl::Status()> exact,
                              absl::FunctionRef<absl::Status()> planned);

// The same for a flag on the device: the device does the work of `if_set` if *flag is not 0, else the work of
// `if_not`.
absl::Status BranchByFlag(const PathContext& context, const int32_t* flag, DeviceBranch& branch,
                          absl::FunctionRef<absl::Status()> if_set, absl::FunctionRef<absl::Status()> if_not);

// ---- descriptions of paths for people, as Choices (kernels/backend.h) ----

// Adds the algorithm that cuBLASLt uses for a GEMM; `what` names the GEMM.
absl::Status DescribeGemm(Gemms& gemms, absl::string_view what, const GemmShape& shape,
                          std::vector<Choice>& choices);

// Describes the logits product that also computes the loss.
Choice FusedLogitsChoice(const DeviceLimits& limits);

// Describes whether chunks of the head can be filtered, and the memory that is reserved for this.
Choice FilterChoice(const PathContext& context);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_PATH_STEPS_H_
