// SPDX-License-Identifier: Apache-2.0
// The rows and gradients of a chunk between the kernels that know the classes on this device and those that
// need all classes: sums of rows (RowMerger), and what is said of gradients that are not exact
// (GradientMerger). For a head that is not split by vocabulary there is nothing to exchange. The functions at
// the end are what the paths of sampled gradients have in common, whether logits are stored or recomputed.
//
// Each function enqueues on the device's compute stream. Driven by the backend's thread.
#ifndef LOSSD_KERNELS_CUDA_PATHS_SPLIT_GRADIENTS_H_
#define LOSSD_KERNELS_CUDA_PATHS_SPLIT_GRADIENTS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/kernels/sampled/sampled.h"
#include "kernels/cuda/kernels/split_rows.h"
#include "kernels/cuda/paths/chunk_path.h"
#include "kernels/cuda/paths/path_claims.h"

namespace lossd::kernels::cuda {

// The rows of a chunk of a head that is split by vocabulary, between the kernels that sum over the classes
// here and those that need the sums over all classes (kernels/split_rows.h).
class RowMerger {
 public:
  explicit RowMerger(const PathContext& context);

  // Sums of rows become those over the classes of all parts.
  absl::Status Merge(const LossTerms& terms, const RowInputs& in, const hopper::FusedRows& rows) const;
  absl::Status Merge(const LossTerms& terms, const RowInputs& in, RunningRow* rows) const;
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

  // Where the mass of the chunk's rows goes that the classes here drop. Only of a head that is split.
  float* dropped_mass() const { return rows_.own_sums; }
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

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_SPLIT_GRADIENTS_H_
