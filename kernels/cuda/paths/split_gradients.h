// SPDX-License-Identifier: Apache-2.0
// What the devices of a head that is split by vocabulary tell each other of gradients that are not exact: at
// which level they sample, and of each row the predicted error or the dropped mass. So they decide alike, and
// say the same. For a head that is not split there is nothing to tell.
//
// Each function enqueues on the device's compute stream. Driven by the backend's thread.
#ifndef LOSSD_KERNELS_CUDA_PATHS_SPLIT_GRADIENTS_H_
#define LOSSD_KERNELS_CUDA_PATHS_SPLIT_GRADIENTS_H_

#include "absl/status/status.h"
#include "kernels/cuda/kernels/sampled/sampled.h"
#include "kernels/cuda/paths/chunk_path.h"
#include "kernels/cuda/paths/split_rows.h"

namespace lossd::kernels::cuda {

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

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_SPLIT_GRADIENTS_H_
