// SPDX-License-Identifier: Apache-2.0
// What filtered gradients do with the candidates of a chunk once they are found: dx row by row, the list of
// kept elements, the decision whether the chunk is filtered after all, and dW from the list
// (docs/kernels/filtered.md). A path finds the candidates and says where the lists lie.
//
// Each function enqueues on the device's compute stream. Driven by the backend's thread.
#ifndef LOSSD_KERNELS_CUDA_PATHS_CANDIDATE_FILTER_H_
#define LOSSD_KERNELS_CUDA_PATHS_CANDIDATE_FILTER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/kernels/filtered/filtered.h"
#include "kernels/cuda/paths/chunk_path.h"
#include "kernels/cuda/paths/filter_plan.h"

namespace lossd::kernels::cuda {

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

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_CANDIDATE_FILTER_H_
