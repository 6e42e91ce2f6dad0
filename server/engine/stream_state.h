// SPDX-License-Identifier: Apache-2.0
// The engine's record of a stream. StreamRows has the contents of its rows; StreamState adds its progress.
// DeferredMicrobatches keeps the rows that streams retained for a later backward pass, and RowsOf makes the
// spec of the stream that computes that backward pass.
//
// Plain state; the engine's lock guards it unless a type says otherwise.
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

// Rows that are retained, or will be, and the terms that all rows of their microbatch have to agree on.
struct RetainedTerms {
  const MicrobatchTerms& terms;
  RowRange rows;
};
// Checks whether `other` may be retained beside `kept`. FAILED_PRECONDITION if the terms differ,
// ALREADY_EXISTS if the rows overlap without being the same. `how`: the state of `kept`, for the message,
// e.g. "retained".
absl::Status CheckRetained(uint64_t id, const RetainedTerms& kept, const RetainedTerms& other,
                           absl::string_view how);

// The deferred microbatches of one head: rows whose losses were computed without gradients (reduction none)
// and whose hidden states are kept until Backward brings the gradient of each row's loss.
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
    // The client that retained the part: StreamSpec::identity and StreamSpec::run.
    std::string identity;
    std::string run;
  };
  struct Microbatch {
    MicrobatchTerms terms;
    Binding binding;                // the versions with which its losses were computed
    std::map<int64_t, Part> parts;  // by first row
    absl::Time last_used;
  };

  // Checks whether a stream may retain these rows. FAILED_PRECONDITION if the id is kept with other terms.
  // ALREADY_EXISTS if a part overlaps `rows` without being the same range. PERMISSION_DENIED if the part with
  // the same range belongs to another identity.
  absl::Status CheckAdd(uint64_t id, const MicrobatchTerms& terms, RowRange rows,
                        absl::string_view identity) const;
  // Keeps a part that CheckAdd allowed, unless it has no rows. Replaces a part with the same rows.
  void Add(uint64_t id, const MicrobatchTerms& terms, const Binding& binding, Part part, absl::Time now);

  // Finds a microbatch whose parts cover `rows`, and marks it as used `now`. NOT_FOUND names the first row
  // that is not retained.
  absl::StatusOr<const Microbatch*> Find(uint64_t id, RowRange rows, absl::Time now);

  // Releases a microbatch; true if there was one. On a server that asks for identities, it belongs to the
  // identities that retained rows of it, else to their runs. PERMISSION_DENIED for another identity,
  // FAILED_PRECONDITION for another run.
  absl::StatusOr<bool> Release(uint64_t id, const Asker& asker);
  // Releases the microbatches for whose binding `past` is true.
  void ReleaseIf(absl::FunctionRef<bool(const Binding&)> past);
  // Releases the microbatches that were last used before `limit`; returns their number.
  int64_t Expire(absl::Time limit);

  int64_t size() const { return static_cast<int64_t>(microbatches_.size()); }

 private:
  std::map<uint64_t, Microbatch> microbatches_;
};

// INVALID_ARGUMENT unless `values` has one finite value for each row, or is empty and `optional`.
absl::Status CheckRowValues(absl::string_view field, absl::Span<const float> values, int64_t rows,
                            bool optional);

// The contents of a stream's rows: the checked spec, with the values resolved that it leaves open, and the
// place of rows that are retained. Fixed once the stream is open; StreamState has the progress.
//
// Thread-compatible. Members that are not const are called before the first slice or at the stream's end.
class StreamRows {
 public:
  // Makes every check of the spec that does not depend on the ledger, maps ignored targets to
  // kernels::kIgnoredTarget and resolves the normalizer. INVALID_ARGUMENT names the field of
  // lossd.v1.OpenMicrobatch. FAILED_PRECONDITION for accumulation on a frozen head.
  static absl::StatusOr<StreamRows> Create(StreamSpec spec, const kernels::HeadConfig& config,
                                           HeadState state, SliceLimits limits, TeacherOf teacher = {});

  // Sets where the rows are in retained memory, for a stream that retains rows or computes retained ones.
  // `gradients` are set for the latter. Call once, before the first slice.
  void SetRetained(std::vector<RetainedRows> retained, RowGradients gradients);

  const StreamSpec& spec() const { return spec_; }
  const MicrobatchTerms& terms() const { return terms_; }
  HeadState head_state() const { return head_state_; }
  SliceLimits limits() const { return limits_; }
  int64_t hidden_size() const { return hidden_size_; }
  const TeacherOf& teacher() const { return teacher_; }
  // g, the factor of every gradient of the row: grad_output / normalizer. With depths it is grad_output *
  // weight / normalizer, with weight and normalizer of the row's depth.
  float grad_scale(int64_t row) const { return grad_scales_[terms_.DepthOf(row)]; }
  // The targets of some rows of this stream, [rows.size()].
  const int32_t* targets(RowRange rows) const {
    return spec_.targets.data() + (rows.begin - spec_.rows.begin);
  }
  // Sets the slice's pointers to what came with the rows: targets, weights, upstream gradients, inputs of the
  // objective, soft targets, and the classes whose log-probabilities are wanted.
  void PutValues(RowRange rows, kernels::Slice& slice) const;
  // The contents that the ledger keeps of the rows; if rows are sent again, they must have the same. Call
  // after SetRetained.
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

  // The offset in bytes of some rows of one slice in retained memory; -1 if they are not retained.
  int64_t RetainedOffset(RowRange rows) const;
  // The slices of a stream that computes retained rows, in ascending order. Each obeys the limits and lies in
  // one piece of retained memory.
  std::vector<RowRange> RetainedSlices() const;
  // Host memory, in bytes, of the contents of the rows.
  int64_t HostBytes() const;
  // Moves the contents out, so that the caller can destroy them, which may take long, without the lock.
  // Called at the end of the stream, after TakePart.
  RowValues TakeValues();
  // Moves out the part that a stream with StreamSpec::retain leaves behind. Call once, at its end.
  DeferredMicrobatches::Part TakePart();
  // Whether the stream computes retained rows. Does not change after SetRetained, so it may be read without a
  // lock.
  bool is_backward() const { return is_backward_; }
  // The versions that the stream is bound to from its opening to its end: the weights; the step, if it names
  // one; and the generation of the gradients, if it accumulates, retains rows or uses retained rows.
  Binding binding() const;
  // Bytes of the hidden states of this many rows.
  int64_t RowBytes(int64_t rows) const;
  // Bytes of retained memory to reserve for the rows: for their hidden states, plus the size of their soft
  // targets. The soft targets stay in ordinary host memory; reserving their size here bounds that memory,
  // too.
  int64_t RetainedBytes() const;

  int64_t valid_rows() const { return valid_rows_; }        // rows with a target
  int64_t unlisted_rows() const { return unlisted_rows_; }  // StreamSummary::unlisted_rows
  // Replaces numbers of the head's classes by their numbers in the full vocabulary, if the head has a class
  // list.
  void NumberClasses(std::vector<int32_t>& classes) const;
  bool HasTarget(int64_t row) const { return *targets({row, row + 1}) != kernels::kIgnoredTarget; }

  // Makes the checks of a slice that do not depend on the slices before it; INVALID_ARGUMENT. `bytes` and
  // `in_place` as in IncomingSlice.
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
  TeacherOf teacher_;              // empty unless the stream is distilled
  kernels::ClassList class_list_;  // the head's
  int64_t valid_rows_ = 0;
  int64_t unlisted_rows_ = 0;
  std::vector<float> grad_scales_ = {1.0f};  // one for each depth; one in all without depths
  bool is_backward_ = false;
  std::vector<RetainedRows> retained_;  // by first row
  RowGradients gradients_;
  SoftDigest digest_;
};

// Bytes of some rows as a slice brings them: hidden states for the head and, if there is one, for the
// teacher.
inline int64_t SliceBytes(const StreamRows& stream, int64_t rows) {
  const auto element = static_cast<int64_t>(kernels::SizeOf(stream.spec().hidden_dtype));
  return stream.RowBytes(rows) + rows * stream.teacher().hidden_size * element;
}

// Whether slices bring values of their rows: hidden states, or gradients of embedding rows. Slices of a
// backward stream do not, because their rows are retained; with embedding kRows nothing comes in, either. May
// be called without a lock, as is_backward().
inline bool BringsRows(const StreamRows& rows) {
  return !rows.is_backward() && rows.spec().options.embedding != kernels::Embedding::kRows;
}

// ---- The backward pass of deferred microbatches ----
// These functions turn a BackwardSpec into a stream over rows that the engine retains. They are thread-safe.

// Makes the checks that do not depend on what is retained. INVALID_ARGUMENT names the field.
absl::Status CheckBackward(const BackwardSpec& spec);

// The spec of the stream that computes the rows again, and where its hidden states are.
struct BackwardRows {
  StreamSpec stream;
  std::vector<RetainedRows> retained;  // by first row
};
// `kept` covers the rows of `spec`.
BackwardRows RowsOf(const BackwardSpec& spec, const DeferredMicrobatches::Microbatch& kept);

// The progress of one open stream: which rows were sent, how many slices are outstanding, the sums so far,
// and when the stream is over.
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

  // Checks a slice and marks its rows as sent. `bytes`, `in_place` as in CheckSlice. INVALID_ARGUMENT; after
  // an error nothing has changed.
  absl::Status AddSlice(RowRange rows, int64_t bytes, bool in_place = false);
  // An added slice has been received and queued.
  void OnQueued();
  // Adds the sums and counts of a slice whose results are final.
  void FinishSlice(RowRange rows, const kernels::LossSums& sums, int64_t accumulated, int64_t repeated,
                   double queue_seconds, double compute_seconds);
  // No more slices will come. INVALID_ARGUMENT names the first missing row if valid rows were not sent.
  absl::Status HalfClose();
  // Records a failure; only the first one counts.
  void Fail(absl::Status status);

  void Start() { started_ = true; }
  // The stream was admitted, and pays for `host_bytes`.
  void SetAdmitted(int64_t host_bytes) { host_bytes_ = host_bytes; }
  int64_t host_bytes() const { return host_bytes_; }
  void AddOutstanding(int64_t slices) { outstanding_ += slices; }
  // The staging pool's ticket of the last slice that had to wait for memory; 0: no slice had to wait.
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
  std::vector<uint8_t> sent_;  // [rows], 1: the row was sent
  int64_t sent_end_ = 0;       // end of the last slice
  int64_t unsent_rows_ = 0;
  int64_t unsent_valid_rows_ = 0;
  int64_t receiving_ = 0;    // slices that were added and are not queued yet
  int64_t outstanding_ = 0;  // slices that are queued or on the device
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
