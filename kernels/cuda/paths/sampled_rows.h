// SPDX-License-Identifier: Apache-2.0
// What the paths of sampled gradients have in common, whether logits are stored or recomputed.
#ifndef LOSSD_KERNELS_CUDA_PATHS_SAMPLED_ROWS_H_
#define LOSSD_KERNELS_CUDA_PATHS_SAMPLED_ROWS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/kernels/sampled/sampled.h"
#include "kernels/cuda/paths/chunk_path.h"

namespace lossd::kernels::cuda {

// From which size on elements are listed as they are; filtered ones are, all that is left of them.
inline float ThresholdOf(const ChunkJob& job) {
  return job.plan.sampled() ? job.options().sample_threshold : 0.0f;
}

// Enqueues the decision about a chunk whose rows have all been sampled, into job.decision and
// job.sample_threshold. Driven by the backend's thread.
absl::Status DecideSampled(const PathContext& context, const ChunkJob& job, SampleCounters* counters);

// What dx of the rows from `begin` on takes; `in` is theirs. Without kept entries, hot classes and the
// uniform part of label smoothing. Pure.
SampledHiddenParams HiddenParamsOf(const PathContext& context, const ChunkJob& job, const SampleList& list,
                                   const RowInputs& in, int64_t begin);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_SAMPLED_ROWS_H_
