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
// slices submitted before it, and heads take turns.
//
// Memory. Slices live in staging buffers acquired by the caller, so the queue is bounded by the pool;
// operations on a head are bounded by max_queued_operations.
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
#include "server/engine/staging_pool.h"
#include "server/engine/stream.h"
#include "server/head/head.h"

namespace lossd::engine {

struct EngineOptions {
  int64_t slice_bytes = int64_t{4} << 20;      // staging buffer: the largest slice payload
  int64_t staging_bytes = int64_t{256} << 20;  // whole pool; at least two buffers
  int64_t max_streams = 256;                   // open at once, over all heads
  int64_t max_heads = 64;
  int64_t max_queued_operations = 64;          // waiting for the device, per head
  int64_t max_ledger_rows = int64_t{1} << 26;  // rows remembered per head and step (5 to 9 bytes each)
  int64_t retained_bytes = 0;                  // hidden states of deferred microbatches; 0: none are kept
};

// Told about work as it happens, for metrics. Called on the engine's threads; must not block and must
// not call back into the engine.
class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  virtual void OnChunk(absl::string_view head, int64_t slices, int64_t rows, int64_t valid_rows,
                       double compute_seconds) {}
  // Probability that a chunk left out of its gradients, summed over its valid rows; called if it is not 0.
  virtual void OnDroppedMass(absl::string_view head, double mass) {}
  virtual void OnSlice(absl::string_view head, double queue_seconds) {}
  virtual void OnStep(absl::string_view head) {}
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
  int64_t open_streams = 0;
  int64_t queued_slices = 0;
  int64_t step_microbatches = 0;
  int64_t retained_microbatches = 0;
  int64_t step_rows = 0;   // valid rows accumulated in the open step
  int64_t total_rows = 0;  // computed since the head was added
};

struct EngineStats {
  int64_t open_streams = 0;
  int64_t queued_slices = 0;
  int64_t queued_rows = 0;
  int64_t staging_buffers = 0;
  int64_t staging_buffers_free = 0;
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
  std::vector<uint64_t> expected_microbatches;
  std::optional<int64_t> expected_rows;
};

struct StepResult {
  HeadState state;  // the step now open
  double grad_norm = 0.0;
  int64_t microbatches = 0;
  int64_t rows = 0;
  bool repeated = false;
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
  // Hands over one slice: hidden states [rows, D] at the front of `buffer`, `bytes` long. A slice that
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
  // Cancels all streams, finishes what is on the device and joins the device thread.
  virtual ~Engine() = default;

  virtual StagingPool& staging() = 0;
  virtual uint64_t incarnation() const = 0;
  virtual EngineStats stats() const = 0;

  // ---- Heads ----
  // Blocks. Creates the head's tensors on the device (zero; norm gain and class weights one); it is not
  // visible to Open or List until Publish. ALREADY_EXISTS, RESOURCE_EXHAUSTED, INVALID_ARGUMENT.
  virtual absl::Status CreateHead(absl::string_view name, const kernels::HeadConfig& config,
                                  uint64_t step) = 0;
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
  // On missing rows: FAILED_PRECONDITION, and `missing` (may be null) lists them.
  virtual absl::StatusOr<StepResult> ApplyStep(absl::string_view name, const StepRequest& request,
                                               std::vector<std::string>* missing) = 0;
  virtual absl::Status ZeroGradients(absl::string_view name, uint64_t step) = 0;
  // After a checkpoint was loaded: forgets the ledger, zeroes gradients, cancels accumulating streams and
  // sets the open step.
  virtual absl::Status ResetStep(absl::string_view name, uint64_t step) = 0;

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
