// SPDX-License-Identifier: Apache-2.0
// Engine is the core of the server and what its callers (rpc, admin, tests) use. It takes rows with targets
// from any number of streams and fills chunks with rows of the same head and options, from one stream or
// several. It drives the device, and keeps the ledger that makes accumulation exactly-once. It knows nothing
// of gRPC, protobuf or metrics and runs with any kernels::Backend, so tests can drive it as a state machine.
//
// Threads. Only one thread, the engine's device thread, touches the backend and the heads. Every public
// member is thread-safe. A member whose comment says "Blocks" waits for the device thread and must not be
// called from a StreamObserver.
//
// Order. Work on one head takes effect in the order of submission: an operation on a head sees all slices
// that were submitted before it. Heads take turns on the device. On a deterministic engine rows are
// accumulated in a fixed order (deterministic_schedule.h), and an operation sees all groups that were
// complete before it.
//
// Memory. The engine takes a slice when there is staging memory for it, so the staging pool bounds the queue
// of slices. EngineOptions::max_queued_operations bounds the queue of operations on a head. Each stream has
// at most one slice that waits for memory or for its turn.
//
// The types of the arguments are in engine_options.h (options, observers), stream.h (streams, snapshots,
// requests of steps), ledger.h (contributions) and operations.h (readers and writers of tensors).
#ifndef LOSSD_SERVER_ENGINE_ENGINE_H_
#define LOSSD_SERVER_ENGINE_ENGINE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "server/engine/device_loop.h"
#include "server/engine/engine_context.h"
#include "server/engine/engine_options.h"
#include "server/engine/head_session.h"
#include "server/engine/ledger.h"
#include "server/engine/operations.h"
#include "server/engine/stream.h"
#include "server/head/checkpoint.h"
#include "server/head/head.h"
#include "server/head/manifest.h"

namespace lossd::engine {

// Each member finds the head that a request names and hands the request to that head's session
// (head_session.h). The session does the work on the caller's thread or, as an operation, on the device
// thread.
class Engine {
 public:
  // Creates an engine and allocates its staging pool. `backend`, the observers and `runtime` outlive the
  // engine. `incarnation` must not be 0.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const EngineOptions& options,
                                                        kernels::Backend* backend, uint64_t incarnation,
                                                        std::vector<EngineObserver*> observers,
                                                        Runtime* runtime = SystemRuntime());
  // Cancels all streams, waits for the chunks on the device and joins the device thread. All memory of slices
  // must have been given back before (staging_used_bytes and area_buffers_lent of EngineStats are 0).
  ~Engine();

  uint64_t incarnation() const { return context_->incarnation; }
  EngineStats stats() const;
  // The time since the device thread or the device last made progress: since the thread last looked for work,
  // or a chunk left the device. While there is nothing to do, it is about kDeviceBeat at most. While a piece
  // of work runs (a chunk, an operation on a head, the creation of a head), it is the time that the work has
  // been running. Never blocks.
  absl::Duration DeviceSilence() const { return context_->loop.Silence(); }

  // ---- Heads ----
  // Blocks. Creates a head at step 0, with its tensors on the device: norm gain and class weights are one,
  // all others zero. Open, Describe and List do not see the head until PublishHead. ALREADY_EXISTS,
  // RESOURCE_EXHAUSTED, INVALID_ARGUMENT.
  absl::Status CreateHead(absl::string_view name, const kernels::HeadConfig& config);
  // Returns what Describe would return if CreateHead created this head now, or the error that CreateHead
  // would return. Creates and reserves nothing, and the name stays free.
  absl::StatusOr<HeadSnapshot> PlanHead(absl::string_view name, const kernels::HeadConfig& config) const;
  absl::Status PublishHead(absl::string_view name);
  // Blocks. FAILED_PRECONDITION while streams are open on the head, or while it is the teacher of open
  // streams.
  absl::Status DeleteHead(absl::string_view name);
  absl::StatusOr<HeadSnapshot> Describe(absl::string_view name) const;
  std::vector<HeadSnapshot> List() const;  // published heads, by name

  // Runs `operation` on the device thread after everything that was submitted to the head before, and blocks
  // until it has run. NOT_FOUND, RESOURCE_EXHAUSTED (too many operations wait), or what `operation` returns.
  // `operation` may return UNAVAILABLE only if the device did, because the engine then reports the device as
  // lost.
  absl::Status OnDevice(absl::string_view name, absl::FunctionRef<absl::Status(head::Head&)> operation);

  // ---- Tensors ----
  // Both require that the head is published. NOT_FOUND, UNAVAILABLE.
  absl::StatusOr<std::unique_ptr<TensorReader>> OpenReader(absl::string_view name);
  absl::StatusOr<std::unique_ptr<TensorWriter>> OpenWriter(absl::string_view name);

  // ---- Steps; all block ----
  // `run`, here and below: the name of the calling program's run (docs/glossary.md), for messages to people.
  absl::StatusOr<GradNormResult> GradNorm(absl::string_view name, std::optional<uint64_t> step,
                                          absl::string_view run = "");
  // FAILED_PRECONDITION if expected rows are missing; GetMissing (errors.h) then lists them.
  // FAILED_PRECONDITION as well if the gradient's norm is not finite, unless StepRequest::skip_non_finite is
  // set.
  absl::StatusOr<StepResult> ApplyStep(absl::string_view name, const StepRequest& request);
  absl::StatusOr<HeadState> ZeroGradients(absl::string_view name, uint64_t step, absl::string_view run = "");
  // Discards the open step as ZeroGradients does, and zeroes the moments and the count of updates. With kAll
  // also opens step 0 and forgets how the step before was applied. The caller then writes all values
  // (OnDevice) and calls EndLoad; until then, calls that need the values are refused with UNAVAILABLE.
  // FAILED_PRECONDITION while streams that accumulate, or contributions, are open on the head.
  absl::StatusOr<HeadState> Reset(absl::string_view name, ResetScope scope);
  // Divides the classes of a head that is split by vocabulary among the devices in new shares
  // (HeadKernels::SetShares). Step, values and optimizer state stay. FAILED_PRECONDITION if the head is not
  // split by vocabulary, while streams or contributions are open on it, while it retains microbatches, and
  // while the open step has rows. UNAVAILABLE while a tensor is being written. After an error nothing has
  // changed.
  absl::Status SetShares(absl::string_view name, const std::vector<int32_t>& shares);
  // Begins to replace the head's step, weights and gradients by a checkpoint's. Calls under way on them end
  // with ABORTED. The caller then writes all tensors (OnDevice) and calls EndLoad; until then, calls that
  // need the tensors are refused with UNAVAILABLE. `last_step`: how the step before `progress.step` was
  // applied; a repeat of that step's ApplyStep is answered from it.
  absl::Status BeginLoad(absl::string_view name, const head::Progress& progress,
                         const std::optional<head::AppliedStep>& last_step,
                         const head::History& history = {});
  absl::Status EndLoad(absl::string_view name);

  // ---- Contributions ----
  // Validates the spec and enters it in the ledger. Errors as in lossd.v1.HeadService.AddGradient.
  absl::StatusOr<Contribution> OpenContribution(const ContributionSpec& spec);
  // Waits, without blocking, until the rows of the contribution may be added. Returns 0 if they may be added
  // at once; `ready` is then not called. On a deterministic engine they may be added when everything with a
  // lower id is accumulated. Until then AwaitTurn returns a ticket for ForgetTurn (operations.h), and the
  // engine later calls `ready` once, on one of its threads. It also calls `ready` if the turn can no longer
  // come; AddRows then returns the reason.
  uint64_t AwaitTurn(const Contribution& contribution, absl::AnyInvocable<void()> ready);
  // Blocks. Adds a slice of a contribution, all of it or nothing. `rows` lie in contribution.rows; `values`:
  // [rows.size(), cols] in the contribution's dtype. Returns how many rows this call added; the other rows
  // had been added before. ABORTED if the head has another generation of gradients than when the contribution
  // was opened. NOT_FOUND if the head was deleted. UNAVAILABLE if it is not the contribution's turn, or no
  // longer its turn because an earlier microbatch failed.
  absl::StatusOr<AddedRows> AddRows(const Contribution& contribution, RowRange rows,
                                    absl::Span<const uint8_t> values);

  // ---- Rows ----
  // Opens a stream: validates the spec and, if the stream accumulates, declares its rows in the ledger.
  // Results flow after Stream::Start. Errors as in lossd.v1.LossService.ComputeLoss.
  absl::StatusOr<std::unique_ptr<Stream>> Open(StreamSpec spec, std::shared_ptr<StreamObserver> observer);

  // ---- Deferred microbatches ----
  // Opens a stream that computes gradients of rows that an earlier stream retained (StreamSpec::retain). The
  // caller hands each of the new stream's RetainedSlices to Stream::Receive once. NOT_FOUND if the rows are
  // not retained. Otherwise as Open.
  absl::StatusOr<std::unique_ptr<Stream>> OpenBackward(BackwardSpec spec,
                                                       std::shared_ptr<StreamObserver> observer);
  // Releases a retained microbatch, as lossd.v1.LossService.ReleaseMicrobatch. Its memory is free once the
  // streams that use it have ended. PERMISSION_DENIED or FAILED_PRECONDITION if the microbatch belongs to
  // another client (DeferredMicrobatches::Release).
  absl::StatusOr<ReleaseResult> Release(absl::string_view name, uint64_t microbatch_id,
                                        const Asker& asker = {});
  // Releases the microbatches that were not used since `limit`; returns how many.
  int64_t ExpireRetained(absl::Time limit);

 private:
  using SessionPtr = HeadDirectory::SessionPtr;

  explicit Engine(std::unique_ptr<EngineContext> context);

  // Finds the head and runs `operation` on the device thread, as HeadSession::Run does.
  absl::Status RunOnHead(absl::string_view name, absl::FunctionRef<absl::Status(HeadSession&)> operation)
      ABSL_LOCKS_EXCLUDED(context_->mutex);

  const std::unique_ptr<EngineContext> context_;
  HeadDirectory heads_ ABSL_GUARDED_BY(context_->mutex);
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_ENGINE_H_
