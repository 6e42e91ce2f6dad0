// The engine: takes rows with targets from any number of streams, fills chunks with rows of the same
// head and options wherever they come from, drives the device, and keeps the ledger that makes
// accumulation exactly-once. It knows nothing of gRPC, protobuf or metrics and runs with any
// kernels::Backend, so that tests drive it as a state machine.
//
// Threads. One thread of the engine's own (the device thread) is the only one that touches the backend
// and the heads. Every public member is thread-safe; those that say "blocks" wait for the device thread
// and must not be called from a StreamObserver.
//
// Order. Work on one head takes effect in the order of submission: an operation on a head sees all
// slices submitted before it, and heads take turns. On a deterministic engine rows are accumulated in an
// order of their own (sequencer.h), and an operation sees all groups that were complete before it.
//
// Memory. Slices live in staging buffers acquired by the caller, so the queue is bounded by the pool;
// operations on a head are bounded by max_queued_operations, slices that wait for their turn by one a stream.
#ifndef LOSSD_SERVER_ENGINE_ENGINE_H_
#define LOSSD_SERVER_ENGINE_ENGINE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "server/engine/contribution.h"
#include "server/engine/staging_pool.h"
#include "server/engine/stream.h"
#include "server/head/applied_step.h"
#include "server/head/head.h"
#include "server/head/progress.h"

namespace lossd::engine {

struct EngineOptions {
  int64_t slice_bytes = int64_t{4} << 20;      // the largest slice payload
  int64_t staging_bytes = int64_t{256} << 20;  // all slices in transit; at least two of the largest
  int64_t max_streams = 256;                   // open at once, over all heads
  int64_t max_heads = 64;
  int64_t max_queued_operations = 64;  // waiting for the device, per head
  // Remembered per head and step: so many rows of microbatches (5 to 21 bytes each), so many of contributions
  // (8).
  int64_t max_ledger_rows = int64_t{1} << 26;
  // Likewise microbatches, and contributions: some hundred bytes each even without rows.
  int64_t max_step_microbatches = int64_t{1} << 18;
  int64_t retained_bytes = 0;  // hidden states of deferred microbatches; 0: none are kept
  // Weight gradients are sums in an order of their own (server/engine/sequencer.h), so that the same
  // microbatches give the same bits whatever arrives first. Each trainable head takes up to staging_bytes
  // besides the pool.
  bool deterministic = false;
};

// Told about work as it happens, for metrics. Called on the engine's threads; must not block and must
// not call back into the engine.
class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  // algorithm: of its gradients, kExact or kFiltered (kernels::Chunk::algorithm).
  virtual void OnChunk(absl::string_view head, int64_t slices, int64_t rows, int64_t valid_rows,
                       kernels::Algorithm algorithm, double compute_seconds) {}
  // Probability that a chunk left out of its gradients, summed over its valid rows; called if it is not 0.
  virtual void OnDroppedMass(absl::string_view head, double mass) {}
  virtual void OnSlice(absl::string_view head, double queue_seconds) {}
  virtual void OnContribution(absl::string_view head, int64_t added_rows) {}
  virtual void OnStep(absl::string_view head, bool skipped) {}
  // A chunk was computed in another way than the one before it on this head.
  virtual void OnChoices(absl::string_view head, absl::Span<const kernels::Choice> choices) {}
  virtual void OnDeviceError(const absl::Status& status) {}
};

// A consistent view of one head.
struct HeadSnapshot {
  std::string name;
  kernels::HeadConfig config;
  kernels::DType compute_dtype = kernels::DType::kFloat32;
  HeadState state;
  SliceLimits limits;  // a slice obeys both
  int64_t chunk_rows = 0;
  kernels::MemoryBytes memory;
  std::vector<kernels::Choice> choices;             // HeadKernels::Describe
  std::vector<kernels::Choice> last_chunk_choices;  // Chunk::choices; empty before the first chunk
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
  int64_t step_rows = 0;          // valid rows accumulated in the open step
  int64_t total_rows = 0;         // computed since the head was added
  absl::Status weights_distrust;  // OK, or why nobody may use or keep the weights (DistrustWeights)
  // The step before the open one, if this engine applied it or ResetStep told how it was applied.
  std::optional<head::AppliedStep> last_step;
};

struct EngineStats {
  int64_t open_streams = 0;
  int64_t queued_slices = 0;
  int64_t waiting_slices = 0;  // deterministic mode: for their turn
  int64_t queued_rows = 0;
  int64_t staging_bytes = 0;
  int64_t staging_used_bytes = 0;
  int64_t staging_peak_bytes = 0;  // most that was used at once
  int64_t rooms_lent = 0;          // deterministic mode: to slices that are received, computed or sent
  int64_t heads = 0;
  int64_t ledger_rows = 0;
  int64_t ledger_bytes = 0;
  int64_t retained_microbatches = 0;
  int64_t retained_bytes_used = 0;
};

// Which step to close and what must be in it; see lossd.v1.ApplyStepRequest.
struct StepRequest {
  uint64_t step = 0;
  kernels::OptimizerOptions optimizer;
  std::vector<uint64_t> expected_microbatches;  // or contributions
  std::optional<int64_t> expected_rows;
  bool skip_non_finite = false;
  std::optional<uint64_t> incarnation;  // the engine that accumulated the step's rows
};

struct StepResult {
  HeadState state;  // the step now open
  double grad_norm = 0.0;
  int64_t microbatches = 0;  // that are part of the sum, likewise contributions
  int64_t rows = 0;
  int64_t contributions = 0;
  bool skipped = false;
  bool repeated = false;
  uint64_t applied_incarnation = 0;  // of the engine that applied the step
};

// An open stream. Thread-safe; destroying it cancels what is not finished (OnFinished still comes). Must
// be destroyed before the engine.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual HeadState state() const = 0;     // when it was opened
  virtual SliceLimits limits() const = 0;  // for this stream's dtype
  virtual int64_t hidden_size() const = 0;

  // Lets results flow; nothing reaches the observer before. Call once.
  virtual void Start() = 0;
  // Asks where to put the hidden states of the next slice, `bytes` of them, at most limits().max_bytes
  // (ignored for retained rows). One request at a time. Usually the answer is a buffer of the staging pool;
  // on a deterministic engine, for a stream that accumulates, it is room for just these rows, once it is
  // their turn, and a slice that breaks a rule fails the stream.
  virtual void RequestRoom(RowRange rows, int64_t bytes, RoomWaiter waiter) = 0;
  // Hands over one slice: hidden states [rows, D] at the front of `buffer`, `bytes` long. `buffer` comes from
  // RequestRoom for the same rows or, unless limits().row_grid is set, from the staging pool. A slice that
  // breaks a rule fails the stream through OnFinished.
  virtual void Submit(RowRange rows, StagingBuffer buffer, int64_t bytes) = 0;
  // Streams of OpenBackward: the slices to submit, and their submission. `buffer` receives dL/dx; it may be
  // empty if that is not wanted.
  virtual std::vector<RowRange> RetainedSlices() const = 0;
  virtual void SubmitRetained(RowRange rows, StagingBuffer buffer) = 0;
  // No more slices will come; fails the stream if valid rows are missing.
  virtual void HalfClose() = 0;
  // Fails the stream with `why` (not OK): queued slices are dropped, those on the device finish.
  virtual void Cancel(absl::Status why) = 0;
};

class Engine {
 public:
  // `backend` and `observer` (may be null) outlive the engine. Allocates the staging pool.
  // `incarnation` must not be 0.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const EngineOptions& options,
                                                        kernels::Backend* backend, uint64_t incarnation,
                                                        EngineObserver* observer);
  // Cancels all streams, finishes what is on the device and joins the device thread. Staging buffers and
  // rooms must have come back.
  virtual ~Engine() = default;

  virtual StagingPool& staging() = 0;
  virtual uint64_t incarnation() const = 0;
  virtual EngineStats stats() const = 0;

  // ---- Heads ----
  // Blocks. Creates the head's tensors on the device (zero; norm gain and class weights one), at step 0; it
  // is not visible to Open or List until Publish. ALREADY_EXISTS, RESOURCE_EXHAUSTED, INVALID_ARGUMENT.
  virtual absl::Status CreateHead(absl::string_view name, const kernels::HeadConfig& config) = 0;
  virtual absl::Status PublishHead(absl::string_view name) = 0;
  // Blocks. FAILED_PRECONDITION while streams are open on it.
  virtual absl::Status DeleteHead(absl::string_view name) = 0;
  virtual absl::StatusOr<HeadSnapshot> Describe(absl::string_view name) const = 0;
  virtual std::vector<HeadSnapshot> List() const = 0;  // published heads, by name

  // Blocks until `operation` ran on the device thread, after everything submitted to the head before.
  // NOT_FOUND, RESOURCE_EXHAUSTED (too many waiting), or what `operation` returns.
  virtual absl::Status OnDevice(absl::string_view name,
                                absl::FunctionRef<absl::Status(head::Head&)> operation) = 0;

  // ---- Steps; all block ----
  virtual absl::StatusOr<double> GradNorm(absl::string_view name, std::optional<uint64_t> step) = 0;
  // On missing rows: FAILED_PRECONDITION, and `missing` (may be null) lists them. FAILED_PRECONDITION, too,
  // if the gradient's norm is not finite, unless StepRequest::skip_non_finite.
  virtual absl::StatusOr<StepResult> ApplyStep(absl::string_view name, const StepRequest& request,
                                               std::vector<std::string>* missing) = 0;
  virtual absl::Status ZeroGradients(absl::string_view name, uint64_t step) = 0;
  // From now until ResetStep, streams and steps of the head are refused with `why` (not OK): its weights are
  // being replaced, or that went wrong half-way.
  virtual absl::Status DistrustWeights(absl::string_view name, const absl::Status& why) = 0;
  // After a checkpoint was loaded: forgets the ledger, zeroes gradients, cancels accumulating streams and
  // sets the open step. `last_step`: how the step before was applied; repeats of its ApplyStep are answered
  // with that.
  virtual absl::Status ResetStep(absl::string_view name, const head::Progress& progress,
                                 const std::optional<head::AppliedStep>& last_step) = 0;

  // ---- Contributions ----
  // Validates the spec and enters it in the ledger. Errors as in lossd.v1.HeadService.AddGradient.
  virtual absl::StatusOr<Contribution> OpenContribution(const ContributionSpec& spec) = 0;
  // When the contribution may be added: at once (0 is returned, and `ready` is not called), or, on a
  // deterministic engine, when all before it in order of ids are accumulated. Then `ready` is called, once,
  // on a thread of the engine's; also if it never may any more, which AddRows will explain. Returns a ticket.
  virtual uint64_t AwaitTurn(const Contribution& contribution, absl::AnyInvocable<void()> ready) = 0;
  // True if `ready` will not be called any more because of this.
  virtual bool ForgetTurn(const Contribution& contribution, uint64_t ticket) = 0;
  // Blocks. Adds a slice, `rows` within contribution.rows, `values` [rows.size(), cols] in its dtype; returns
  // how many of the rows were added, the others having been added before. All or nothing. UNAVAILABLE if it
  // is not its turn (any more, since an earlier microbatch failed).
  virtual absl::StatusOr<int64_t> AddRows(const Contribution& contribution, RowRange rows,
                                          absl::Span<const uint8_t> values) = 0;

  // ---- Rows ----
  // Validates the spec and registers it in the ledger; results flow after Start. Errors as in
  // lossd.v1.LossService.ComputeLoss.
  virtual absl::StatusOr<std::unique_ptr<Stream>> Open(StreamSpec spec,
                                                       std::shared_ptr<StreamObserver> observer) = 0;

  // ---- Deferred microbatches ----
  // Computes gradients of rows that a stream with StreamSpec::retain left behind. The caller submits each of
  // the stream's RetainedSlices once. NOT_FOUND if the rows are not retained; otherwise as Open.
  virtual absl::StatusOr<std::unique_ptr<Stream>> OpenBackward(BackwardSpec spec,
                                                               std::shared_ptr<StreamObserver> observer) = 0;
  // Lets go of a retained microbatch; its memory is free once streams that use it are done. False if there
  // was none, NOT_FOUND if there is no such head.
  virtual absl::StatusOr<bool> Release(absl::string_view name, uint64_t microbatch_id) = 0;
  // Releases microbatches not used since `limit`; returns how many.
  virtual int64_t ExpireRetained(absl::Time limit) = 0;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_ENGINE_H_
