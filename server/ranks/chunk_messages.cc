// SPDX-License-Identifier: Apache-2.0
#include "server/ranks/chunk_messages.h"

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/errors/bytes.h"
#include "kernels/host_bytes.h"
#include "server/ranks/messages.h"

namespace lossd::ranks {
namespace {

using kernels::Slice;

template <typename T>
void Put(const T* values, int64_t rows, std::string* bytes) {
  if (values == nullptr) return;
  bytes->assign(reinterpret_cast<const char*>(values), static_cast<size_t>(rows) * sizeof(T));
}

absl::Status WrongLength(const char* what, size_t want, size_t got) {
  return absl::InternalError(
      absl::StrCat("it sent ", errors::ExactBytes(got), " of ", what, " instead of ", want));
}

// An array of the message, or null.
template <typename T>
absl::Status Get(const char* what, const std::string& bytes, int64_t rows, const T*& values) {
  if (bytes.empty()) return absl::OkStatus();
  const size_t want = static_cast<size_t>(rows) * sizeof(T);
  if (bytes.size() != want) return WrongLength(what, want, bytes.size());
  values = reinterpret_cast<const T*>(bytes.data());
  return absl::OkStatus();
}

// Room for a result, if it is wanted.
template <typename T>
T* Room(bool wanted, int64_t rows, std::string* bytes) {
  if (!wanted) return nullptr;
  bytes->resize(static_cast<size_t>(rows) * sizeof(T));
  return reinterpret_cast<T*>(bytes->data());
}

absl::Status Take(const char* what, const std::string& bytes, size_t want, void* out) {
  if (out == nullptr) return absl::OkStatus();
  if (bytes.size() != want) return WrongLength(what, want, bytes.size());
  std::memcpy(out, bytes.data(), want);
  return absl::OkStatus();
}

// By vocabulary the leader writes the gradients, perhaps while the others still read.
void PlaceGradients(const Slice& slice, size_t length, bool is_part, FindPlace find,
                    v1::ChunkSlice* message) {
  if (slice.grad_hidden == nullptr || length == 0 || is_part) return;
  if (std::optional<v1::RowsPlace> place = find(slice.grad_hidden, length)) {
    *message->mutable_grad_hidden_at() = *std::move(place);
  }
}

// Retained hidden states lie where the gradients are going to lie, if that has a place.
absl::Status PutRetained(const kernels::Chunk& chunk, const Slice& slice, size_t length,
                         v1::ChunkSlice* message) {
  auto* bytes = static_cast<uint8_t*>(slice.grad_hidden);
  if (message->has_grad_hidden_at()) {
    *message->mutable_hidden_at() = message->grad_hidden_at();
  } else {
    message->mutable_hidden()->resize(length);
    bytes = reinterpret_cast<uint8_t*>(message->mutable_hidden()->data());
  }
  return kernels::ReadBytesOf(chunk.retained, slice.retained_offset, {bytes, length});
}

// After PlaceGradients. Hidden states that are to be retained the leader keeps, by vocabulary the first part.
absl::Status PutHidden(const kernels::Chunk& chunk, const Slice& slice, size_t length, bool is_part,
                       FindPlace find, v1::ChunkSlice* message) {
  if (length == 0) return absl::OkStatus();
  if (slice.hidden == nullptr) return PutRetained(chunk, slice, length, message);
  if (slice.retained_offset >= 0 && !is_part) {
    absl::Status kept = kernels::WriteBytesOf(chunk.retained, slice.retained_offset,
                                              {static_cast<const uint8_t*>(slice.hidden), length});
    if (!kept.ok()) return kept;
  }
  if (std::optional<v1::RowsPlace> place = find(slice.hidden, length)) {
    *message->mutable_hidden_at() = *std::move(place);
  } else {
    message->mutable_hidden()->assign(static_cast<const char*>(slice.hidden), length);
  }
  return absl::OkStatus();
}

// As many bytes as the rows have, which the message brings or names.
absl::Status CheckHidden(const v1::ChunkSlice& message, size_t bytes) {
  const size_t want = message.has_hidden_at() ? 0 : bytes;
  if (message.hidden().size() == want) return absl::OkStatus();
  return WrongLength("hidden states", want, message.hidden().size());
}

}  // namespace

v1::ChunkStart StartOf(const kernels::Chunk& chunk, uint64_t id, uint64_t head) {
  v1::ChunkStart start;
  start.set_chunk(id);
  start.set_head(head);
  *start.mutable_options() = ToProto(chunk.options);
  start.set_hidden_dtype(static_cast<uint32_t>(chunk.hidden_dtype));
  start.set_accumulate_gradients(chunk.accumulate_gradients);
  start.set_independent(chunk.independent);
  start.set_turn(chunk.turn);
  start.set_slices(static_cast<uint32_t>(chunk.slices.size()));
  int64_t rows = 0;
  for (const Slice& slice : chunk.slices) rows += slice.rows;
  start.set_rows(rows);
  return start;
}

absl::StatusOr<v1::ChunkSlice> MessageOf(const kernels::Chunk& chunk, const Slice& slice, size_t row_bytes,
                                         bool is_part, FindPlace find) {
  v1::ChunkSlice message;
  message.set_rows(slice.rows);
  const size_t length = static_cast<size_t>(slice.rows) * row_bytes;
  PlaceGradients(slice, length, is_part, find, &message);
  absl::Status status = PutHidden(chunk, slice, length, is_part, find, &message);
  if (!status.ok()) return status;
  Put(slice.targets, slice.rows, message.mutable_targets());
  Put(slice.row_weights, slice.rows, message.mutable_row_weights());
  Put(slice.accumulate, slice.rows, message.mutable_accumulate());
  message.set_grad_scale(slice.grad_scale);
  message.set_sample_seed(slice.sample_seed);
  message.set_first_row(slice.first_row);
  message.set_stands_in(slice.stands_in);
  Put(slice.grad_loss, slice.rows, message.mutable_grad_loss());
  Put(slice.grad_lse, slice.rows, message.mutable_grad_lse());
  Put(slice.grad_entropy, slice.rows, message.mutable_grad_entropy());
  message.set_want_grad_hidden(slice.grad_hidden != nullptr);
  message.set_want_loss(slice.out.loss != nullptr);
  message.set_want_lse(slice.out.lse != nullptr);
  message.set_want_entropy(slice.out.entropy != nullptr);
  message.set_want_target_logprob(slice.out.target_logprob != nullptr);
  message.set_want_argmax(slice.out.argmax != nullptr);
  return message;
}

absl::Status TakeResults(const v1::SliceResults& results, size_t row_bytes, bool in_place, Slice& slice) {
  slice.first_nonfinite_row = results.first_nonfinite_row();
  slice.sums = FromProto(results.sums());
  const size_t each = static_cast<size_t>(slice.rows) * sizeof(float);
  absl::Status status = Take("losses", results.loss(), each, slice.out.loss);
  status.Update(Take("lse", results.lse(), each, slice.out.lse));
  status.Update(Take("entropies", results.entropy(), each, slice.out.entropy));
  status.Update(Take("log-probabilities", results.target_logprob(), each, slice.out.target_logprob));
  status.Update(Take("argmax", results.argmax(), each, slice.out.argmax));
  if (results.grad_hidden_in_place() != in_place) {
    status.Update(absl::InternalError("it put gradients where they do not belong"));
  }
  if (!in_place) {
    status.Update(Take("gradients", results.grad_hidden(), static_cast<size_t>(slice.rows) * row_bytes,
                       slice.grad_hidden));
  }
  return status;
}

void TakePartResults(const v1::SliceResults& results, Slice& slice) {
  slice.first_nonfinite_row = results.first_nonfinite_row();
}

absl::StatusOr<kernels::Chunk> ChunkOf(const v1::ChunkStart& start) {
  const auto options = FromProto(start.options());
  if (!options.ok()) return options.status();
  const auto dtype = DTypeOf(start.hidden_dtype());
  if (!dtype.ok()) return dtype.status();
  kernels::Chunk chunk;
  chunk.options = *options;
  chunk.hidden_dtype = *dtype;
  chunk.accumulate_gradients = start.accumulate_gradients();
  chunk.independent = start.independent();
  chunk.turn = start.turn();
  return chunk;
}

bool NeedsOwnMemory(const v1::ChunkSlice& message) {
  return message.rows() > 0 &&
         (!message.has_hidden_at() || (message.want_grad_hidden() && !message.has_grad_hidden_at()));
}

absl::StatusOr<Slice> SliceOf(v1::ChunkSlice& message, size_t row_bytes, const SliceMemory& memory,
                              v1::SliceResults& results) {
  const int64_t rows = message.rows();
  const size_t bytes = static_cast<size_t>(rows) * row_bytes;
  if (absl::Status status = CheckHidden(message, bytes); !status.ok()) return status;
  Slice slice;
  slice.rows = rows;
  slice.hidden = memory.hidden == nullptr ? memory.own : memory.hidden;
  if (memory.hidden == nullptr && bytes > 0) std::memcpy(memory.own, message.hidden().data(), bytes);
  message.clear_hidden();
  absl::Status status = Get("targets", message.targets(), rows, slice.targets);
  status.Update(Get("row weights", message.row_weights(), rows, slice.row_weights));
  status.Update(Get("accumulate", message.accumulate(), rows, slice.accumulate));
  status.Update(Get("grad_loss", message.grad_loss(), rows, slice.grad_loss));
  status.Update(Get("grad_lse", message.grad_lse(), rows, slice.grad_lse));
  status.Update(Get("grad_entropy", message.grad_entropy(), rows, slice.grad_entropy));
  if (!status.ok()) return status;
  if (rows == 0) slice.targets = reinterpret_cast<const int32_t*>(message.targets().data());
  slice.grad_scale = message.grad_scale();
  slice.sample_seed = message.sample_seed();
  slice.first_row = message.first_row();
  slice.stands_in = message.stands_in();
  if (message.want_grad_hidden()) {
    slice.grad_hidden = memory.grad_hidden == nullptr ? memory.own : memory.grad_hidden;
  }
  slice.out.loss = Room<float>(message.want_loss(), rows, results.mutable_loss());
  slice.out.lse = Room<float>(message.want_lse(), rows, results.mutable_lse());
  slice.out.entropy = Room<float>(message.want_entropy(), rows, results.mutable_entropy());
  slice.out.target_logprob =
      Room<float>(message.want_target_logprob(), rows, results.mutable_target_logprob());
  slice.out.argmax = Room<int32_t>(message.want_argmax(), rows, results.mutable_argmax());
  return slice;
}

void SetResults(const Slice& slice, size_t row_bytes, bool in_place, v1::SliceResults& results) {
  results.set_first_nonfinite_row(slice.first_nonfinite_row);
  *results.mutable_sums() = ToProto(slice.sums);
  results.set_grad_hidden_in_place(in_place);
  if (slice.grad_hidden == nullptr || in_place) return;
  results.set_grad_hidden(slice.grad_hidden, static_cast<size_t>(slice.rows) * row_bytes);
}

void SetPartResults(const Slice& slice, v1::SliceResults& results) {
  results = v1::SliceResults();  // what rows of a part say is said by all parts together
  results.set_first_nonfinite_row(slice.first_nonfinite_row);
}

}  // namespace lossd::ranks
