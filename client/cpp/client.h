// SPDX-License-Identifier: Apache-2.0
// The C++ client of a lossd server: loss and gradients for a trainer, administration of heads.
//
//   auto client = Client::Connect({.target = "127.0.0.1:7070"});
//   Microbatch microbatch{.head = "lm", .step = 0, .id = 7, .hidden_size = D, .hidden = x, .targets = y};
//   auto result = (*client)->ComputeLoss(microbatch, {.grad_hidden = dx}, {.accumulate_gradients = true});
//   if (result.ok()) Use(result->loss);
//
// Symbols: N rows of a microbatch, D hidden size, V vocabulary size. Tensors are row-major, dense and
// little-endian. Times are seconds, sizes are bytes unless a name says otherwise.
//
// Thread-safety: every method of Client may be called from any thread at any time; calls run concurrently.
//
// Ownership: the client copies small fields (names, options, targets, row weights) before a call returns.
// Hidden states, outputs and tensor payloads stay the caller's; they are read and written in place and must
// stay valid until the call is done. When a call is done, successful or not, the client has let go of them.
//
// Errors are absl::Status. The codes are the protocol's (see loss.proto and head.proto) and these:
//   INVALID_ARGUMENT   also: the client refused the arguments before anything was sent
//   UNAUTHENTICATED    the server does not know the client, or the client does not trust the server
//   PERMISSION_DENIED  the client's role is too low; the message names method, role and identity
//   UNAVAILABLE        no connection, or it broke and repeating did not help; the message names the server
//   RESOURCE_EXHAUSTED also, without a detail: the transport refused the call, and repeating did not help
//   DEADLINE_EXCEEDED  the call's timeout passed
//   ABORTED            also: gradients of the open step are lost, since the server was restarted (RestartOf()
//                      tells) or another caller has zeroed them, reset the head or loaded a checkpoint
//                      (IsStepDiscarded() tells); see Client::AcknowledgeRestart
//   INTERNAL           also: the server sent something the protocol does not allow ("server sent ...")
// ErrorDetailOf() gives the structured detail of an error: the server's, or the argument that was refused.
#ifndef LOSSD_CLIENT_CPP_CLIENT_H_
#define LOSSD_CLIENT_CPP_CLIENT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/client_options.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/loss.pb.h"
#include "lossd/v1/server.pb.h"
#include "lossd/v1/types.pb.h"

namespace lossd::client {

namespace internal {
class Core;
}  // namespace internal

// The calls of a Client that are about checkpoints: the base class of Client. Threads, ownership and errors
// are those of Client.
class CheckpointCalls {
 public:
  // `name` may be empty: the server names the checkpoint by step.
  absl::StatusOr<v1::SaveCheckpointResponse> SaveCheckpoint(absl::string_view head,
                                                            absl::string_view name = "",
                                                            absl::Duration timeout = absl::ZeroDuration());
  // The same with all there is to say about a save. `on_progress` (may be null) is called on this thread, a
  // few times a second. Unless request.cancel_with_call, the save goes on when this call ends early.
  absl::StatusOr<v1::SaveCheckpointResponse> SaveCheckpoint(
      const v1::SaveCheckpointRequest& request,
      const std::function<void(const v1::SaveProgress&)>& on_progress,
      absl::Duration timeout = absl::ZeroDuration());
  // Of `head`, or of all if it is empty; by head, then from the newest to the oldest.
  absl::StatusOr<v1::ListCheckpointsResponse> ListCheckpoints(absl::string_view head = "",
                                                              absl::Duration timeout = absl::ZeroDuration());
  // `checkpoint` is "<head>/<name>"; `head` may be empty: the checkpoint's own.
  absl::StatusOr<v1::HeadDescription> LoadCheckpoint(absl::string_view checkpoint,
                                                     absl::string_view head = "",
                                                     absl::Duration timeout = absl::ZeroDuration());

  // Removes the checkpoint "<head>/<name>"; NOT_FOUND if there is none. Repeated: the server deletes once.
  absl::StatusOr<v1::DeleteCheckpointResponse> DeleteCheckpoint(
      absl::string_view checkpoint, absl::Duration timeout = absl::ZeroDuration());

 protected:
  // `core` outlives the calls.
  explicit CheckpointCalls(internal::Core* core) : calls_core_(core) {}
  ~CheckpointCalls() = default;

 private:
  internal::Core* const calls_core_;
};

// What CheckHealth answers.
enum class Health { kServing, kNotServing, kUnknownService };

// The calls of programs that watch a server rather than train with it: whether it serves, and who uses it.
// Client::monitoring makes this object, which shares the client's connections and must not outlive the
// client.
//
// Thread-safe. A zero timeout means ClientOptions::call_timeout.
class MonitoringCalls {
 public:
  // Which clients send rows, and the ComputeLoss calls that are open: the oldest `max_streams` of them (0:
  // 1000). INVALID_ARGUMENT above 10000; UNIMPLEMENTED by earlier servers. Repeated like other calls that
  // only read.
  absl::StatusOr<v1::ListStreamsResponse> ListStreams(uint32_t max_streams = 0,
                                                      absl::Duration timeout = absl::ZeroDuration()) const;
  // grpc.health.v1; "" is the whole server. Not repeated.
  absl::StatusOr<Health> CheckHealth(absl::string_view service = "",
                                     absl::Duration timeout = absl::ZeroDuration()) const;
  // The version of lossd that the server said it is when the client connected; "": it said none.
  const std::string& server_version() const;
  // D of a head, as an answer of the server has told this client last; nullopt: none has. Asks nothing.
  std::optional<uint64_t> KnownHiddenSize(absl::string_view head) const;

 private:
  friend class Client;
  explicit MonitoringCalls(const internal::Core* core) : core_(core) {}

  const internal::Core* core_;
};

namespace internal {
class LossCall;
}  // namespace internal

// A loss computation under way. Movable; may be used from one thread at a time, except Cancel, which may be
// called from any thread while the object lives.
class PendingLoss {
 public:
  PendingLoss() = default;
  PendingLoss(PendingLoss&& other) noexcept = default;
  PendingLoss& operator=(PendingLoss&& other) noexcept;
  // Cancels and waits, so that the caller's buffers are free afterwards.
  ~PendingLoss();

  // True once the result is there and the buffers are free (the callback may still be running).
  bool Done() const;
  // Blocks until the result is there and the callback, if any, has returned. May be repeated.
  absl::StatusOr<LossResult> Wait();
  // As Wait, but gives up after `timeout`; then false.
  bool WaitFor(absl::Duration timeout);
  // Asks for an early end with CANCELLED; no effect when done.
  void Cancel();

 private:
  friend class Client;
  explicit PendingLoss(std::shared_ptr<internal::LossCall> call) : call_(std::move(call)) {}

  std::shared_ptr<internal::LossCall> call_;
};

// What becomes of a head that CreateHead finds under the name.
enum class IfExists {
  kError,  // ALREADY_EXISTS
  kKeep,   // it stays as it is, values, step and optimizer
  kReset,  // as new, by ResetHead with RESET_SCOPE_ALL and the request's initial values
};

// A connected client. The head of this file has its contract: threads, ownership, errors.
class Client : public CheckpointCalls {
 public:
  // Connects. INVALID_ARGUMENT names a wrong option; UNAVAILABLE if nobody is there; FAILED_PRECONDITION if
  // it is another program or only one side speaks TLS; UNAUTHENTICATED if one side does not trust the other;
  // UNIMPLEMENTED for other gRPC servers; ABORTED if it is not options.expected_incarnation.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const ClientOptions& options = {});

  // Cancels what is under way and waits for it.
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  const ClientOptions& options() const;
  // How the rows of loss computations travel, which is decided with the first of them; and over how many
  // connections, which changes while the client works unless options().channels says how many.
  TransportChoice transport() const;
  // Opens the memory that rows on this GPU of the process go through (nullopt: on the first one that is the
  // server's), which the first loss computation does else and takes some milliseconds. True if it is memory
  // of a GPU of the server; false: memory of the host, or none.
  bool OpenMemory(std::optional<int> gpu);
  // What OpenMemory would return, if that is known without opening anything. Does not block.
  std::optional<bool> KnowsMemory(int gpu) const;

  // ---- Loss ----

  // Computes loss and gradients of a microbatch and blocks until all is done. Rows are split over streams and
  // slices; slices of ignored rows alone are not sent. A stream that breaks (UNAVAILABLE) or is refused by
  // the transport is sent again (the server accumulates no row twice), at most max_attempts times and only
  // while the server has not been restarted and the gradients of the step have not been discarded. A
  // computation that neither accumulates nor retains begins again, as often, if the weights change under it:
  // its results belong to one version of the weights. One failing stream ends the others; the first error
  // counts.
  absl::StatusOr<LossResult> ComputeLoss(const Microbatch& microbatch, const LossOutputs& outputs,
                                         const ComputeOptions& options = {});

  // Starts the same without blocking. The callback may be null; bad arguments are reported through it and
  // through Wait like any other error.
  PendingLoss ComputeLossAsync(const Microbatch& microbatch, const LossOutputs& outputs,
                               const ComputeOptions& options = {}, LossCallback callback = nullptr);

  // Deferred gradients, for objectives that need the row losses first: ComputeLoss with REDUCTION_NONE and
  // `retain`, then Backward within the same step, then ReleaseMicrobatch. The server computes the logits
  // again from the hidden states it kept. `grad_hidden` [N, D] of hidden_dtype gets dL/dx; null: not wanted.
  // Repeated like ComputeLoss. NOT_FOUND if the rows are not retained (any more).
  absl::StatusOr<LossResult> Backward(const RetainedGradients& gradients, void* grad_hidden,
                                      const BackwardOptions& options = {});
  PendingLoss BackwardAsync(const RetainedGradients& gradients, void* grad_hidden,
                            const BackwardOptions& options = {}, LossCallback callback = nullptr);
  // Lets go of a retained microbatch; false if there was nothing to release. Repeated like ComputeLoss.
  absl::StatusOr<bool> ReleaseMicrobatch(absl::string_view head, uint64_t id,
                                         absl::Duration timeout = absl::ZeroDuration());

  // The client remembers to which gradients of a head (server process and generation) it added rows of the
  // open step, and names them in every further call of the step and every repeat. If the head has others,
  // calls of the step fail with ABORTED, since gradients are gone, until the trainer says that it starts the
  // step again: by a CreateHead, ResetHead, LoadCheckpoint or ZeroGradients of this client on the head, or by
  // this call. Calls of the step that are under way then are not repeated.
  void AcknowledgeRestart(absl::string_view head);

  // ---- Heads ----
  // Calls that only read, ApplyStep, AddGradient, ResetHead, SetShares and DeleteCheckpoint (the server does
  // each once) are repeated like streams, within the timeout. The others never are. A zero timeout means
  // ClientOptions' default.

  // `if_exists`: with kKeep and kReset, ALREADY_EXISTS names every field that a head of this name has
  // otherwise.
  absl::StatusOr<v1::HeadDescription> CreateHead(const v1::CreateHeadRequest& request,
                                                 absl::Duration timeout = absl::ZeroDuration(),
                                                 IfExists if_exists = IfExists::kError);
  // Makes a head, or its optimizer alone, as it was when it was created. Without a reset_id it gets a random
  // one; without an incarnation, that of the server process that has the head. ABORTED (RestartOf) if that
  // ended during the call.
  absl::StatusOr<v1::ResetHeadResponse> ResetHead(const v1::ResetHeadRequest& request,
                                                  absl::Duration timeout = absl::ZeroDuration());
  // Divides the classes of a head that is split by vocabulary by other shares, between two steps. change_id,
  // incarnation and a restart as in ResetHead.
  absl::StatusOr<v1::SetSharesResponse> SetShares(const v1::SetSharesRequest& request,
                                                  absl::Duration timeout = absl::ZeroDuration());
  // What CreateHead would answer now, or its error; nothing is created. UNIMPLEMENTED by earlier servers.
  absl::StatusOr<v1::HeadDescription> PlanHead(const v1::CreateHeadRequest& request,
                                               absl::Duration timeout = absl::ZeroDuration());
  absl::StatusOr<v1::HeadDescription> DescribeHead(absl::string_view head,
                                                   absl::Duration timeout = absl::ZeroDuration());
  absl::StatusOr<std::vector<v1::HeadDescription>> ListHeads(absl::Duration timeout = absl::ZeroDuration());
  absl::Status DeleteHead(absl::string_view head, absl::Duration timeout = absl::ZeroDuration());

  // Reads a tensor as fp32. What is read is of one version: a read during which the tensor changes begins
  // again, at most RetryOptions::max_attempts times, and ends with ABORTED if it changes each time.
  absl::StatusOr<Tensor> ReadTensor(absl::string_view head, v1::Param param, v1::Role role = v1::ROLE_VALUE,
                                    absl::Duration timeout = absl::ZeroDuration());
  // Reads what `request` asks for into `out` [rows read, cols] of request.dtype. INVALID_ARGUMENT if its size
  // is not exactly that; returns the shape read. After an error the contents of `out` are unspecified.
  // `before`: the head as DescribeHead has described it, if the caller knows; ABORTED if it is another one by
  // now.
  absl::StatusOr<TensorShape> ReadTensor(const v1::ReadTensorRequest& request, absl::Span<char> out,
                                         absl::Duration timeout = absl::ZeroDuration(),
                                         const v1::HeadDescription* before = nullptr);

  // Replaces a whole tensor by fp32 values [rows, cols].
  absl::StatusOr<v1::WriteTensorResponse> WriteTensor(absl::string_view head, v1::Param param,
                                                      absl::Span<const float> values,
                                                      absl::Duration timeout = absl::ZeroDuration());
  // Replaces the rows `open` names by `payload`, of open.dtype. After an error some rows may be replaced.
  // `shape`: of the array that the payload is, [rows, D] or [rows], if there is one: INVALID_ARGUMENT names
  // it unless the tensor takes it.
  absl::StatusOr<v1::WriteTensorResponse> WriteTensor(const v1::OpenTensor& open,
                                                      absl::Span<const char> payload,
                                                      absl::Duration timeout = absl::ZeroDuration(),
                                                      absl::Span<const uint64_t> shape = {});

  // Adds `payload`, of open.dtype, to the rows that `open` names of a parameter's gradient, exactly once
  // whatever breaks: what another stage accumulated for a parameter it shares with the head.
  // open.contribution_id is not the id of a microbatch of the step. ABORTED also if the server was restarted
  // since gradients of the step were accumulated: those are gone. `shape`: as WriteTensor takes it.
  absl::StatusOr<v1::AddGradientResponse> AddGradient(const v1::OpenGradient& open,
                                                      absl::Span<const char> payload,
                                                      absl::Duration timeout = absl::ZeroDuration(),
                                                      absl::Span<const uint64_t> shape = {});

  absl::StatusOr<v1::GradNormResponse> GradNorm(absl::string_view head,
                                                std::optional<uint64_t> step = std::nullopt,
                                                absl::Duration timeout = absl::ZeroDuration());
  // ABORTED also if the answer shows that the server was restarted between the accumulation of rows of this
  // step and its application: then it applied a step without them (give expected_rows or
  // expected_microbatches to have it refuse).
  // UNIMPLEMENTED with begin_optimizer or Optimizer.lazy_rows by earlier servers; nothing is applied.
  absl::StatusOr<v1::ApplyStepResponse> ApplyStep(const v1::ApplyStepRequest& request,
                                                  absl::Duration timeout = absl::ZeroDuration());
  absl::StatusOr<v1::HeadState> ZeroGradients(absl::string_view head, uint64_t step,
                                              absl::Duration timeout = absl::ZeroDuration());

  // ---- Server ----

  absl::StatusOr<v1::ServerDescription> GetServer(absl::Duration timeout = absl::ZeroDuration());
  // CheckHealth, ListStreams.
  MonitoringCalls monitoring() const;

 private:
  explicit Client(std::unique_ptr<internal::Core> core);
  // `error` of a call that moved a tensor, or ABORTED if the head is not the one that was described `before`
  // the call: the error may be that of a head which took its place.
  absl::Status IfMadeAgain(const absl::Status& error, const v1::HeadDescription& before, v1::Param param,
                           absl::Time deadline);

  const std::unique_ptr<internal::Core> core_;
};

}  // namespace lossd::client

#endif  // LOSSD_CLIENT_CPP_CLIENT_H_
