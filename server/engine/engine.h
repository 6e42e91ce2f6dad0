// SPDX-License-Identifier: Apache-2.0
// The engine takes rows with targets from any number of streams, fills chunks with rows of the same head and
// options whatever streams they come from, drives the device, and keeps the ledger that makes accumulation
// exactly-once. It knows nothing of gRPC, protobuf or metrics and runs with any kernels::Backend, so that
// tests drive it as a state machine.
//
// Threads. One thread of the engine's own (the device thread) is the only one that touches the backend
// and the heads. Every public member is thread-safe; those that say "blocks" wait for the device thread
// and must not be called from a StreamObserver.
//
// Order. Work on one head takes effect in the order of submission: an operation on a head sees all
// slices submitted before it, and heads take turns. On a deterministic engine rows are accumulated in an
// order of their own (deterministic_schedule.h), and an operation sees all groups that were complete before
// it.
//
// Memory. The engine takes a slice when there is memory for it, so the staging pool bounds the queue.
// max_queued_operations bounds the operations on a head. Each stream has at most one slice that waits for
// memory or for its turn.
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

// Finds the head of a request and hands the request to its session (head_session.h), which does the work: on
// the caller's thread, or as an operation on the device thread.
class Engine {
 public:
  // `backend`, the observers and `runtime` outlive the engine. Allocates the staging pool. `incarnation` must
  // not be 0.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const EngineOptions& options,
                                                        kernels::Backend* backend, uint64_t incarnation,
                                                        std::vector<EngineObserver*> observers,
                                                        Runtime* runtime = SystemRuntime());
  // Cancels all streams, finishes what is on the device and joins the device thread. All memory of slices
  // must have come back (EngineStats: staging_used_bytes and area_buffers_lent are 0).
  ~Engine();

  uint64_t incarnation() const { return context_->incarnation; }
  EngineStats stats() const;
  // Does not block, whatever the engine does. How long ago the device thread or the device last made
  // progress: the thread came round to look for work, or a chunk left the device. About kDeviceBeat at most
  // while there is nothing to do; while one piece of work runs (a chunk, an operation on a head, the creation
  // of a head) as long as it has been running.
  absl::Duration DeviceSilence() const { return context_->loop.Silence(); }

  // ---- Heads ----
  // Blocks. Creates the head's tensors on the device (zero; norm gain and class weights one), at step 0; it
  // is not visible to Open, Describe or List until Publish. ALREADY_EXISTS, RESOURCE_EXHAUSTED,
  // INVALID_ARGUMENT.
  absl::Status CreateHead(absl::string_view name, const kernels::HeadConfig& config);
  // What CreateHead and Describe would say of it now, at step 0, or the error of CreateHead. Nothing is
  // created or booked, and the name stays free.
  absl::StatusOr<HeadSnapshot> PlanHead(absl::string_view name, const kernels::HeadConfig& config) const;
  absl::Status PublishHead(absl::string_view name);
  // Blocks. FAILED_PRECONDITION while streams are open on it.
  absl::Status DeleteHead(absl::string_view name);
  absl::StatusOr<HeadSnapshot> Describe(absl::string_view name) const;
  std::vector<HeadSnapshot> List() const;  // published heads, by name

  // Blocks until `operation` ran on the device thread, after everything submitted to the head before.
  // NOT_FOUND, RESOURCE_EXHAUSTED (too many waiting), or what `operation` returns, which must be UNAVAILABLE
  // only if the device has said so: it counts as its loss.
  absl::Status OnDevice(absl::string_view name, absl::FunctionRef<absl::Status(head::Head&)> operation);

  // ---- Tensors ----
  // The head must be published. NOT_FOUND, UNAVAILABLE.
  absl::StatusOr<std::unique_ptr<TensorReader>> OpenReader(absl::string_view name);
  absl::StatusOr<std::unique_ptr<TensorWriter>> OpenWriter(absl::string_view name);

  // ---- Steps; all block ----
  // `run`: of the program that asks, for people; likewise below.
  absl::StatusOr<GradNormResult> GradNorm(absl::string_view name, std::optional<uint64_t> step,
                                          absl::string_view run = "");
  // On missing rows: FAILED_PRECONDITION, and GetMissing (errors.h) lists them. FAILED_PRECONDITION, too, if
  // the gradient's norm is not finite, unless StepRequest::skip_non_finite.
  absl::StatusOr<StepResult> ApplyStep(absl::string_view name, const StepRequest& request);
  absl::StatusOr<HeadState> ZeroGradients(absl::string_view name, uint64_t step, absl::string_view run = "");
  // Discards the open step as ZeroGradients does, and zeroes the moments and the count of updates. With kAll
  // step 0 opens, nothing is known of a step before it, and until EndLoad, by when all values have been
  // written (OnDevice), calls that need them are refused with UNAVAILABLE. FAILED_PRECONDITION while streams
  // that accumulate, or contributions, are open on the head.
  absl::StatusOr<HeadState> Reset(absl::string_view name, ResetScope scope);
  // Divides the classes of a head that is split by vocabulary among the devices by other shares
  // (HeadKernels::SetShares); step, values and optimizer state stay. FAILED_PRECONDITION while streams or
  // contributions are open on the head, while it retains microbatches, and when the open step has rows; also
  // where the head is not split so. UNAVAILABLE while a tensor is being written. After an error nothing
  // changed.
  absl::Status SetShares(absl::string_view name, const std::vector<int32_t>& shares);
  // A checkpoint takes the place of the head's step, weights and gradients: what is under way on them ends
  // with ABORTED. Until EndLoad, by when all tensors have been written (OnDevice), calls that need them are
  // refused with UNAVAILABLE. `last_step`: how the step before was applied; repeats of its ApplyStep are
  // answered with that.
  absl::Status BeginLoad(absl::string_view name, const head::Progress& progress,
                         const std::optional<head::AppliedStep>& last_step,
                         const head::History& history = {});
  absl::Status EndLoad(absl::string_view name);

  // ---- Contributions ----
  // Validates the spec and enters it in the ledger. Errors as in lossd.v1.HeadService.AddGradient.
  absl::StatusOr<Contribution> OpenContribution(const ContributionSpec& spec);
  // When the contribution may be added: at once (0 is returned, and `ready` is not called), or, on a
  // deterministic engine, when all before it in order of ids are accumulated. Then `ready` is called, once,
  // on a thread of the engine's; also if it never may any more, which AddRows will explain. Returns a ticket,
  // for ForgetTurn (operations.h).
  uint64_t AwaitTurn(const Contribution& contribution, absl::AnyInvocable<void()> ready);
  // Blocks. Adds a slice, `rows` within contribution.rows, `values` [rows.size(), cols] in its dtype; returns
  // how many of the rows were added, the others having been added before. All or nothing. ABORTED if the
  // gradients are others than when it was opened, NOT_FOUND if the head was deleted, UNAVAILABLE if it is not
  // its turn (any more, since an earlier microbatch failed).
  absl::StatusOr<AddedRows> AddRows(const Contribution& contribution, RowRange rows,
                                    absl::Span<const uint8_t> values);

  // ---- Rows ----
  // Validates the spec and registers it in the ledger; results flow after Start. Errors as in
  // lossd.v1.LossService.ComputeLoss.
  absl::StatusOr<std::unique_ptr<Stream>> Open(StreamSpec spec, std::shared_ptr<StreamObserver> observer);

  // ---- Deferred microbatches ----
  // Computes gradients of rows that a stream with StreamSpec::retain left behind. The caller hands over each
  // of the stream's RetainedSlices once. NOT_FOUND if the rows are not retained; otherwise as Open.
  absl::StatusOr<std::unique_ptr<Stream>> OpenBackward(BackwardSpec spec,
                                                       std::shared_ptr<StreamObserver> observer);
  // Lets go of a retained microbatch; its memory is free once streams that use it are done. As
  // lossd.v1.LossService.ReleaseMicrobatch.
  // PERMISSION_DENIED or FAILED_PRECONDITION if it belongs to somebody else (DeferredMicrobatches::Release).
  absl::StatusOr<ReleaseResult> Release(absl::string_view name, uint64_t microbatch_id,
                                        const Asker& asker = {});
  // Releases microbatches not used since `limit`; returns how many.
  int64_t ExpireRetained(absl::Time limit);

 private:
  using SessionPtr = HeadDirectory::SessionPtr;

  explicit Engine(std::unique_ptr<EngineContext> context);

  // As HeadSession::Run.
  absl::Status RunOnHead(absl::string_view name, absl::FunctionRef<absl::Status(HeadSession&)> operation)
      ABSL_LOCKS_EXCLUDED(context_->mutex);

  const std::unique_ptr<EngineContext> context_;
  HeadDirectory heads_ ABSL_GUARDED_BY(context_->mutex);
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_ENGINE_H_
