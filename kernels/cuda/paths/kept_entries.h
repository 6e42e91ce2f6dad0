// SPDX-License-Identifier: Apache-2.0
// The weight gradient from a list of elements of ds, and the uniform part of label smoothing beside it: what
// filtered and sampled gradients have in common.
//
// Each function enqueues on the device's compute stream. Driven by the backend's thread.
#ifndef LOSSD_KERNELS_CUDA_PATHS_KEPT_ENTRIES_H_
#define LOSSD_KERNELS_CUDA_PATHS_KEPT_ENTRIES_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/kernels/filtered/filtered.h"
#include "kernels/cuda/paths/chunk_path.h"
#include "kernels/cuda/paths/kept_buffers.h"

namespace lossd::kernels::cuda {

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

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_KEPT_ENTRIES_H_
