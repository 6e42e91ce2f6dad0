// SPDX-License-Identifier: Apache-2.0
// The ranks' protocol messages (proto/lossd/ranks/v1) as types of the kernels and of checkpoints, and back:
// first requests and answers, then chunks with their slices, for the leader and for a worker.
//
// All functions are stateless and thread-safe. They trust a message, because its sender was admitted and has
// the same version and byte order. They refuse only values out of the range of an enumeration, and arrays of
// another length.
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

// What the writer of a file knows of it: its size and tensors. The leader knows its name and classes.
v1::FileLine ToProto(const head::ManifestShard& shard);
head::ManifestShard FromProto(const v1::FileLine& line);

absl::StatusOr<kernels::Gradients> GradientsOf(uint32_t value);

// ---- Chunks and their slices ----

// Bytes of a row of hidden states.
struct RowBytes {
  size_t hidden = 0;
  size_t teacher = 0;  // of the teacher's; 0: there is none
};

// ---- The leader's side ----
// `head`, `teacher`: their numbers at the worker; teacher 0: there is none.
v1::ChunkStart StartOf(const kernels::Chunk& chunk, uint64_t id, uint64_t head, uint64_t teacher);
// Where bytes lie in memory that the worker has mapped; nullopt: in none.
using FindPlace = absl::FunctionRef<std::optional<v1::RowsPlace>(const void* begin, size_t bytes)>;
// The message for one slice. If `find` has a place for the hidden states, the message names the place; else
// the message brings the hidden states. The same holds for gradients, which else come with the results.
// Hidden states that are retained already are copied from the chunk's retained memory to the place of the
// gradients, or else into the message. Hidden states that are to be retained are written to that memory here.
// UNIMPLEMENTED if the host cannot reach that memory. `is_part`: another part of the head delivers the
// gradients and retains the hidden states.
absl::StatusOr<v1::ChunkSlice> MessageOf(const kernels::Chunk& chunk, const kernels::Slice& slice,
                                         const RowBytes& row_bytes, bool is_part, FindPlace find);
// Writes results to where the slice wants them. `in_place`: the worker was told where the gradients go, and
// has written them there. INTERNAL if results are not as long as they have to be, or come another way.
absl::Status TakeResults(const v1::SliceResults& results, size_t row_bytes, bool in_place,
                         kernels::Slice& slice);
// As TakeResults, for a head that is split by vocabulary, whose first part delivers the results.
void TakePartResults(const v1::SliceResults& results, kernels::Slice& slice);

// ---- The worker's side ----
// The chunk without its slices and its teacher.
absl::StatusOr<kernels::Chunk> ChunkOf(const v1::ChunkStart& start);
// Memory for a slice on the worker.
struct SliceMemory {
  void* own = nullptr;     // for hidden states that the message brings, and gradients that have no place
  void* hidden = nullptr;  // the place of the hidden states that the message names; null: it brings them
  void* teacher_hidden = nullptr;  // of the teacher's hidden states likewise
  void* grad_hidden = nullptr;     // where the message wants the gradients; null: it names no place
};
// Whether the slice needs SliceMemory::own.
bool NeedsOwnMemory(const v1::ChunkSlice& message);
// The slice, whose inputs lie in the message, whose row results go to `results`. Hidden states that the
// message brings are copied to `memory.own`, where the gradients go too, unless they have a place. INTERNAL
// if arrays have not the lengths that they have to have.
absl::StatusOr<kernels::Slice> SliceOf(v1::ChunkSlice& message, const RowBytes& row_bytes,
                                       const SliceMemory& memory, v1::SliceResults& results);
// Puts the results of the slice, once it is computed, into `results`. `in_place`: the slice's gradients are
// where the leader wants them.
void SetResults(const kernels::Slice& slice, size_t row_bytes, bool in_place, v1::SliceResults& results);
// The same for a part of a head that is split by vocabulary: what TakePartResults takes.
void SetPartResults(const kernels::Slice& slice, v1::SliceResults& results);

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_MESSAGES_H_
