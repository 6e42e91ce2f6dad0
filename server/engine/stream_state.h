// SPDX-License-Identifier: Apache-2.0
// What the engine knows of a stream. StreamRows says what its rows are, StreamState how far it has come.
// DeferredMicrobatches keeps the rows that streams retained for a later backward pass, and RowsOf makes the
// stream of that backward pass.
//
// Plain state without locks or threads; the engine's lock guards it unless a type says otherwise.
#ifndef LOSSD_SERVER_ENGINE_STREAM_STATE_H_
#define LOSSD_SERVER_ENGINE_STREAM_STATE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "server/engine/ledger.h"
#include "server/engine/staging.h"
#include "server/engine/stream.h"
#include "server/engine/teaching.h"

namespace lossd::engine {

// Rows of a microbatch in retained memory, [rows, D] in the microbatch's dtype.
struct RetainedRows {
  RowRange rows;
  std::shared_ptr<const RangeAllocator::Block> block;
};

// Rows that are retained, or are going to be, and what all rows of their microbatch have to agree on.
struct RetainedTerms {
  const MicrobatchTerms& terms;
  RowRange rows;
};
// FAILED_PRECONDITION if the terms differ, ALREADY_EXISTS if the rows overlap without being the same. `how`
// the first ones are kept, e.g. "retained".
absl::Status CheckRetained(uint64_t id, const RetainedTerms& kept, const RetainedTerms& other,
                           absl::string_view how);

// The deferred microbatches of one head: rows whose losses were computed without gradients (reduction none)
// and whose hidden states are kept until Backward brings the gradient of each row.
//
// A microbatch consists of parts, one for each stream that carried it. Parts never overlap.
// Thread-compatible: guarded by the engine's lock.
class DeferredMicrobatches {
 public:
  struct Part {
    RetainedRows retained;
    std::vector<int32_t> targets;    // [rows], classes or kernels::kIgnoredTarget
    std::vector<float> row_weights;  // empty or [rows]
    SoftTargets soft;                // empty, or of the rows
    // Who retained it: StreamSpec::identity and run.
    std::string identity;
    std::string run;
  };
  struct Microbatch {
    MicrobatchTerms terms;
    Binding binding;                // the versions that its losses were computed with
    std::map<int64_t, Part> parts;  // by first row
    absl::Time last_used;
  };

  // FAILED_PRECONDITION if the id is kept with other terms, ALREADY_EXISTS if it has rows that overlap
  // `rows` other than exactly those.
  // PERMISSION_DENIED if somebody else, whom the server knows, retains exactly those.
  absl::Status CheckAdd(uint64_t id, const MicrobatchTerms& terms, RowRange rows,
                        absl::string_view identity) const;
  // Keeps a part that CheckAdd allowed, unless it has no rows; replaces one with the same rows.
  void Add(uint64_t id, const MicrobatchTerms& terms, const Binding& binding, Part part, absl::Time now);

  // A microbatch whose parts cover `rows`, marked as used. NOT_FOUND names the first row that is not there.
  absl::StatusOr<const Microbatch*> Find(uint64_t id, RowRange rows, absl::Time now);

  // True if there was one. It belongs to the identities that retained rows of it, where the server asks, and
  // else to their runs. PERMISSION_DENIED for another identity, FAILED_PRECONDITION for another run.
  absl::StatusOr<bool> Release(uint64_t id, const Asker& asker);
  // Releases those whose binding is past.
  void ReleaseIf(absl::FunctionRef<bool(const Binding&)> past);
  // Releases what was last used before `limit`; returns how many microbatches.
  int64_t Expire(absl::Time limit);

  int64_t size() const { return static_cast<int64_t>(microbatches_.size()); }

 private:
  std::map<uint64_t, Microbatch> microbatches_;
};

// INVALID_ARGUMENT unless `values` are finite, one for each of the rows, or absent where they are optional.
absl::Status CheckRowValues(absl::string_view field, absl::Span<const float> values, int64_t rows,
                            bool optional);

// What a stream's rows are: its spec, checked and with everything resolved that the spec leaves open, and
// where its rows are retained. Fixed once the stream is open; StreamState knows how far it has come.
//
// Thread-compatible; the members that are not const are called before the first slice or at the stream's end.
class StreamRows {
 public:
  // Checks everything about the spec that does not depend on the ledger, maps ignored targets to
  // kernels::kIgnoredTarget and resolves the normalizer. INVALID_ARGUMENT names the field of
  // lossd.v1.OpenMicrobatch; FAILED_PRECONDITION for accumulation on a frozen head.
  static absl::StatusOr<StreamRows> Create(StreamSpec spec, const kernels::HeadConfig& config,
                                           HeadState state, SliceLimits limits, TeacherOf teacher = {});

  // For a stream that retains its rows or computes retained ones: where they are. `gradients` goes with the
  // latter. Call once, before the first slice.
  void SetRetained(std::vector<RetainedRows> retained, RowGradients gradients);

  const StreamSpec& spec() const { return spec_; }
  const MicrobatchTerms& terms() const { return terms_; }
  HeadState head_state() const { return head_state_; }
  SliceLimits limits() const { return limits_; }
  int64_t hidden_size() const { return hidden_size_; }
  const TeacherOf& teacher() const { return teacher_; }
  // g, the factor of every gradient of the row: grad_output / normalizer, with depths those of its depth and
  // times its weight.
  float grad_scale(int64_t row) const { return grad_scales_[terms_.DepthOf(row)]; }
  // Targets of some rows of this stream.
  const int32_t* targets(RowRange rows) const {
    return spec_.targets.data() + (rows.begin - spec_.rows.begin);
  }
  // Points the slice to what came with the rows: targets, weights, upstream gradients, what the objective
  // takes, soft targets, and the classes of which log-probabilities are wanted.
  void PutValues(RowRange rows, kernels::Slice& slice) const;
  // All the ledger knows of the rows: sent again, they must have the same. SetRetained comes before.
  RowContents contents() const {
    return {.targets = spec_.targets,
            .row_weights = spec_.row_weights,
            .grad_loss = gradients_.loss,
            .grad_lse = gradients_.lse,
            .grad_entropy = gradients_.entropy,
            .advantages = spec_.numbers.advantages,
            .old_logprobs = spec_.numbers.old_logprobs,
            .ref_logprobs = spec_.numbers.ref_logprobs,
            .soft_low = digest_.low,
            .soft_high = digest_.high,
            .soft_sums = digest_.sums};
  }

  // The place of some rows of one slice in retained memory, in bytes; -1: none.
  int64_t RetainedOffset(RowRange rows) const;
  // The rows of this stream, in ascending order, cut so that each slice obeys the limits and lies in one
  // piece of retained memory.
  std::vector<RowRange> RetainedSlices() const;
  // Host memory of what is known of the rows.
  int64_t HostBytes() const;
  // At the end of the stream, after TakePart: what is known of the rows, which may be much to destroy.
  RowValues TakeValues();
  // What a stream that retained its rows leaves behind. Call once, at its end.
  DeferredMicrobatches::Part TakePart();
  // Whether the stream computes retained rows. Never changes after SetRetained, so it may be read without a
  // lock.
  bool is_backward() const { return is_backward_; }
  // What it rests on from its opening to its end: one version of the weights; the step, if it names one; and
  // the gradients, if it accumulates, retains rows or uses retained ones.
  Binding binding() const;
  // Bytes of some rows' hidden states.
  int64_t RowBytes(int64_t rows) const;
  // Of retained memory, if the rows are retained: of hidden states and, behind them, as much as the soft
  // targets have, which stay in memory of the host. So that memory is bounded as the hidden states are.
  int64_t RetainedBytes() const;

  int64_t valid_rows() const { return valid_rows_; }        // with a target
  int64_t unlisted_rows() const { return unlisted_rows_; }  // StreamSummary::unlisted_rows
  // Classes of the head become numbers of the vocabulary that it has some classes of.
  void NumberClasses(std::vector<int32_t>& classes) const;
  bool HasTarget(int64_t row) const { return *targets({row, row + 1}) != kernels::kIgnoredTarget; }

  // INVALID_ARGUMENT if no stream with these rows may send such a slice, whatever it has sent before. `bytes`
  // of its hidden states; `in_place` as in IncomingSlice.
  absl::Status CheckSlice(RowRange rows, int64_t bytes, bool in_place) const;

 private:
  StreamRows(StreamSpec spec, HeadState state, SliceLimits limits, TeacherOf teacher);
  absl::Status MapTargets(int64_t vocab_size);
  absl::Status ResolveNormalizer();
  absl::Status ResolveDepths();

  StreamSpec spec_;
  MicrobatchTerms terms_;
  HeadState head_state_;
  SliceLimits limits_;
  int64_t hidden_size_ = 0;
  TeacherOf teacher_;              // of a stream that is distilled
  kernels::ClassList class_list_;  // the head's
  int64_t valid_rows_ = 0;
  int64_t unlisted_rows_ = 0;
  std::vector<float> grad_scales_ = {1.0f};  // of each depth; one of a microbatch that is not divided
  bool is_backward_ = false;
  std::vector<RetainedRows> retained_;  // by first row
  RowGradients gradients_;
  SoftDigest digest_;
};

// Bytes of some rows as a slice brings them: with the hidden states of a teacher.
inline int64_t SliceBytes(const StreamRows& stream, int64_t rows) {
  const auto element = static_cast<int64_t>(kernels::SizeOf(stream.spec().hidden_dtype));
  return stream.RowBytes(rows) + rows * stream.teacher().hidden_size * element;
}

// Whether slices bring values of their rows: hidden states, or the gradients of an embedding. Those of a
// backward are retained, and rows of an embedding go out only. As is_backward(), without a lock.
inline bool BringsRows(const StreamRows& rows) {
  return !rows.is_backward() && rows.spec().options.embedding != kernels::Embedding::kRows;
}

// ---- The backward pass of deferred microbatches ----
// What a caller asked for becomes a stream over rows that the engine holds. The functions are thread-safe.

// INVALID_ARGUMENT naming the field that is wrong whatever is retained.
absl::Status CheckBackward(const BackwardSpec& spec);

// The stream that computes the rows again, and where its hidden states are.
struct BackwardRows {
  StreamSpec stream;
  std::vector<RetainedRows> retained;  // by first row
};
// `kept` has the rows of `spec`.
BackwardRows RowsOf(const BackwardSpec& spec, const DeferredMicrobatches::Microbatch& kept);

// The bookkeeping of one open stream: which rows were sent, what is outstanding, the sums so far, and when
// the stream is over.
class StreamState : public StreamRows {
 public:
  StreamState(StreamRows rows, std::shared_ptr<StreamObserver> observer);
  // As StreamRows::Create.
  static absl::StatusOr<std::shared_ptr<StreamState>> Create(StreamSpec spec,
                                                             const kernels::HeadConfig& config,
                                                             HeadState state, SliceLimits limits,
                                                             std::shared_ptr<StreamObserver> observer,
                                                             TeacherOf teacher = {});

  StreamObserver& observer() { return *observer_; }

  // Checks a slice and marks its rows as sent. `bytes`, `in_place` as in CheckSlice. INVALID_ARGUMENT; then
  // nothing has changed.
  absl::Status AddSlice(RowRange rows, int64_t bytes, bool in_place = false);
  // A slice that was added has been received and queued.
  void OnQueued();
  // A slice of this stream left the device.
  void FinishSlice(RowRange rows, const kernels::LossSums& sums, int64_t accumulated, int64_t repeated,
                   double queue_seconds, double compute_seconds);
  // INVALID_ARGUMENT naming the first missing row if valid rows were not sent.
  absl::Status HalfClose();
  // Remembers the first failure.
  void Fail(absl::Status status);

  void Start() { started_ = true; }
  // Its rows were admitted, for so much memory.
  void SetAdmitted(int64_t host_bytes) { host_bytes_ = host_bytes; }
  int64_t host_bytes() const { return host_bytes_; }
  void AddOutstanding(int64_t slices) { outstanding_ += slices; }
  // The request to the staging pool of the last slice that had to wait there; 0: there was none.
  void SetMemoryTicket(uint64_t ticket) { memory_ticket_ = ticket; }
  uint64_t memory_ticket() const { return memory_ticket_; }
  bool failed() const { return !status_.ok(); }
  bool finished() const { return finished_; }
  // True if OnFinished is due: started, nothing outstanding, and failed or completely received.
  bool ReadyToFinish() const;
  void MarkFinished() { finished_ = true; }
  const absl::Status& status() const { return status_; }
  const StreamSummary& summary() const { return summary_; }

 private:
  absl::Status CheckNew(RowRange rows, int64_t bytes, bool in_place) const;
  size_t Index(int64_t row) const { return static_cast<size_t>(row - spec().rows.begin); }

  const std::shared_ptr<StreamObserver> observer_;
  std::vector<uint8_t> sent_;  // per row of the range
  int64_t sent_end_ = 0;       // end of the last slice
  int64_t unsent_rows_ = 0;
  int64_t unsent_valid_rows_ = 0;
  int64_t receiving_ = 0;    // slices added and not yet queued
  int64_t outstanding_ = 0;  // slices queued or on the device
  uint64_t memory_ticket_ = 0;
  int64_t host_bytes_ = 0;
  bool started_ = false;
  bool half_closed_ = false;
  bool finished_ = false;
  absl::Status status_;
  StreamSummary summary_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_STREAM_STATE_H_
