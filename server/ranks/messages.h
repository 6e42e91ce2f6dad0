// SPDX-License-Identifier: Apache-2.0
// Conversions between the messages of the ranks' protocol (proto/lossd/ranks/v1), which the leader and its
// workers exchange, and the types of the kernels and of checkpoints. First come requests and answers, then
// chunks with their slices, on the leader's side and on the worker's side.
//
// All functions are stateless and thread-safe. They trust a message, because its sender was admitted and has
// the same version and byte order. So they refuse only values outside the range of an enumeration, and arrays
// of a wrong length.
#ifndef LOSSD_SERVER_RANKS_MESSAGES_H_
#define LOSSD_SERVER_RANKS_MESSAGES_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "lossd/ranks/v1/ranks.pb.h"
#include "server/head/manifest.h"

namespace lossd::ranks {

v1::Status ToProto(const absl::Status& status);
absl::Status FromProto(const v1::Status& status);

v1::HeadConfig ToProto(const kernels::HeadConfig& config);
absl::StatusOr<kernels::HeadConfig> FromProto(const v1::HeadConfig& config);

v1::Step ToProto(const kernels::OptimizerOptions& options, int64_t update);
absl::StatusOr<kernels::OptimizerOptions> FromProto(const v1::Step& step);

v1::Distillation ToProto(const kernels::Distillation& distillation);
absl::StatusOr<kernels::Distillation> FromProto(const v1::Distillation& distillation);

v1::LossOptions ToProto(const kernels::LossOptions& options);
absl::StatusOr<kernels::LossOptions> FromProto(const v1::LossOptions& options);

v1::Memory ToProto(const kernels::MemoryStats& stats);
kernels::MemoryStats FromProto(const v1::Memory& memory);

v1::BackendInfo ToProto(const kernels::BackendInfo& info, int max_chunks_in_flight);
absl::StatusOr<kernels::BackendInfo> FromProto(const v1::BackendInfo& info);

v1::TensorAccess ToProto(kernels::TensorId id, int64_t row_begin, int64_t rows, kernels::DType dtype);
absl::StatusOr<kernels::TensorId> TensorOf(const v1::TensorAccess& access);
absl::StatusOr<kernels::DType> DTypeOf(uint32_t value);

void SetBytes(const kernels::MemoryBytes& bytes, google::protobuf::RepeatedField<int64_t>* out);
kernels::MemoryBytes BytesOf(const google::protobuf::RepeatedField<int64_t>& values);

void SetChoices(const std::vector<kernels::Choice>& choices,
                google::protobuf::RepeatedPtrField<v1::Choice>* out);
std::vector<kernels::Choice> ChoicesOf(const google::protobuf::RepeatedPtrField<v1::Choice>& choices);

v1::SliceSums ToProto(const kernels::LossSums& sums);
kernels::LossSums FromProto(const v1::SliceSums& sums);

// The report about a file by the worker that has written it: the file's size and its tensors. The leader
// knows the file's name and classes.
v1::FileLine ToProto(const head::ManifestShard& shard);
head::ManifestShard FromProto(const v1::FileLine& line);

absl::StatusOr<kernels::Gradients> GradientsOf(uint32_t value);

// ---- Chunks and their slices ----

// The bytes of one row of hidden states.
struct RowBytes {
  size_t hidden = 0;
  size_t teacher = 0;  // bytes of the teacher's hidden state; 0: no teacher
};

// ---- The leader's side ----
// `head`, `teacher`: the ids of these heads at the worker. `teacher` is 0 if there is no teacher.
v1::ChunkStart StartOf(const kernels::Chunk& chunk, uint64_t id, uint64_t head, uint64_t teacher);
// Finds the place of bytes in memory that the worker has mapped. nullopt: they are not in such memory.
using FindPlace = absl::FunctionRef<std::optional<v1::RowsPlace>(const void* begin, size_t bytes)>;
// The message for one slice.
// - Hidden states: if `find` has a place for them, the message names the place; otherwise the message brings
//   them. Hidden states that are to be retained are also written to the chunk's retained memory.
// - Hidden states that are retained already are copied from the retained memory to the place of the
//   gradients, which the worker then reads as its hidden states. If the gradients have no place, they are
//   copied into the message.
// - Gradients: if `find` has a place for them, the message names it; otherwise they come with the results.
//
// `is_part`: another part of the head delivers the gradients and retains the hidden states. UNIMPLEMENTED if
// the host cannot reach the retained memory.
absl::StatusOr<v1::ChunkSlice> MessageOf(const kernels::Chunk& chunk, const kernels::Slice& slice,
                                         const RowBytes& row_bytes, bool is_part, FindPlace find);
// Writes results to the arrays of the slice. `in_place`: the message named the place of the gradients, and
// the worker has written them there. INTERNAL if a result has a wrong length, or if gradients come in the
// message although `in_place` is set.
absl::Status TakeResults(const v1::SliceResults& results, size_t row_bytes, bool in_place,
                         kernels::Slice& slice);
// As TakeResults, for a part of a head that is split by vocabulary. The first part delivers the results of
// the rows.
void TakePartResults(const v1::SliceResults& results, kernels::Slice& slice);

// ---- The worker's side ----
// The chunk, except for its slices and its teacher.
absl::StatusOr<kernels::Chunk> ChunkOf(const v1::ChunkStart& start);
// The memory that a slice uses on the worker.
struct SliceMemory {
  // Memory for hidden states that the message brings, and for gradients whose place the message does not
  // name.
  void* own = nullptr;
  // The hidden states, if the message names their place; null: the message brings them.
  void* hidden = nullptr;
  // The teacher's hidden states, in the same way.
  void* teacher_hidden = nullptr;
  // The place of the gradients, if the message names it; null: the message does not name a place.
  void* grad_hidden = nullptr;
};
// Whether the slice needs SliceMemory::own.
bool NeedsOwnMemory(const v1::ChunkSlice& message);
// The slice of a message. Its inputs point into the message, and its row results into `results`. Hidden
// states that the message brings are copied to `memory.own`. Gradients are also written to `memory.own`,
// unless `memory.grad_hidden` is set. INTERNAL if an array has a wrong length.
absl::StatusOr<kernels::Slice> SliceOf(v1::ChunkSlice& message, const RowBytes& row_bytes,
                                       const SliceMemory& memory, v1::SliceResults& results);
// Puts the results of a computed slice into `results`. `in_place`: the gradients are already in the place
// that the leader named.
void SetResults(const kernels::Slice& slice, size_t row_bytes, bool in_place, v1::SliceResults& results);
// The same for a part of a head that is split by vocabulary. TakePartResults reads these results.
void SetPartResults(const kernels::Slice& slice, v1::SliceResults& results);

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_MESSAGES_H_
