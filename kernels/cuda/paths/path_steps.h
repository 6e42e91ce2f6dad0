// SPDX-License-Identifier: Apache-2.0
// Steps of a chunk that several paths have in common. Between the kernels that know the classes on this
// device and those that need all classes: sums of rows (RowMerger), and what is said of gradients that are
// not exact (GradientMerger), the most probable classes (TopSelector) and named ones (SoftSteps); for a head
// that is not split by vocabulary there is nothing to exchange. Of gradients from a list of elements of ds:
// which chunks try it (FilterBackoff), what filtered gradients do with candidates (CandidateFilter), the
// weight gradient from the list (AddEntries) with the uniform part of label smoothing beside it (AddUniform),
// and how a chunk goes on by the device's decision (BranchByDecision).
//
// Each function but those of FilterBackoff enqueues on the device's compute stream. Driven by the backend's
// thread.
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

// The rows of a chunk of a head that is split by vocabulary, between the kernels that sum over the classes
// here and those that need the sums over all classes (kernels/split_rows.h).
class RowMerger {
 public:
  explicit RowMerger(const PathContext& context);

  // Sums of rows become those over the classes of all parts.
  absl::Status Merge(const LossTerms& terms, const RowInputs& in, const hopper::FusedRows& rows) const;
  absl::Status Merge(const LossTerms& terms, const RowInputs& in, RunningRow* rows) const;
  // Records of rows with a teacher become those of all parts, as `launch` adds them up.
  absl::Status Merge(const DivergenceParams& p,
                     cudaError_t (*launch)(const MergeTaughtParams& params, cudaStream_t stream)) const;
  // Where merged sums of fused rows are relative to something else than what is stored.
  void UseIn(hopper::FusedRows& rows) const;

 private:
  const PathContext& context_;
  const SplitRows rows_;
};

// What the devices of a head that is split by vocabulary tell each other of gradients that are not exact: at
// which level they sample, and of each row the predicted error or the dropped mass. So they decide alike, and
// say the same.
class GradientMerger {
 public:
  explicit GradientMerger(const PathContext& context);

  // Where variance and square of the chunk's rows go until MergeErrors has added them up.
  float* variance(const ChunkJob& job) const;
  float* square(const ChunkJob& job) const;
  // LaunchSampleRows(), at the same level on all devices.
  absl::Status Sample(const SampleRowsParams& params) const;
  // job.variance and job.square become those of all classes.
  absl::Status MergeErrors(const ChunkJob& job) const;

  // Where the mass of the chunk's rows goes that the classes here drop.
  float* dropped_mass(const ChunkJob& job) const {
    return context_.sizes.is_split() ? rows_.own_sums : job.dropped_mass;
  }
  // job.dropped_mass becomes that of all classes.
  absl::Status MergeDroppedMass(const ChunkJob& job) const;
  // The decision about a chunk whose lists on all devices have to hold what is left: exact unless they do.
  // After MergeDroppedMass.
  absl::Status DecideListed(const ChunkJob& job, const SampleCounters* counters) const;

 private:
  // all_sums of `n` sums each.
  absl::Status GatherSums(int64_t n) const;

  const PathContext& context_;
  const SplitRows rows_;
};

// ---- single classes of rows ----

// The most probable classes of the rows of a chunk that wants them, while its fp32 logits are in memory. A
// path that does not compute whole rows of logits calls Select with the blocks of classes of its rows in
// order; until the last of them Region::kHiddenGradient, which must be free, has the lists so far.
class TopSelector {
 public:
  explicit TopSelector(const PathContext& context)
      : context_(context), scratch_(TopScratch::Carve(context.sizes, context.memory[Region::kTopClasses])) {}

  // The rows' logits of the classes from `first_class` on, counted from the first here, of which the `last`
  // end with the classes here. With that job.classes is complete, of a head that is split on all devices.
  // Nothing if the chunk wants none.
  absl::Status Select(const ChunkJob& job, const RowBlock& rows, const LogitMatrix& logits,
                      int64_t first_class, bool last) const;
  // Of whole rows.
  absl::Status Select(const ChunkJob& job, const RowBlock& rows, const LogitMatrix& logits) const {
    return Select(job, rows, logits, 0, true);
  }
  // Of all rows of the chunk, from what the fused pass has stored of them, of a head that is not split.
  absl::Status SelectOfExponentials(const ChunkJob& job, const void* exponentials) const;

 private:
  absl::Status Exchange(const ChunkJob& job, int64_t begin, const SelectTopParams& select) const;

  const PathContext& context_;
  const TopScratch scratch_;
};

// ---- rows with soft targets ----

// What rows with soft targets need beside the steps of others (kernels/soft_rows.h); nothing of a chunk
// without them. For each block of rows: Take before the statistics of each block of classes, Name after the
// last, before LaunchFinishRunning, and Write after the gradient of each.
class SoftSteps {
 public:
  explicit SoftSteps(const PathContext& context) : context_(context) {}

  absl::Status Take(const ChunkJob& job, const RowBlock& rows, const ClassBlock& block) const;
  // Of a head that is split, with the classes of all devices.
  absl::Status Name(const ChunkJob& job, const RowBlock& rows) const;
  absl::Status Write(const ChunkJob& job, const RowBlock& rows, const ClassBlock& block,
                     const GradientRule* rules) const;

 private:
  // `logits` [entries] become the sums over all devices.
  absl::Status Exchange(float* logits, int64_t entries) const;

  const PathContext& context_;
};

// ---- the gradient of a block of classes ----

// From the block's logits and `rules` [padded rows of `rows`], which LaunchFinishRunning has written but for
// those of padding: filtered if the plan says so, with what was left out in `dropped_mass` [rows of `rows`],
// and with that of soft targets.
absl::Status WriteBlockGradient(const PathContext& context, const SoftSteps& soft, const ChunkJob& job,
                                const RowBlock& rows, const ClassBlock& block, GradientRule* rules,
                                float* dropped_mass);

// ---- sampled gradients ----

// From which size on elements are listed as they are; filtered ones are, all that is left of them.
inline float ThresholdOf(const ChunkJob& job) {
  return job.plan.sampled() ? job.options().sample_threshold : 0.0f;
}

// Enqueues the decision about a chunk whose rows have all been sampled, into job.decision and
// job.sample_threshold.
absl::Status DecideSampled(const PathContext& context, const ChunkJob& job, SampleCounters* counters);

// What dx of the rows from `begin` on takes; `in` is theirs. Without kept entries, hot classes and the
// uniform part of label smoothing. Pure.
SampledHiddenParams HiddenParamsOf(const PathContext& context, const ChunkJob& job, const SampleList& list,
                                   const RowInputs& in, int64_t begin);

// ---- gradients from a list of elements of ds ----

inline constexpr int kFilterPatience = 16;

// Which chunks that may be filtered or sampled try it. Once kFilterPatience of them in a row have turned out
// exact, for their candidates or for the predicted error, trying pauses: only one chunk in kFilterPatience
// tries. The others are exact from the start, which spares them the selection and, where filtered ones store
// their logits, lets their loss be fused. The arithmetic is in docs/lab/2026-11-21-filter-trials.md.
//
// What it says depends on nothing but the order of the calls. Thread-compatible.
class FilterBackoff {
 public:
  // Whether the next chunk, with these options, is to try. Other options than the last chunk's begin anew.
  bool Next(const LossOptions& options);
  // What became of a chunk that tried with these options, some chunks ago.
  void Note(const LossOptions& options, Decision decision);

 private:
  bool Paused() const { return exact_in_a_row_ >= kFilterPatience; }

  LossOptions options_;
  int exact_in_a_row_ = 0;
  int without_trial_ = 0;  // chunks since the last one that tried
};

// Makes the rows of job.hidden 0 that may not reach the accumulators.
absl::Status ZeroDroppedHidden(const PathContext& context, const ChunkJob& job);

// No entries: all of the first `count` keys say so.
absl::Status ClearEntries(const PathContext& context, const KeptBuffers& buffers, int64_t count);
// Adds the entries among the first `count` to the weight gradients. Dropped rows of job.hidden are 0. runs:
// 0.
absl::Status AddEntries(const PathContext& context, const ChunkJob& job, const KeptBuffers& buffers,
                        int64_t count, RunCounters* runs);

// weight_sum: the sum of u_v w_v over all classes.
absl::Status SumWeights(const PathContext& context, const ChunkJob& job, const KeptBuffers& buffers);
// Adds to the weight gradients what label smoothing gives every class.
absl::Status AddUniform(const PathContext& context, const ChunkJob& job, const KeptBuffers& buffers);

// What filtered gradients do with the candidates of a chunk once they are found: dx row by row, the list of
// kept elements, the decision whether the chunk is filtered after all, and dW from the list
// (docs/kernels/filtered.md). A path finds the candidates and says where the lists lie.
class CandidateFilter {
 public:
  // Both outlive it.
  CandidateFilter(const PathContext& context, const FilterBuffers& buffers)
      : context_(context), buffers_(buffers) {}

  // An empty pool of candidates.
  absl::Status Begin(const ChunkJob& job) const;
  // The selection of the rows from `begin` on.
  RowSelection Selection(const ChunkJob& job, int64_t begin) const;
  // Whether the chunk is filtered, from the selection of all rows, into job.decision.
  absl::Status Decide(const ChunkJob& job) const;
  // What FilterRows needs once a chunk: an empty list of kept elements, and the sum of the weights.
  absl::Status PrepareRows(const ChunkJob& job) const;
  // Row results in fp32, dx as the GEMM of an exact chunk would leave it, the dropped mass and the kept
  // elements of selected rows; `in` and `out` are those from `begin` on.
  absl::Status FilterRows(const ChunkJob& job, const RowInputs& in, const RowResults& out,
                          int64_t begin) const;
  // Adds the kept elements to the weight gradients. Dropped rows of job.hidden are 0.
  absl::Status AddKept(const ChunkJob& job) const;

 private:
  const PathContext& context_;
  const FilterBuffers& buffers_;
};

// The exact way of a filtered chunk drops nothing: zeroes job.dropped_mass.
absl::Status ZeroDroppedMass(const ChunkJob& job, cudaStream_t stream);

// A chunk goes on by what the device has decided (kernels/decision.h): enqueues what `exact` enqueues if
// job.decision is to be exact, else what `planned` does. Errors are those of DeviceBranch::Enqueue(). A chunk
// that is sampled whatever its data enqueues `planned` without a branch.
absl::Status BranchByDecision(const PathContext& context, const ChunkJob& job, DeviceBranch& branch,
                              absl::FunctionRef<absl::Status()> exact,
                              absl::FunctionRef<absl::Status()> planned);

// The same by any number of the device: `if_set` if it is not 0.
absl::Status BranchByFlag(const PathContext& context, const int32_t* flag, DeviceBranch& branch,
                          absl::FunctionRef<absl::Status()> if_set, absl::FunctionRef<absl::Status()> if_not);

// ---- what paths say of themselves for people, as Choices (kernels/backend.h) ----

// Adds the choice of the library's algorithm for a GEMM, which `what` names.
absl::Status DescribeGemm(Gemms& gemms, absl::string_view what, const GemmShape& shape,
                          std::vector<Choice>& choices);

// The choice of the logits product that computes the loss.
Choice FusedLogitsChoice(const DeviceLimits& limits);

// Whether chunks of the head can be filtered, and the memory that is kept for it, for people.
Choice FilterChoice(const PathContext& context);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_PATH_STEPS_H_
