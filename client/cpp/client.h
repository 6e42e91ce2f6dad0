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
// Ownership: the client copies small fields (names, options, targets, row weights) before a call returns. The
// memory of hidden states, outputs and tensor payloads belongs to the caller. The client reads and writes it
// in place, so it must stay valid until the call is done. When a call is done, with or without an error, the
// client does not use the memory any more.
//
// Errors are absl::Status. The codes have the meanings of the protocol (loss.proto, head.proto), and these:
//   INVALID_ARGUMENT   also: the client itself refused the arguments, and has sent nothing
//   UNAUTHENTICATED    the server does not know the client, or the client does not trust the server
//   PERMISSION_DENIED  the client's role is too low; the message names method, role and identity
//   UNAVAILABLE        there is no connection, or it broke and repeats failed; the message names the server
//   RESOURCE_EXHAUSTED also, without a detail: the transport refused the call, and repeats failed
//   DEADLINE_EXCEEDED  the call's timeout passed
//   ABORTED            also: gradients of the open step are lost, since the server was restarted (RestartOf()
//                      tells) or another caller has zeroed them, reset the head or loaded a checkpoint
//                      (IsStepDiscarded() tells); see Client::AcknowledgeRestart
//   INTERNAL           also: the server sent something the protocol does not allow ("server sent ...")
// ErrorDetailOf() returns the structured detail of an error: the one that the server sent, or the argument
// that the client refused.
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

// The base class of Client with its calls about checkpoints. For threads, ownership and errors see Client.
class CheckpointCalls {
 public:
  // Saves a checkpoint of the head. If `name` is empty, the server names the checkpoint after the step.
  absl::StatusOr<v1::SaveCheckpointResponse> SaveCheckpoint(absl::string_view head,
                                                            absl::string_view name = "",
                                                            absl::Duration timeout = absl::ZeroDuration());
  // As above, with every option of a save. The client calls `on_progress` (may be null) on this thread, a few
  // times a second. If this call ends early, the save goes on, unless request.cancel_with_call is true.
  absl::StatusOr<v1::SaveCheckpointResponse> SaveCheckpoint(
      const v1::SaveCheckpointRequest& request,
      const std::function<void(const v1::SaveProgress&)>& on_progress,
      absl::Duration timeout = absl::ZeroDuration());
  // Lists the checkpoints of `head`, or of all heads if `head` is empty. The list is sorted by head, then
  // from the newest checkpoint to the oldest one.
  absl::StatusOr<v1::ListCheckpointsResponse> ListCheckpoints(absl::string_view head = "",
                                                              absl::Duration timeout = absl::ZeroDuration());
  // Loads `checkpoint`, "<head>/<name>", into `head`. If `head` is empty, the head is the one that the
  // checkpoint names.
  absl::StatusOr<v1::HeadDescription> LoadCheckpoint(absl::string_view checkpoint,
                                                     absl::string_view head = "",
                                                     absl::Duration timeout = absl::ZeroDuration());

  // Removes the checkpoint "<head>/<name>"; NOT_FOUND if there is none. After a broken connection the client
  // repeats the call; the server deletes only once.
  absl::StatusOr<v1::DeleteCheckpointResponse> DeleteCheckpoint(
      absl::string_view checkpoint, absl::Duration timeout = absl::ZeroDuration());

 protected:
  // `core` outlives the calls.
  explicit CheckpointCalls(internal::Core* core) : calls_core_(core) {}
  ~CheckpointCalls() = default;

 private:
  internal::Core* const calls_core_;
};

// The result of CheckHealth.
enum class Health { kServing, kNotServing, kUnknownService };

// The calls for programs that watch a server and do not train with it: whether the server is healthy, and
// which clients use it. Client::monitoring makes this object, which shares the client's connections and must
// not outlive the client.
//
// Thread-safe. A zero timeout means ClientOptions::call_timeout.
class MonitoringCalls {
 public:
  // Lists the clients that send rows, and the `max_streams` oldest open ComputeLoss calls (0 means 1000).
  // INVALID_ARGUMENT if max_streams is above 10000; UNIMPLEMENTED if the server is too old to know the call.
  // The client repeats this call like other calls that only read.
  absl::StatusOr<v1::ListStreamsResponse> ListStreams(uint32_t max_streams = 0,
                                                      absl::Duration timeout = absl::ZeroDuration()) const;
  // Calls Check of grpc.health.v1. The service "" is the whole server. The client does not repeat this call.
  absl::StatusOr<Health> CheckHealth(absl::string_view service = "",
                                     absl::Duration timeout = absl::ZeroDuration()) const;
  // The lossd version that the server reported when the client connected; empty if it reported none.
  const std::string& server_version() const;
  // The hidden size D of a head, from the last answer of the server that described the head; nullopt if there
  // was no such answer. Sends nothing to the server.
  std::optional<uint64_t> KnownHiddenSize(absl::string_view head) const;
  // What Client::OpenMemory would return; nullopt if the client cannot know this without opening memory.
  // Sends nothing and does not block.
  std::optional<bool> KnowsMemory(int gpu) const;

 private:
  friend class Client;
  explicit MonitoringCalls(const internal::Core* core) : core_(core) {}

  const internal::Core* core_;
};

namespace internal {
class LossCall;
}  // namespace internal

// A loss computation under way, which ComputeLossAsync or BackwardAsync has started. Movable. Only one thread
// may use the object at a time, except for Cancel: any thread may call Cancel while the object lives.
class PendingLoss {
 public:
  PendingLoss() = default;
  PendingLoss(PendingLoss&& other) noexcept = default;
  PendingLoss& operator=(PendingLoss&& other) noexcept;
  // Cancels the computation and waits for its end, so that the caller's buffers are free afterwards.
  ~PendingLoss();

  // True once the result is there and the caller's buffers are free. The callback may still be running.
  bool Done() const;
  // Blocks until the result is there and the callback, if any, has returned. May be repeated.
  absl::StatusOr<LossResult> Wait();
  // As Wait, but gives up after `timeout`; then false.
  bool WaitFor(absl::Duration timeout);
  // Asks that the computation end early with CANCELLED. Has no effect if it is done.
  void Cancel();

 private:
  friend class Client;
  explicit PendingLoss(std::shared_ptr<internal::LossCall> call) : call_(std::move(call)) {}

  std::shared_ptr<internal::LossCall> call_;
};

// What CreateHead does if a head with the requested name exists already.
enum class IfExists {
  kError,  // CreateHead fails with ALREADY_EXISTS
  kKeep,   // the head stays as it is, with its values, step and optimizer
  kReset,  // ResetHead makes the head as new (RESET_SCOPE_ALL), with the request's initial values
};

// A connected client. The comment at the top of this file has its contract: threads, ownership, errors.
class Client : public CheckpointCalls {
 public:
  // Connects to the server. Errors: INVALID_ARGUMENT names a wrong option; UNAVAILABLE if there is no server;
  // FAILED_PRECONDITION if another program listens there or only one side speaks TLS; UNAUTHENTICATED if one
  // side does not trust the other; UNIMPLEMENTED if it is a gRPC server without lossd.v1; ABORTED if the
  // server's incarnation is not options.expected_incarnation.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const ClientOptions& options = {});

  // Cancels the loss computations under way and waits for their end.
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  const ClientOptions& options() const;
  // How the rows of loss computations travel, which the first computation decides, and how many connections
  // they use. The number of connections changes while the client works, unless options().channels gives it.
  TransportChoice transport() const;
  // Opens the shared memory for rows that are on GPU `gpu` of this process; nullopt means the first GPU of
  // the server that this process sees. This takes some milliseconds. Without this call the first loss
  // computation opens the memory. Returns true if the memory is on a GPU of the server, and false if it is
  // memory of the host or there is none.
  bool OpenMemory(std::optional<int> gpu);

  // ---- Loss ----

  // Computes loss and gradients of a microbatch and blocks until the computation is done. The client splits
  // the rows over streams and slices, and does not send slices that have ignored rows only.
  // Repeats: the client sends a stream again if it breaks (UNAVAILABLE) or if the transport refuses it; the
  // server accumulates no row twice. A stream has at most max_attempts attempts, and is not repeated if the
  // server was restarted or the gradients of the step were discarded. A computation that neither accumulates
  // nor retains begins again if the weights change meanwhile, also max_attempts times at most, because all
  // its results must belong to one version of the weights.
  // If one stream fails for good, the client ends the others and returns the first error.
  absl::StatusOr<LossResult> ComputeLoss(const Microbatch& microbatch, const LossOutputs& outputs,
                                         const ComputeOptions& options = {});

  // Starts the computation of ComputeLoss and returns without blocking. The callback may be null. Wrong
  // arguments are reported through the callback and through Wait, like any other error.
  PendingLoss ComputeLossAsync(const Microbatch& microbatch, const LossOutputs& outputs,
                               const ComputeOptions& options = {}, LossCallback callback = nullptr);

  // Deferred gradients, for objectives that need the row losses first. The order of calls is: ComputeLoss
  // with REDUCTION_NONE and `retain`, then Backward within the same step, then ReleaseMicrobatch. For
  // Backward the server computes the logits again from the hidden states that it retained.
  // `grad_hidden` [N, D] of hidden_dtype receives dL/dx; null if dL/dx is not wanted. The client repeats
  // streams as for ComputeLoss. NOT_FOUND if the server does not retain the rows, or no longer.
  absl::StatusOr<LossResult> Backward(const RetainedGradients& gradients, void* grad_hidden,
                                      const BackwardOptions& options = {});
  PendingLoss BackwardAsync(const RetainedGradients& gradients, void* grad_hidden,
                            const BackwardOptions& options = {}, LossCallback callback = nullptr);
  // Makes the server drop a retained microbatch; returns false if there was nothing to release. The client
  // repeats this call if the connection breaks.
  absl::StatusOr<bool> ReleaseMicrobatch(absl::string_view head, uint64_t id,
                                         absl::Duration timeout = absl::ZeroDuration());

  // Tells the client that the trainer starts the open step of `head` again, after gradients were lost.
  // The client remembers to which accumulated gradients of a head it added rows of the open step. It
  // identifies them by server process (incarnation) and generation, and names them in every further call of
  // the step and in every repeat. If the head's gradients are not these any more, calls of the step fail with
  // ABORTED. They fail until the trainer starts the step again: by CreateHead, ResetHead, LoadCheckpoint or
  // ZeroGradients of this client on the head, or by this call. The client does not repeat calls of the step
  // that are under way at that time.
  void AcknowledgeRestart(absl::string_view head);

  // ---- Heads ----
  // Within their timeout, the client repeats calls that only read, and ApplyStep, AddGradient, ResetHead,
  // SetShares and DeleteCheckpoint, which the server carries out only once. It never repeats other calls. A
  // zero timeout means the default in ClientOptions.

  // Creates a head. If a head of this name exists, `if_exists` says what to do. With kKeep and kReset the
  // existing head must match the request: else the error is ALREADY_EXISTS, which names every field that
  // differs.
  absl::StatusOr<v1::HeadDescription> CreateHead(const v1::CreateHeadRequest& request,
                                                 absl::Duration timeout = absl::ZeroDuration(),
                                                 IfExists if_exists = IfExists::kError);
  // Makes a head, or only its optimizer, as it was when it was created. If the request has no reset_id, the
  // client sets a random one. If it has no incarnation, the client sets that of the present server process.
  // ABORTED (RestartOf) if this server process is replaced by another one during the call.
  absl::StatusOr<v1::ResetHeadResponse> ResetHead(const v1::ResetHeadRequest& request,
                                                  absl::Duration timeout = absl::ZeroDuration());
  // Changes the shares by which the devices divide the classes of a head that is split by vocabulary. Only
  // between two steps. The client treats change_id as ResetHead treats reset_id; incarnation and a restart
  // are as in ResetHead.
  absl::StatusOr<v1::SetSharesResponse> SetShares(const v1::SetSharesRequest& request,
                                                  absl::Duration timeout = absl::ZeroDuration());
  // Returns what CreateHead would return now, or its error, and creates nothing. UNIMPLEMENTED if the server
  // is too old to know the call.
  absl::StatusOr<v1::HeadDescription> PlanHead(const v1::CreateHeadRequest& request,
                                               absl::Duration timeout = absl::ZeroDuration());
  absl::StatusOr<v1::HeadDescription> DescribeHead(absl::string_view head,
                                                   absl::Duration timeout = absl::ZeroDuration());
  absl::StatusOr<std::vector<v1::HeadDescription>> ListHeads(absl::Duration timeout = absl::ZeroDuration());
  absl::Status DeleteHead(absl::string_view head, absl::Duration timeout = absl::ZeroDuration());

  // Reads a tensor as fp32. All values that it returns belong to one version of the tensor. If the tensor
  // changes during the read, the read begins again; after RetryOptions::max_attempts attempts it ends with
  // ABORTED.
  absl::StatusOr<Tensor> ReadTensor(absl::string_view head, v1::Param param, v1::Role role = v1::ROLE_VALUE,
                                    absl::Duration timeout = absl::ZeroDuration());
  // Reads the rows that `request` names into `out`, [rows, cols] of request.dtype, and returns the shape.
  // INVALID_ARGUMENT if `out` does not have exactly this size. After an error the contents of `out` are
  // unspecified. `before` is the description of the head that the caller has from DescribeHead, or null. With
  // it, the error is ABORTED if the head was deleted and made again since.
  absl::StatusOr<TensorShape> ReadTensor(const v1::ReadTensorRequest& request, absl::Span<char> out,
                                         absl::Duration timeout = absl::ZeroDuration(),
                                         const v1::HeadDescription* before = nullptr);

  // Replaces a whole tensor by fp32 values [rows, cols].
  absl::StatusOr<v1::WriteTensorResponse> WriteTensor(absl::string_view head, v1::Param param,
                                                      absl::Span<const float> values,
                                                      absl::Duration timeout = absl::ZeroDuration());
  // Replaces the rows that `open` names by `payload`, which has open.dtype. After an error some rows may have
  // been replaced. `shape` is the shape of the caller's array that holds the payload, [rows, D] or [rows];
  // empty if the caller has no array. INVALID_ARGUMENT if the shape does not fit the tensor.
  absl::StatusOr<v1::WriteTensorResponse> WriteTensor(const v1::OpenTensor& open,
                                                      absl::Span<const char> payload,
                                                      absl::Duration timeout = absl::ZeroDuration(),
                                                      absl::Span<const uint64_t> shape = {});

  // Adds a contribution to a parameter's gradient: the gradient that another stage accumulated for a
  // parameter that it shares with the head. `payload`, of open.dtype, is added to the rows that `open` names.
  // It is added exactly once, even if connections break. open.contribution_id must differ from the ids of the
  // step's microbatches. ABORTED also if the server was restarted after gradients of the step were
  // accumulated, because those gradients are lost. `shape` is as in WriteTensor.
  absl::StatusOr<v1::AddGradientResponse> AddGradient(const v1::OpenGradient& open,
                                                      absl::Span<const char> payload,
                                                      absl::Duration timeout = absl::ZeroDuration(),
                                                      absl::Span<const uint64_t> shape = {});

  absl::StatusOr<v1::GradNormResponse> GradNorm(absl::string_view head,
                                                std::optional<uint64_t> step = std::nullopt,
                                                absl::Duration timeout = absl::ZeroDuration());
  // Applies the optimizer step. ABORTED also if the answer shows that the server was restarted after rows of
  // this step were accumulated: then the server has applied a step without these rows. To make it refuse such
  // a step instead, set expected_rows or expected_microbatches. UNIMPLEMENTED, and nothing is applied, if the
  // request has begin_optimizer or Optimizer.lazy_rows and the server is too old to know them.
  absl::StatusOr<v1::ApplyStepResponse> ApplyStep(const v1::ApplyStepRequest& request,
                                                  absl::Duration timeout = absl::ZeroDuration());
  absl::StatusOr<v1::HeadState> ZeroGradients(absl::string_view head, uint64_t step,
                                              absl::Duration timeout = absl::ZeroDuration());

  // ---- Server ----

  absl::StatusOr<v1::ServerDescription> GetServer(absl::Duration timeout = absl::ZeroDuration());
  // The calls CheckHealth and ListStreams.
  MonitoringCalls monitoring() const;

 private:
  explicit Client(std::unique_ptr<internal::Core> core);
  // For a call that moved a tensor and ended with `error`: returns ABORTED if the head is not the one that
  // was described `before` the call any more, because then the error may come from a head that took its
  // place. Otherwise returns `error`, or NOT_FOUND if the head is gone.
  absl::Status IfMadeAgain(const absl::Status& error, const v1::HeadDescription& before, v1::Param param,
                           absl::Time deadline);

  const std::unique_ptr<internal::Core> core_;
};

}  // namespace lossd::client

#endif  // LOSSD_CLIENT_CPP_CLIENT_H_
