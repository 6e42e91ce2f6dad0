// SPDX-License-Identifier: Apache-2.0
// The types that a caller and the engine exchange. A stream carries one contiguous row range of one
// microbatch: here is what a caller hands over to have its rows computed (StreamSpec, BackwardSpec,
// IncomingSlice), what it gets back (SliceOutput, StreamSummary, StreamObserver), and the stream itself
// (Stream). Here are also what an engine says of itself and its heads (HeadSnapshot, EngineStats), the
// request that closes a step (StepRequest), and the versions of a head that a call may rest on (HeadVersions,
// Binding).
//
// server/messages turns protocol messages into these types; tests use them directly. Specs, snapshots and
// requests are plain data.
#ifndef LOSSD_SERVER_ENGINE_STREAM_H_
#define LOSSD_SERVER_ENGINE_STREAM_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/head_config.h"
#include "server/engine/staging.h"
#include "server/head/head.h"
#include "server/head/manifest.h"

namespace lossd::engine {

// Half-open range of rows of a microbatch.
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  // Whether this is a range, which may be empty, of rows of `outer`.
  bool IsWithin(RowRange outer) const { return begin >= outer.begin && begin <= end && end <= outer.end; }
  friend bool operator==(const RowRange&, const RowRange&) = default;
};

enum class Reduction : uint8_t { kSum, kMean, kNone };

struct RowWants {
  bool loss = false;
  bool lse = false;
  bool entropy = false;
  bool logprob = false;
  bool argmax = false;
  int32_t class_count = 0;  // of classes that the stream names
  int32_t top_k = 0;        // most probable classes

  // From now on what `other` wants, too.
  void Add(const RowWants& other) {
    loss |= other.loss;
    lse |= other.lse;
    entropy |= other.entropy;
    logprob |= other.logprob;
    argmax |= other.argmax;
    class_count = std::max(class_count, other.class_count);
    top_k = std::max(top_k, other.top_k);
  }
};

// What LossOptions::objective takes with each row; each is empty, or has one finite number a row.
struct ObjectiveRows {
  std::vector<float> advantages;
  std::vector<float> old_logprobs;
  std::vector<float> ref_logprobs;
};

// Soft targets (kernels/soft_targets.h), `count` for each row.
struct SoftTargets {
  int32_t count = 0;             // 0: there are none
  std::vector<int32_t> classes;  // [rows, count]
  std::vector<float> weights;    // [rows, count]
};

// A run of rows of a microbatch with its part in the loss; as lossd.v1.Depth.
struct Depth {
  int64_t rows = 0;
  float weight = 1.0f;
  std::optional<double> normalizer;  // kMean only; see the protocol for when it may be absent
};
inline constexpr int64_t kMostDepths = 64;  // of a microbatch

// Opens a stream. Field names equal those of lossd.v1.OpenMicrobatch, and errors name them so.
struct StreamSpec {
  std::string head;
  std::string peer;                    // who has the stream, for shares of memory; "": without a share
  std::optional<uint64_t> step;        // required with accumulate_gradients
  std::optional<uint64_t> generation;  // HeadState::generation that it is meant for; ABORTED for another
  std::string run;                     // of the program that trains, for people
  std::string identity;                // that was asked for; "": the server does not ask
  uint64_t microbatch_id = 0;
  int64_t microbatch_rows = 0;  // N of the whole microbatch
  RowRange rows;                // carried by this stream
  uint64_t hidden_size = 0;     // what the caller takes for the head's; 0: the caller does not say
  kernels::DType hidden_dtype = kernels::DType::kBFloat16;
  kernels::LossOptions options;    // kernels::Validate takes them: whoever makes the spec has asked it
  std::string teacher;             // the head of options.distillation
  bool gradients_of_head = false;  // options.gradients is to be as the head's config says
  int32_t ignore_index = -100;
  bool refuse_unlisted = false;  // of a head with a class list: targets that are not in it are refused
  bool classes_of_head =
      false;  // targets are counted as the head does, whatever its class list, as retained ones are
  Reduction reduction = Reduction::kSum;
  std::optional<double> normalizer;  // kMean only; see the protocol for when it may be absent
  float grad_output = 1.0f;
  bool want_grad_hidden = false;  // rows of an embedding: the rows
  bool accumulate_gradients = false;
  // Reduction kNone only: keep the hidden states for Engine::OpenBackward.
  bool retain = false;
  RowWants want_rows;
  std::vector<int32_t> targets;    // [rows.size()], raw: a class or ignore_index
  std::vector<float> row_weights;  // empty or [rows.size()]
  SoftTargets soft;                // target_count, target_classes and target_weights; with options.rest
  ObjectiveRows numbers;           // fields of lossd.v1.OpenMicrobatch: there if options.objective needs them
  std::vector<Depth> depths;       // of the whole microbatch, in order of rows; empty: it is not divided
  // Classes of which log-probabilities are wanted: [want_rows.class_count], the same for all rows, or
  // [rows.size(), want_rows.class_count].
  std::vector<int32_t> classes;
  bool shared_classes() const { return static_cast<int64_t>(classes.size()) == want_rows.class_count; }
};

// Opens the backward pass of rows of a retained microbatch. Field names equal those of
// lossd.v1.BackwardRequest.
struct BackwardSpec {
  std::string head;
  std::string peer;                    // as in StreamSpec
  std::optional<uint64_t> step;        // must be open; required with accumulate_gradients
  std::optional<uint64_t> generation;  // as in StreamSpec
  std::string run;                     // as in StreamSpec
  uint64_t microbatch_id = 0;
  RowRange rows;
  uint64_t hidden_size = 0;                    // as in StreamSpec
  std::optional<kernels::DType> hidden_dtype;  // that in which the rows were retained; nullopt: that, too
  bool want_grad_hidden = false;
  bool accumulate_gradients = false;
  std::vector<float> grad_loss;     // [rows.size()]: dL/d(row loss)
  std::vector<float> grad_lse;      // empty (0) or [rows.size()]: dL/dlse
  std::vector<float> grad_entropy;  // empty (0) or [rows.size()]: dL/dentropy
};

// What a slice may have of results of single classes, with 4 bytes a given class and 9 a top class.
inline constexpr int64_t kMostClassResultBytes = int64_t{512} << 10;

// Limits on one slice of a head.
struct SliceLimits {
  int64_t max_rows = 0;
  int64_t max_bytes = 0;
  int64_t max_bytes_in_place = 0;  // of one that lies in staging memory already (IncomingSlice::in_place)
  // Deterministic mode, streams that accumulate: slices come in ascending order, and none holds rows on both
  // sides of a multiple of this. 0: no such rule.
  int64_t row_grid = 0;

  bool has_grid() const { return row_grid > 0; }
  // The first multiple of the grid behind `row`; without a grid the largest number.
  int64_t NextGridRow(int64_t row) const {
    return has_grid() ? (row / row_grid + 1) * row_grid : std::numeric_limits<int64_t>::max();
  }
};

// Upstream gradients of the rows of a backward stream; see BackwardSpec.
struct RowGradients {
  std::vector<float> loss, lse, entropy;
};

// A slice that a caller hands to Stream::Receive. Neither function is called with a lock of the engine's
// held.
struct IncomingSlice {
  RowRange rows;
  int64_t bytes = 0;  // of the hidden states
  // Where the hidden states lie, if that is staging memory of the backend already
  // (kernels::Backend::AdoptStaging): the slice is then computed there, in place, if its schedule can do so.
  // Empty: nowhere.
  StagingBuffer in_place;
  // Of a stream of rows of an embedding, `bytes` is 0 and `copy` writes nothing, but for a slice in place,
  // where the rows will lie.
  // Writes the hidden states, [rows, D] in the stream's dtype and behind them the teacher's, if the stream
  // has one, to `to`, which has `bytes` bytes, or does nothing if `to` is where they lie. Called once, unless
  // the stream ends first: by Receive, or by what StreamObserver::OnMemory is given. Null for retained rows.
  absl::AnyInvocable<void(uint8_t* to)> copy;
  // The slice is queued, and the next one may be received. `staging_bytes` of its memory. Called after `copy`
  // on the same thread; destroyed without a call if the stream ends first.
  absl::AnyInvocable<void(int64_t staging_bytes)> on_queued;
};

// Identifies the head's state in every answer; as lossd.v1.HeadState.
struct HeadState {
  uint64_t incarnation = 0;
  uint64_t step = 0;
  uint64_t generation = 0;
  uint64_t weights_version = 0;
  uint64_t creation = 0;
  friend bool operator==(const HeadState&, const HeadState&) = default;
};

// Who asks for something that belongs to somebody.
struct Asker {
  std::string identity;  // as in StreamSpec
  std::string run;       // as in StreamSpec
  bool may_all = false;  // an admin, on a server that asks
};

// What became of the release of a deferred microbatch.
struct ReleaseResult {
  HeadState state;
  bool released = false;  // false: there was nothing to release
};

struct SliceOutput {
  RowRange rows;
  // dL/dx [rows, D] in hidden_dtype at the front of the buffer, if wanted; else an empty buffer.
  StagingBuffer grad_hidden;
  int64_t grad_bytes = 0;
  int64_t staging_bytes = 0;  // as IncomingSlice::on_queued had it
  // [rows] if wanted, else empty.
  std::vector<float> loss, lse, entropy, logprob;
  std::vector<int32_t> argmax;
  // [rows, class_count] and [rows, top_k] as wanted.
  std::vector<float> class_logprobs, top_logprobs;
  std::vector<int32_t> top_classes;
  double queue_seconds = 0.0;    // since it was queued until its chunk was formed
  double compute_seconds = 0.0;  // of its chunk, until results were ready
};

// What the rows of a stream in one depth have come to; see lossd.v1.DepthSummary.
struct DepthSummary {
  kernels::LossSums sums;
  int64_t accumulated_rows = 0;
  int64_t repeated_rows = 0;
  double normalizer = 1.0;
};

// What a stream has come to; see lossd.v1.MicrobatchSummary.
struct StreamSummary {
  HeadState state;
  kernels::LossSums sums;  // over the rows of the stream
  int64_t accumulated_rows = 0;
  int64_t repeated_rows = 0;
  double normalizer = 1.0;
  double queue_seconds = 0.0;
  double compute_seconds = 0.0;
  std::vector<DepthSummary> depths;  // one for each of StreamSpec::depths
  int64_t unlisted_rows = 0;         // ignored since their target is not in the head's class list
};

// Receives what a stream has to tell. Called on the engine's threads and those that give memory back, OnSlice
// and OnFinished one call at a time per stream; must not block and must not call back into the engine.
class StreamObserver {
 public:
  virtual ~StreamObserver() = default;
  // The memory that a slice has waited for is there. `receive` copies and queues the slice; it is to be run
  // soon, on a thread that may spend the time of a copy, or destroyed, before the engine is.
  virtual void OnMemory(absl::AnyInvocable<void()> receive) = 0;
  // The results of one slice, in order of completion.
  virtual void OnSlice(SliceOutput output) = 0;
  // The last call, exactly once: OK with the summary when every valid row of the range is computed and
  // booked (its weight gradient may be on its way), else why the stream ended. None of its memory is in use.
  virtual void OnFinished(absl::Status status, const StreamSummary& summary) = 0;
};

// ---- Snapshots: what an engine says of itself and its heads at one moment ----

// What a device has of a head whose classes are divided; times and rows are of all its heads
// (kernels::MemberState).
struct HeadDevice {
  std::string device;
  int32_t share = 0;
  int64_t classes = 0;
  int64_t rows = 0;
  absl::Duration busy;
  absl::Duration exchanging;
};

// A consistent view of one head.
struct HeadSnapshot {
  std::string name;
  kernels::HeadConfig config;
  kernels::DType compute_dtype = kernels::DType::kFloat32;
  HeadState state;
  SliceLimits limits;  // of its streams that accumulate; of all, if the head is frozen
  int64_t chunk_rows = 0;
  kernels::MemoryBytes memory;
  std::vector<kernels::Choice> choices;             // HeadKernels::Describe
  std::vector<kernels::Choice> last_chunk_choices;  // Chunk::choices; empty before the first chunk
  double gradient_error = 0.0;                      // predicted, of the last chunk with sampled gradients
  std::vector<HeadDevice> devices;                  // of a head whose classes several devices have
  std::optional<kernels::PagingStats> paging;       // of a head in host memory
  int64_t open_streams = 0;
  int64_t queued_slices = 0;
  uint64_t updates = 0;  // head::Progress
  int64_t step_microbatches = 0;
  int64_t step_contributions = 0;
  int64_t retained_microbatches = 0;
  // Deterministic mode: slices that wait for their turn outside the staging memory, and for what, e.g.
  // "microbatch 3, rows [0, 128)"; empty if no slice waits.
  int64_t waiting_slices = 0;
  std::string waits_for;
  int64_t step_rows = 0;   // valid rows accumulated in the open step
  int64_t total_rows = 0;  // computed since the head was added
  // OK, or why values and moments may be neither used nor kept: they may be half-written, or are being
  // written.
  absl::Status tensors_status;
  // The step before the open one, if this engine applied it or BeginLoad told how it was applied.
  std::optional<head::AppliedStep> last_step;
  head::History history;
  std::string open_run;  // that sent the first rows of the open step
  uint64_t origin = 0;   // StepHistory::origin, for TensorReader::NoteSaved
};

struct EngineStats {
  int64_t open_streams = 0;
  int64_t queued_slices = 0;
  int64_t waiting_slices = 0;  // deterministic mode: for their turn
  int64_t queued_rows = 0;
  int64_t staging_bytes = 0;
  int64_t staging_used_bytes = 0;
  int64_t staging_peak_bytes = 0;  // most that was used at once
  int64_t area_buffers_lent = 0;   // deterministic mode: to slices that are received, computed or sent
  int64_t heads = 0;
  int64_t ledger_rows = 0;
  int64_t ledger_bytes = 0;
  int64_t row_bytes = 0;       // EngineOptions::ledger_bytes
  int64_t row_bytes_used = 0;  // of them; ledger_bytes and what open streams have
  int64_t retained_microbatches = 0;
  int64_t retained_bytes_used = 0;
  // How long, since the start, the device thread has worked or a chunk has been on the device.
  absl::Duration device_busy;
};

// ---- Closing a step: what a caller asks for and what it is told ----

// Which step to close and what must be in it; see lossd.v1.ApplyStepRequest.
struct StepRequest {
  uint64_t step = 0;
  kernels::OptimizerOptions optimizer;          // kernels::Validate takes them, as StreamSpec::options
  std::vector<uint64_t> expected_microbatches;  // or contributions; inside the engine ascending, each once
  std::optional<int64_t> expected_rows;
  bool skip_non_finite = false;
  std::optional<uint64_t> incarnation;  // the engine that accumulated the step's rows
  std::optional<uint64_t> generation;   // HeadState::generation that they were accumulated in
  bool begin_optimizer = false;         // moments and the count of updates are 0 before the step
  std::string run;                      // that closes the step, for people
};

// What a reset of a head makes as it was when the head was created.
enum class ResetScope : uint8_t {
  kOptimizer,  // moments and the count of updates
  kAll,        // besides, values and step
};

struct GradNormResult {
  HeadState state;
  double grad_norm = 0.0;
};

struct StepResult {
  HeadState state;  // the step now open
  double grad_norm = 0.0;
  int64_t microbatches = 0;  // that are part of the sum
  int64_t rows = 0;
  int64_t contributions = 0;  // that are part of the sum
  bool skipped = false;
  bool repeated = false;
  uint64_t applied_incarnation = 0;  // of the engine that applied the step
};

// ---- Versions of a head ----

// Draws the numbers of versions, for all heads of an engine. So no number is used twice within an
// incarnation, even if a head is deleted and created again. The engine's lock guards it.
class VersionCounter {
 public:
  uint64_t Next() { return ++last_; }  // never 0

 private:
  uint64_t last_ = 0;
};

// The versions that a call under way rests on, or a deferred microbatch. What is absent may change.
struct Binding {
  std::optional<uint64_t> step;
  std::optional<uint64_t> generation;
  std::optional<uint64_t> weights;
  std::optional<uint64_t> moments;
  std::optional<uint64_t> accumulation;
};

// What a write replaces rows of.
enum class Written : uint8_t { kValue, kMoment };

// The numbers that name the versions of one head, and which of its tensors are being written.
// docs/consistency.md has the rules; a call that keeps a Binding and asks Check follows them.
//
// Plain state; the engine's lock guards it.
class HeadVersions {
 public:
  // Step 0 of a new head. The counter outlives this.
  explicit HeadVersions(VersionCounter* counter);

  uint64_t creation() const { return creation_; }  // of the head itself: it never changes
  uint64_t step() const { return step_; }
  uint64_t generation() const { return generation_; }  // of the gradients: since they were last zero
  uint64_t weights() const { return weights_; }        // of the values of all parameters
  uint64_t moments() const { return moments_; }  // of the optimizer's state, beside those of the weights
  uint64_t accumulation() const { return accumulation_; }  // of the gradients' values

  // ABORTED, saying what has changed, if the head has another version than one of those in `binding`.
  absl::Status Check(const Binding& binding) const;

  // ---- Changes. `why` is what Check says of them, e.g. "the gradients were zeroed". ----
  void SetStep(uint64_t step, absl::string_view why);
  void NewGeneration(absl::string_view why);
  void NewWeights(absl::string_view why);
  void NewMoments(absl::string_view why);
  void NewAccumulation() { accumulation_ = counter_->Next(); }

  // ---- Writes: from the first row to the last, the tensor is no version of anything ----
  // Begins a write of some rows, which is a change by itself. Returns a token.
  uint64_t BeginWrite(Written what);
  // False if the write has ended, by EndWrite or EndWrites.
  bool IsWriting(uint64_t token) const { return writes_.contains(token); }
  // What the write leaves is a version of its own, if it took `several` operations. Nothing if it has ended.
  void EndWrite(uint64_t token, bool several);
  // The tensors are replaced as a whole.
  void EndWrites() { writes_.clear(); }
  bool being_written() const { return !writes_.empty(); }
  bool values_being_written() const;

 private:
  void Change(Written what, absl::string_view why);

  VersionCounter* const counter_;
  const uint64_t creation_;
  uint64_t step_ = 0;
  uint64_t generation_;
  uint64_t weights_;
  uint64_t moments_;
  uint64_t accumulation_;
  std::string step_change_, generation_change_, weights_change_, moments_change_;  // the last ones
  std::map<uint64_t, Written> writes_;                                             // by token
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_STREAM_H_
