// SPDX-License-Identifier: Apache-2.0
// Chunks and their slices as messages, and back. Stateless; thread-safe.
#ifndef LOSSD_SERVER_RANKS_CHUNK_MESSAGES_H_
#define LOSSD_SERVER_RANKS_CHUNK_MESSAGES_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "lossd/ranks/v1/ranks.pb.h"

namespace lossd::ranks {

// ---- The leader's side ----
v1::ChunkStart StartOf(const kernels::Chunk& chunk, uint64_t id, uint64_t head);
// `row_bytes`: of a row of hidden states, which may lie in the chunk's retained memory. UNIMPLEMENTED if that
// is not the host's.
absl::StatusOr<v1::ChunkSlice> MessageOf(const kernels::Chunk& chunk, const kernels::Slice& slice,
                                         size_t row_bytes);
// Writes results to where the slice wants them. INTERNAL if they are not as long as they have to be.
absl::Status TakeResults(const v1::SliceResults& results, size_t row_bytes, kernels::Slice& slice);
// Of a head that is split by vocabulary, whose first part delivers the results.
void TakePartResults(const v1::SliceResults& results, kernels::Slice& slice);

// ---- The worker's side ----
// The chunk without its slices.
absl::StatusOr<kernels::Chunk> ChunkOf(const v1::ChunkStart& start);
// The slice, whose inputs lie in the message, whose row results go to `results`, and whose hidden states have
// been copied to `hidden`, where the gradient of them goes too. INTERNAL if arrays have not the lengths that
// they have to have.
absl::StatusOr<kernels::Slice> SliceOf(v1::ChunkSlice& message, size_t row_bytes, void* hidden,
                                       v1::SliceResults& results);
// What the slice says of itself after it was computed.
void SetResults(const kernels::Slice& slice, size_t row_bytes, v1::SliceResults& results);
// Likewise, for TakePartResults.
void SetPartResults(const kernels::Slice& slice, v1::SliceResults& results);

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_CHUNK_MESSAGES_H_
