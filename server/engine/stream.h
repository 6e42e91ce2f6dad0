// SPDX-License-Identifier: Apache-2.0
// The types that a caller and the engine exchange. A stream carries one contiguous row range of one
// microbatch. A caller opens it with a StreamSpec or BackwardSpec, hands over IncomingSlices, and gets
// SliceOutputs and a StreamSummary through its StreamObserver. The file also has the snapshots of heads and
// engine (HeadSnapshot, EngineStats), the request that closes a step (StepRequest), and the versions of a
// head that a call is bound to (HeadVersions, Binding). The class Stream itself is in head_session.h.
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

// A half-open range of rows, of a microbatch or of a tensor.
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  // Whether this is a valid range (it may be empty) that lies in `outer`.
  bool IsWithin(RowRange outer) const { return begin >= outer.begin && begin <= end && end <= outer.end; }
  friend bool operator==(const RowRange&, const RowRange&) = default;
};

enum class Reduction : uint8_t { kSum, kMean, kNone };

// Which results a stream wants for each of its rows.
struct RowWants {
  bool loss = false;
  bool lse = false;
  bool entropy = false;
  bool logprob = false;
  bool argmax = false;
  int32_t class_count = 0;  // log-probabilities of this many named classes
  int32_t top_k = 0;        // this many most probable classes

  // Adds what `other` wants.
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

// The inputs of LossOptions::objective for each row. Each is empty or has one finite number for each row.
struct ObjectiveRows {
  std::vector<float> advantages;
  std::vector<float> old_logprobs;
  std::vector<float> ref_logprobs;
};

// Soft targets (kernels/soft_targets.h): `count` classes with weights for each row.
struct SoftTargets {
  int32_t count = 0;             // 0: there are none
  std::vector<int32_t> classes;  // [rows, count]
  std::vector<float> weights;    // [rows, count]
};

// A run of rows of a microbatch with its own weight and normalizer; as lossd.v1.Depth.
struct Depth {
  int64_t rows = 0;
  float weight = 1.0f;
  std::optional<double> normalizer;  // only with kMean; the protocol says when it may be absent
};
inline constexpr int64_t kMostDepths = 64;  // the most depths of a microbatch

// Opens a stream. Fields have the names of lossd.v1.OpenMicrobatch, and errors use these names.
struct StreamSpec {
  std::string head;
  std::string peer;                    // the peer whose share of memory pays; "": no limit by share
  std::optional<uint64_t> step;        // must be the open step; required with accumulate_gradients
  std::optional<uint64_t> generation;  // the HeadState::generation expected; ABORTED for another
  std::string run;                     // name of the training program's run, for messages
  std::string identity;                // the client's authenticated identity; "": not asked for
  uint64_t microbatch_id = 0;
  int64_t microbatch_rows = 0;  // N of the whole microbatch
  RowRange rows;                // rows that this stream carries
  uint64_t hidden_size = 0;     // the head's, as the caller knows it; 0: not checked
  kernels::DType hidden_dtype = kernels::DType::kBFloat16;
  kernels::LossOptions options;    // the maker of the spec has passed them to kernels::Validate
  std::string teacher;             // name of the teacher's head, with options.distillation
  bool gradients_of_head = false;  // options.gradients is set from the head's config
  int32_t ignore_index = -100;
  bool refuse_unlisted = false;  // if the head has a class list: refuse targets that are not in it
  // If true, targets are numbers of the head's own classes and are not mapped by its class list. Set for
  // retained targets, which have been mapped before.
  bool classes_of_head = false;
  Reduction reduction = Reduction::kSum;
  std::optional<double> normalizer;  // only with kMean; the protocol says when it may be absent
  float grad_output = 1.0f;
  bool want_grad_hidden = false;  // with embedding kRows: want the rows
  bool accumulate_gradients = false;
  // Only with reduction kNone: retain the hidden states for Engine::OpenBackward.
  bool retain = false;
  RowWants want_rows;
  std::vector<int32_t> targets;    // [rows.size()], raw: a class or ignore_index
  std::vector<float> row_weights;  // empty or [rows.size()]
  SoftTargets soft;                // target_count, target_classes, target_weights; only with options.rest
  ObjectiveRows numbers;           // advantages, old_logprobs, ref_logprobs; if options.objective needs them
  std::vector<Depth> depths;       // of the whole microbatch, in order of rows; empty: not divided
  // Classes whose log-probabilities are wanted: [want_rows.class_count], the same for all rows, or
  // [rows.size(), want_rows.class_count].
  std::vector<int32_t> classes;
  bool shared_classes() const { return static_cast<int64_t>(classes.size()) == want_rows.class_count; }
};

// Opens a stream that computes gradients of rows of a retained microbatch. Fields have the names of
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
  std::optional<kernels::DType> hidden_dtype;  // must be the dtype of the retained rows; absent: not checked
  bool want_grad_hidden = false;
  bool accumulate_gradients = false;
  std::vector<float> grad_loss;     // [rows.size()]: dL/d(row loss)
  std::vector<float> grad_lse;      // empty (0) or [rows.size()]: dL/dlse
  std::vector<float> grad_entropy;  // empty (0) or [rows.size()]: dL/dentropy
};

// The most bytes that a slice may have of results of single classes. A row has 4 bytes for each named class
// and 9 for each top class.
inline constexpr int64_t kMostClassResultBytes = int64_t{512} << 10;

// Limits on one slice of a head.
struct SliceLimits {
  int64_t max_rows = 0;
  int64_t max_bytes = 0;
  int64_t max_bytes_in_place = 0;  // of a slice that is in staging memory already (IncomingSlice::in_place)
  // For streams that accumulate in deterministic mode: slices must come in ascending order, and no slice may
  // hold rows on both sides of a multiple of row_grid. 0: no such rule.
  int64_t row_grid = 0;

  bool has_grid() const { return row_grid > 0; }
  // The first multiple of row_grid that is greater than `row`; without a grid the largest number.
  int64_t NextGridRow(int64_t row) const {
    return has_grid() ? (row / row_grid + 1) * row_grid : std::numeric_limits<int64_t>::max();
  }
};

// Upstream gradients of the rows of a backward stream; as in BackwardSpec.
struct RowGradients {
  std::vector<float> loss, lse, entropy;
};

// A slice that a caller hands to Stream::Receive. The engine calls both functions without its lock.
struct IncomingSlice {
  RowRange rows;
  int64_t bytes = 0;  // of the hidden states
  // Set if the hidden states are in staging memory of the backend already (kernels::Backend::AdoptStaging).
  // The slice is then computed there, in place, if its schedule can do so.
  StagingBuffer in_place;
  // Writes the hidden states to `to`, which has `bytes` bytes: [rows, D] in the stream's dtype, then those
  // for the teacher, if the stream has one. Does nothing if the hidden states are at `to` already. Called
  // once, unless the stream ends first: by Receive, or by the function that StreamObserver::OnMemory gets.
  // Null for retained rows.
  // With embedding kRows slices bring no values: `copy` writes nothing, and `bytes` is 0 unless the slice is
  // in place; it is then the size of the rows that will be written there.
  absl::AnyInvocable<void(uint8_t* to)> copy;
  // Says that the slice is queued, and that the next one may be received. `staging_bytes`: the size of the
  // slice's memory. Called after `copy` on the same thread; destroyed without a call if the stream ends
  // first.
  absl::AnyInvocable<void(int64_t staging_bytes)> on_queued;
};

// The step and versions of a head, which every answer carries; as lossd.v1.HeadState.
struct HeadState {
  uint64_t incarnation = 0;
  uint64_t step = 0;
  uint64_t generation = 0;
  uint64_t weights_version = 0;
  uint64_t creation = 0;
  friend bool operator==(const HeadState&, const HeadState&) = default;
};

// The client that asks to release a microbatch, which may belong to another client.
struct Asker {
  std::string identity;  // as in StreamSpec
  std::string run;       // as in StreamSpec
  bool may_all = false;  // may release any microbatch: an admin, on a server that asks for identities
};

// The result of Engine::Release.
struct ReleaseResult {
  HeadState state;
  bool released = false;  // false: there was no such microbatch
};

// The results of one slice.
struct SliceOutput {
  RowRange rows;
  // dL/dx, [rows, D] in hidden_dtype, at the front of the buffer, if wanted; else an empty buffer.
  StagingBuffer grad_hidden;
  int64_t grad_bytes = 0;
  int64_t staging_bytes = 0;  // as in IncomingSlice::on_queued
  // [rows] if wanted, else empty.
  std::vector<float> loss, lse, entropy, logprob;
  std::vector<int32_t> argmax;
  // [rows, class_count] and [rows, top_k], if wanted.
  std::vector<float> class_logprobs, top_logprobs;
  std::vector<int32_t> top_classes;
  double queue_seconds = 0.0;    // from when the slice was queued until its chunk was formed
  double compute_seconds = 0.0;  // from then until the chunk had results
};

// Sums and counts of a stream's rows in one depth; as lossd.v1.DepthSummary.
struct DepthSummary {
  kernels::LossSums sums;
  int64_t accumulated_rows = 0;
  int64_t repeated_rows = 0;
  double normalizer = 1.0;
};

// Sums and counts of a stream's rows, and times; as lossd.v1.MicrobatchSummary.
struct StreamSummary {
  HeadState state;
  kernels::LossSums sums;  // over the rows of the stream
  int64_t accumulated_rows = 0;
  int64_t repeated_rows = 0;
  double normalizer = 1.0;
  double queue_seconds = 0.0;
  double compute_seconds = 0.0;
  std::vector<DepthSummary> depths;  // one for each of StreamSpec::depths
  int64_t unlisted_rows = 0;         // rows ignored because their target is not in the head's class list
};

// Receives the results of a stream. Called on the engine's threads and on threads that give memory back;
// OnSlice and OnFinished of a stream are called one at a time and without a lock, so they may call functions
// of the engine that do not block, such as Stream::Receive. An observer must not block.
class StreamObserver {
 public:
  virtual ~StreamObserver() = default;
  // There is memory for a slice that waited for it. `receive` copies and queues the slice. Run it soon, on a
  // thread that may spend the time of a copy, or destroy it; in either case before the engine is destroyed.
  virtual void OnMemory(absl::AnyInvocable<void()> receive) = 0;
  // The results of one slice. Slices come in order of completion.
  virtual void OnSlice(SliceOutput output) = 0;
  // The last call, which comes exactly once. OK, with the summary, when every valid row of the range is
  // computed and settled in the ledger; its weight gradient may still be under way. Otherwise `status` is the
  // error that ended the stream. None of the stream's memory is in use anymore.
  virtual void OnFinished(absl::Status status, const StreamSummary& summary) = 0;
};

// ---- Snapshots: what an engine says of itself and its heads at one moment ----

// A device's part of a head whose classes are divided. `rows` and the times count all heads of the device
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
  SliceLimits limits;  // of streams that accumulate; of all streams if the head is frozen
  int64_t chunk_rows = 0;
  kernels::MemoryBytes memory;
  std::vector<kernels::Choice> choices;             // HeadKernels::Describe
  std::vector<kernels::Choice> last_chunk_choices;  // Chunk::choices; empty before the first chunk
  // Predicted error of the last chunk with sampled gradients.
  double gradient_error = 0.0;
  std::vector<HeadDevice> devices;             // empty unless the classes are divided over devices
  std::optional<kernels::PagingStats> paging;  // only if the head lives in host memory
  int64_t open_streams = 0;
  int64_t queued_slices = 0;
  uint64_t updates = 0;  // head::Progress
  int64_t step_microbatches = 0;
  int64_t step_contributions = 0;
  int64_t retained_microbatches = 0;
  // Deterministic mode: how many slices wait, without memory, for their turn, and what they wait for, e.g.
  // "microbatch 3, rows [0, 128)"; empty if no slice waits.
  int64_t waiting_slices = 0;
  std::string waits_for;
  int64_t step_rows = 0;   // valid rows accumulated in the open step
  int64_t total_rows = 0;  // rows computed since the head was created
  // OK, or why values and moments may be neither used nor saved: they may be half-written, or they are being
  // written.
  absl::Status tensors_status;
  // The step before the open one, if this engine applied it or BeginLoad said how it was applied.
  std::optional<head::AppliedStep> last_step;
  head::History history;
  std::string open_run;  // the run that sent the first rows of the open step
  uint64_t origin = 0;   // StepHistory::origin; for TensorReader::NoteSaved
};

// Counters of an engine at one moment, summed over its heads.
struct EngineStats {
  int64_t open_streams = 0;
  int64_t queued_slices = 0;
  int64_t waiting_slices = 0;  // deterministic mode: slices that wait for their turn
  int64_t queued_rows = 0;
  int64_t staging_bytes = 0;
  int64_t staging_used_bytes = 0;
  int64_t staging_peak_bytes = 0;  // the most that was ever used at once
  int64_t area_buffers_lent = 0;   // EngineContext::area_buffers_lent
  int64_t heads = 0;
  int64_t ledger_rows = 0;
  int64_t ledger_bytes = 0;
  int64_t row_bytes = 0;       // EngineOptions::ledger_bytes
  int64_t row_bytes_used = 0;  // used of row_bytes: ledger_bytes and the memory of open streams
  int64_t retained_microbatches = 0;
  int64_t retained_bytes_used = 0;
  // For how long in all, since the start, the device thread has worked or a chunk has been on the device.
  absl::Duration device_busy;
};

// ---- Closing a step: requests and results ----

// The step to close and what must be in it; as lossd.v1.ApplyStepRequest.
struct StepRequest {
  uint64_t step = 0;
  kernels::OptimizerOptions optimizer;          // validated by its maker, as StreamSpec::options
  std::vector<uint64_t> expected_microbatches;  // also contributions; the engine sorts them
  std::optional<int64_t> expected_rows;
  bool skip_non_finite = false;
  std::optional<uint64_t> incarnation;  // the engine that accumulated the step's rows
  std::optional<uint64_t> generation;   // the HeadState::generation of the rows
  bool begin_optimizer = false;         // zero the moments and the count of updates first
  std::string run;                      // the run that closes the step, for messages
};

// What a reset restores to the state in which the head was created.
enum class ResetScope : uint8_t {
  kOptimizer,  // moments and the count of updates
  kAll,        // also values and step
};

struct GradNormResult {
  HeadState state;
  double grad_norm = 0.0;
};

struct StepResult {
  HeadState state;  // the step now open
  double grad_norm = 0.0;
  int64_t microbatches = 0;  // that are part of the step
  int64_t rows = 0;
  int64_t contributions = 0;  // that are part of the step
  bool skipped = false;
  bool repeated = false;
  uint64_t applied_incarnation = 0;  // of the engine that applied the step
};

// ---- Versions of a head ----

// Draws the version numbers of all heads of an engine. So no number is used twice within an incarnation, even
// if a head is deleted and created again. The engine's lock guards it.
class VersionCounter {
 public:
  uint64_t Next() { return ++last_; }  // never 0

 private:
  uint64_t last_ = 0;
};

// The versions that a call under way, or a deferred microbatch, is bound to. It ends when one of them
// changes. A version that is absent may change.
struct Binding {
  std::optional<uint64_t> step;
  std::optional<uint64_t> generation;
  std::optional<uint64_t> weights;
  std::optional<uint64_t> moments;
  std::optional<uint64_t> accumulation;
};

// The kind of tensor that a write replaces rows of.
enum class Written : uint8_t { kValue, kMoment };

// The version numbers of one head, and which kinds of its tensors are being written. docs/consistency.md has
// the rules. A call follows them by keeping a Binding and asking Check.
//
// Plain state; the engine's lock guards it.
class HeadVersions {
 public:
  // Starts with step 0 of a new head. The counter outlives this object.
  explicit HeadVersions(VersionCounter* counter);

  uint64_t creation() const { return creation_; }  // of the head itself; never changes
  uint64_t step() const { return step_; }
  uint64_t generation() const { return generation_; }  // of the gradients; new when they are zeroed
  uint64_t weights() const { return weights_; }        // of the values of all parameters
  uint64_t moments() const { return moments_; }  // of the optimizer's state; updates change only weights()
  uint64_t accumulation() const { return accumulation_; }  // of the values of the gradients

  // ABORTED if a version in `binding` is not the head's present one; the message says what has changed.
  absl::Status Check(const Binding& binding) const;

  // ---- Changes. `why` is the text that Check gives for them, e.g. "the gradients were zeroed". ----
  void SetStep(uint64_t step, absl::string_view why);
  void NewGeneration(absl::string_view why);
  void NewWeights(absl::string_view why);
  void NewMoments(absl::string_view why);
  void NewAccumulation() { accumulation_ = counter_->Next(); }

  // ---- Writes: from the first row to the last, the tensor has no valid version ----
  // Begins a write of some rows, which makes a new version. Returns a token.
  uint64_t BeginWrite(Written what);
  // False if the write has ended, by EndWrite or EndWrites.
  bool IsWriting(uint64_t token) const { return writes_.contains(token); }
  // Ends the write. If it took `several` operations, its result is one more new version. Does nothing if the
  // write has ended.
  void EndWrite(uint64_t token, bool several);
  // Ends all writes, because the tensors are replaced as a whole.
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
  // The `why` of the last changes.
  std::string step_change_, generation_change_, weights_change_, moments_change_;
  std::map<uint64_t, Written> writes_;  // by token
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_STREAM_H_
