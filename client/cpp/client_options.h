// SPDX-License-Identifier: Apache-2.0
// What a client is made with (ClientOptions, Credentials), what its calls take and return (Microbatch,
// ComputeOptions, LossResult), and what its errors say to programs (RestartOf, ErrorDetailOf). The namespace
// `internal` makes those errors. client.h includes this file.
//
// Functions are stateless and thread-safe; structs are plain data. The symbols N, D and V are those of
// client.h.
#ifndef LOSSD_CLIENT_CPP_CLIENT_OPTIONS_H_
#define LOSSD_CLIENT_CPP_CLIENT_OPTIONS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/errors/field_error.h"
#include "lossd/v1/loss.pb.h"
#include "lossd/v1/types.pb.h"

namespace lossd::client {

// Files are PEM and are read once, when credentials are made from them. An empty string: none.
struct CredentialOptions {
  // Certificates of the authorities that sign servers' certificates. The connection has TLS if this is given.
  // The server's certificate must be for the host that the client names.
  std::string ca;
  // The client's own certificate chain and its key, for servers with --tls_client_ca. Both or neither, and
  // with `ca`.
  std::string cert;
  std::string key;
  // For servers with --token_file. Sent only over TLS, or to a loopback address or a Unix socket.
  std::string token;
};

// Immutable and thread-safe.
class Credentials {
 public:
  // Plain TCP: no encryption, no identity. For loopback and networks trusted as a whole.
  static std::shared_ptr<const Credentials> Insecure();

  // INVALID_ARGUMENT naming the option and the path if a file cannot be read or options do not go together.
  static absl::StatusOr<std::shared_ptr<const Credentials>> Create(const CredentialOptions& options);

  // With the environment variables LOSSD_CA, LOSSD_CERT, LOSSD_KEY (paths) and LOSSD_TOKEN (the token).
  static absl::StatusOr<std::shared_ptr<const Credentials>> FromEnvironment();
  static CredentialOptions OptionsFromEnvironment();

  virtual ~Credentials() = default;
};

// Whether a gRPC target is a loopback address, localhost or a Unix socket.
bool IsLocalTarget(absl::string_view target);

// The value of an environment variable; empty if it is not set.
std::string EnvironmentVariable(const char* name);

// The server of the environment variable LOSSD_SERVER, else "127.0.0.1:7070".
std::string TargetFromEnvironment();

// The transport of the environment variable LOSSD_TRANSPORT, else "auto".
std::string TransportFromEnvironment();

// The run of the environment variable LOSSD_RUN, else "<host>:<pid>-<8 hexadecimal digits>", which no other
// client has.
std::string RunFromEnvironment();

// How many connections there are, and why.
struct ConnectionChoice {
  int connections = 1;
  std::string reason;  // for people
};

// How rows in memory of GPUs (Memory::kDevice) travel, and why, over all GPUs that rows came from so far. If
// there were several GPUs, the reason names the way of each.
struct DeviceTransportChoice {
  // "cuda_ipc"; or the transport of rows of the host, if rows of at least one GPU are copied to the host.
  std::string transport;
  std::string reason;  // for people
};

// How rows travel, and why.
struct TransportChoice {
  std::string transport;  // of rows in memory of the host: "shared_memory" or "grpc"
  std::string reason;     // for people
  ConnectionChoice connections;
  DeviceTransportChoice device;
};

// How calls are sent again: calls that break, and calls that begin again because the weights have changed.
struct RetryOptions {
  int max_attempts = 3;  // of one call (or one stream of ComputeLoss), the first included; at least 1
  absl::Duration initial_backoff = absl::Milliseconds(250);  // grows fourfold with every attempt, with jitter
  absl::Duration max_backoff = absl::Seconds(5);
};

struct ClientOptions {
  std::string target = TargetFromEnvironment();    // host:port, or any gRPC target name
  std::shared_ptr<const Credentials> credentials;  // null: Credentials::FromEnvironment()

  // Connections to the server, in [1, 64], over which the streams of loss computations are spread. Nullopt:
  // one, and as many as 8 while each further one makes rows that travel in messages go faster.
  std::optional<int> channels;
  absl::Duration connect_timeout = absl::Seconds(10);
  bool wait_for_server = false;  // wait if nobody is there, as while the server is being started
  int64_t max_message_bytes = int64_t{64} << 20;  // of one message, sent or received

  // Defaults for calls that name no timeout of their own.
  absl::Duration call_timeout = absl::Seconds(60);      // descriptions, gradient norm, steps
  absl::Duration transfer_timeout = absl::Minutes(30);  // creation, tensors, checkpoints
  absl::Duration loss_timeout = absl::Minutes(10);      // ComputeLoss, attempts and waits together

  // A connection whose peer takes no data for this long is given up. A call may end later than its timeout by
  // at most this time, because it waits until no send queue holds the caller's memory any more.
  absl::Duration dead_peer_timeout = absl::Seconds(30);

  RetryOptions retry;

  // How the rows of loss computations travel:
  //   "grpc"           In messages.
  //   "shared_memory"  In memory that client and server share. Both have to be on one host.
  //   "cuda_ipc"       Rows of any GPU (Memory::kDevice): in memory of the server's nearest GPU, which this
  //                    process has to see. Rows of the host: as with "auto".
  //   "auto"           Rows on a GPU of the server: in memory of that GPU. Other rows: in shared memory. In
  //                    messages if the memory cannot be had.
  // With "shared_memory" and "cuda_ipc" Connect fails if the memory cannot be had. A slice that finds no room
  // in the memory travels in messages.
  std::string transport = TransportFromEnvironment();
  // How much shared memory the client asks for, of the host and of each GPU separately, when calls need it.
  // The server may give less. Nullopt: 4 MiB at first, then about four times the rows of the largest call, up
  // to 256 MiB.
  std::optional<int64_t> shared_memory_bytes;

  // Names the program that trains, in at most 128 printable characters: a head says who applied its last step
  // (v1::HeadHistory), and errors say which other program trains it. Processes of one training may share a
  // name. "": no name.
  std::string run = RunFromEnvironment();

  // 0: the client takes the server as it finds it. Otherwise the incarnation that the caller knows from
  // before (a script that calls one program after the other): Connect, and calls that accumulate or apply
  // gradients, fail as after a restart if the server is another process by now.
  uint64_t expected_incarnation = 0;

  // With the transport "cuda_ipc": Connect opens memory of this GPU of the process if the server has it.
  // nullopt: the one that the calling thread works on.
  std::optional<int> gpu;
};

// Where the caller's hidden states and their gradients are.
//
// kDevice is memory of a GPU of this host as CUDA's driver and runtime allocate it, also on another GPU than
// the server's, with any transport (ClientOptions): rows are copied to and from memory of the server's GPU,
// or by way of memory of the host. The client copies on streams of its own: what writes the hidden states,
// and what still uses the memory of the gradients, must have ended before the call begins
// (cudaStreamSynchronize), or be on the stream that Microbatch::stream names. When the call is done, the
// gradients are there for work of any stream. The first such call loads CUDA's driver, which takes a moment.
// INVALID_ARGUMENT if the memory is not that of a GPU, or if hidden states and gradients are on different
// GPUs. UNAVAILABLE if there is no driver, or if the driver fails; its failure counts as a broken stream.
enum class Memory { kHost, kDevice };

// A run of rows of a microbatch with a part of its own in the loss, such as the rows that predict the token
// after the next one. See lossd.v1.Depth.
struct Depth {
  uint64_t rows = 0;
  float weight = 1.0f;  // multiplies the loss and the gradients of the rows; finite, >= 0
  // REDUCTION_MEAN: what the sum over the rows is divided by. Absent: the number of their valid targets; with
  // loss.use_class_weights it must be given.
  std::optional<double> normalizer;
  // Where the rows and their gradients lie, [rows, D] each, if not all depths lie one behind the other
  // (Microbatch::hidden, LossOutputs::grad_hidden, which are null then); not owned. All depths have `hidden`,
  // or none; all have `grad_hidden`, or none. Either may be null if the depth has no row.
  const void* hidden = nullptr;
  void* grad_hidden = nullptr;
};

// The rows of one loss computation, or of an embedding (`embedding`).
struct Microbatch {
  std::string head;
  // The open step the gradients belong to. Required with ComputeOptions::accumulate_gradients.
  std::optional<uint64_t> step;
  // Names the microbatch within (head, step). Sending the same id again with the same contents is safe.
  uint64_t id = 0;

  uint64_t hidden_size = 0;  // D
  v1::DType hidden_dtype = v1::DTYPE_BF16;
  // [N, D] of hidden_dtype; not owned. May be null if N == 0 or no row is valid, or if depths have the rows.
  const void* hidden = nullptr;
  Memory memory = Memory::kHost;  // of `hidden` and LossOutputs::grad_hidden
  // With Memory::kDevice: a stream (cudaStream_t, CUstream) of the GPU that has `hidden`. The client's copies
  // wait, on the GPU, for the work that the stream was given before the call, and not for later work. The
  // earlier work must not wait for calls of this client. The stream may be destroyed before the call is done.
  // Null is CUDA's default stream; nullopt: the copies wait for no stream.
  std::optional<void*> stream;
  // [N]; its size is N. A class in [0, V) or ComputeOptions::loss.ignore_index. Copied.
  absl::Span<const int32_t> targets;
  // Empty, or [N]: multiply the rows' losses and gradients. Copied.
  absl::Span<const float> row_weights;
  // What ComputeOptions::loss.objective takes with each row: [N] and finite if it needs them, else empty.
  // Copied.
  absl::Span<const float> advantages;
  absl::Span<const float> old_logprobs;
  absl::Span<const float> ref_logprobs;
  // Divides the rows into depths, in order; at most 64, which have N rows together. Empty: they are not
  // divided. Not with REDUCTION_NONE. The one pass over the weights serves all depths.
  std::vector<Depth> depths;

  // With ComputeOptions::loss.distillation: the rows' hidden states of the teacher, [N, teacher_hidden_size]
  // of hidden_dtype, in memory of the same kind as `hidden`; not owned.
  const void* teacher_hidden = nullptr;
  uint64_t teacher_hidden_size = 0;
  // With ComputeOptions::loss.rest: soft targets, `target_count` classes with their weights for each row,
  // [N, target_count] each, as lossd.v1.OpenMicrobatch has them. Copied.
  absl::Span<const int32_t> target_classes;
  absl::Span<const float> target_weights;
  uint32_t target_count = 0;  // at most 256
  // The rows have no loss: the head's weight serves as an embedding, and `targets` are token ids in [0, V).
  //   EMBEDDING_ROWS       `hidden` is null, and LossOutputs::grad_hidden gets the row of the weight that
  //                        each id names, rounded to hidden_dtype; zeros for
  //                        ComputeOptions::loss.ignore_index. Client::ComputeLoss begins again, as for a
  //                        loss, if the weights change meanwhile.
  //   EMBEDDING_GRADIENTS  `hidden` has the gradient with respect to each row. It is added, times
  //                        ComputeOptions::grad_output, to the gradient of the weight's row, exactly once.
  //                        The id is that of a microbatch of its own. Needs
  //                        ComputeOptions::accumulate_gradients.
  // ComputeOptions::reduction does not matter; no other option or result of a loss may be asked for, and of
  // the LossResult the rows, versions and costs mean something.
  v1::Embedding embedding = v1::EMBEDDING_UNSPECIFIED;
  // Classes of which LossOutputs::class_logprobs is wanted: [K], the same for all rows, or [N, K]; K is
  // LossOutputs::class_count. Each in [0, V), in any order and as often as one likes. Copied.
  absl::Span<const int32_t> classes;
};

// Where results go; not owned. Only what is given is computed and sent. After an error the contents are
// unspecified.
struct LossOutputs {
  // [N, D] of Microbatch::hidden_dtype: dL/dx; 0 for ignored rows. Null: not wanted.
  void* grad_hidden = nullptr;
  // Each empty (not wanted) or [N]. Natural logarithms; 0 for ignored rows.
  absl::Span<float> row_loss;
  absl::Span<float> row_lse;       // log sum exp of the logits
  absl::Span<float> row_entropy;   // of the softmax, nats
  absl::Span<float> row_logprob;   // log p of the target
  absl::Span<int32_t> row_argmax;  // class of the largest logit; -1 for ignored rows
  // [N, class_count]: log p of Microbatch::classes; empty if class_count, at most 256, is 0.
  absl::Span<float> class_logprobs;
  uint32_t class_count = 0;
  // The `top_k` most probable classes of each row and their log p, the most probable first, of equals the
  // smaller class first; -1 and 0 for ignored rows. [N, top_k] each, empty if top_k is 0. At most 128 and V.
  absl::Span<float> top_logprobs;
  absl::Span<int32_t> top_classes;
  uint32_t top_k = 0;
};

// How a loss is computed, and how its rows travel.
struct ComputeOptions {
  v1::LossOptions loss;

  // Loss and gradient scale.
  // With REDUCTION_NONE there are no gradients yet (see retain), and LossResult::loss is the sum.
  v1::Reduction reduction = v1::REDUCTION_MEAN;
  // REDUCTION_MEAN: what sums are divided by. Absent: the number of valid targets of the microbatch; with
  // loss.use_class_weights it must be given (the sum of u_y over valid rows). With Microbatch::depths each
  // depth has its own instead.
  std::optional<double> normalizer;
  // The gradient of the final objective with respect to this loss; multiplies every gradient. Absent: 1.
  std::optional<float> grad_output;
  // Add dL/dW, dL/db, ... to the head's accumulators. Computed at most once per row, whatever breaks.
  bool accumulate_gradients = false;
  // REDUCTION_NONE: keep the hidden states on the server for Client::Backward, under Microbatch::id.
  bool retain = false;

  // How rows travel.
  // Concurrent streams. A computation has fewer if its rows are few, or if others have the client's spare
  // streams: every computation has one stream of its own, and all of them share 64 spare ones. 0: one per
  // connection; in shared memory one for each 8 MiB of rows, at most four and at most half of the machine's
  // cores, unless the server is deterministic.
  int streams = 0;
  // Bytes of hidden states that are sent at once, at most; the server's limits bound it too. Nullopt: 1 MiB
  // in messages, 4 MiB in shared memory, and in memory of the GPU as much as a quarter of it holds.
  std::optional<uint64_t> slice_bytes;

  absl::Duration timeout = absl::ZeroDuration();  // zero: ClientOptions::loss_timeout
  int max_attempts = 0;                           // zero: RetryOptions::max_attempts
};

// Upstream gradients of the rows of a microbatch that was computed with ComputeOptions::retain.
struct RetainedGradients {
  std::string head;
  // The step the rows were retained in; it must still be open. Required with accumulate_gradients.
  std::optional<uint64_t> step;
  uint64_t id = 0;  // Microbatch::id

  uint64_t hidden_size = 0;                 // D
  v1::DType hidden_dtype = v1::DTYPE_BF16;  // as when the rows were retained
  Memory memory = Memory::kHost;            // of the `grad_hidden` of Client::Backward
  std::optional<void*> stream;              // as Microbatch::stream, of the GPU that has `grad_hidden`
  // [N], finite: the gradient of the objective with respect to each row's loss. Those of ignored rows do not
  // matter. Copied.
  absl::Span<const float> grad_loss;
  // Each empty (0) or [N]: with respect to each row's log sum exp and entropy. Copied.
  absl::Span<const float> grad_lse;
  absl::Span<const float> grad_entropy;
};

struct BackwardOptions {
  bool accumulate_gradients = false;  // as in ComputeOptions
  int streams = 0;
  absl::Duration timeout = absl::ZeroDuration();
  int max_attempts = 0;
};

// The sums over the rows of one depth; each member means what it means in LossResult.
struct DepthResult {
  double loss = 0;  // before Depth::weight
  double loss_sum = 0;
  double z_loss_sum = 0;
  double entropy_sum = 0;
  double normalizer = 1;
  uint64_t valid_rows = 0;
  uint64_t correct_rows = 0;
  uint64_t accumulated_rows = 0;
  uint64_t repeated_rows = 0;
};

// The sums of one loss computation, and what it cost.
struct LossResult {
  // loss_sum / normalizer; with depths the sum of weight * DepthResult::loss. 0 if no row is valid.
  double loss = 0;
  double loss_sum = 0;     // over valid rows: z-loss included, row weights applied
  double z_loss_sum = 0;   // the z-loss part of loss_sum
  double entropy_sum = 0;  // nats; only with LossOutputs::row_entropy
  double normalizer = 1;   // as used; 1 for REDUCTION_SUM and with depths
  // Probability that GRADIENTS_FILTERED left out of the gradients, summed over valid rows.
  double dropped_mass = 0;
  // Of sampled gradients (GRADIENTS_SAMPLED, GRADIENTS_AUTO), summed over valid rows: the expected square of
  // what sampling adds to the gradient of the logits, and the square of that gradient.
  double sampling_variance = 0;
  double squared_gradient = 0;
  // The predicted relative error of the gradients: the square root of their ratio. 0 if nothing was sampled.
  double gradient_error() const;
  v1::ObjectiveSums objective;  // of ComputeOptions::loss.objective; all 0 without one
  // With ComputeOptions::loss.distillation, row weights applied: loss_sum is weight * divergence_sum +
  // target_weight * target_loss_sum. Both are 0 without a distillation; target_loss_sum is 0 too if
  // target_weight is 0.
  double divergence_sum = 0;
  double target_loss_sum = 0;

  uint64_t valid_rows = 0;
  // Ignored since their target is not among the head's classes of a larger vocabulary (HeadSpec.class_list).
  uint64_t unlisted_rows = 0;
  uint64_t correct_rows = 0;        // largest logit is the target's
  uint64_t accumulated_rows = 0;    // valid rows added to the accumulators by this call
  uint64_t repeated_rows = 0;       // valid rows that had been added before (a repeat after a broken call)
  std::vector<DepthResult> depths;  // one for each of Microbatch::depths

  // Where the server stood.
  uint64_t incarnation = 0;
  uint64_t step = 0;
  uint64_t weights_version = 0;  // of the values that were used; 0 from servers that do not number versions

  // Cost.
  double queue_seconds = 0;     // summed over slices: waiting for the device
  double compute_seconds = 0;   // summed over slices: on the device
  double wall_seconds = 0;      // from the call to its result
  uint64_t sent_bytes = 0;      // payload only, repeats included
  uint64_t received_bytes = 0;  // payload only, repeats included
  int streams = 0;
  int repeats = 0;  // streams that were sent again
};

// Called once, on a thread of the client that all callbacks share: hand long work to another thread. Must not
// destroy the Client or the PendingLoss it belongs to, nor wait for another one.
using LossCallback = absl::AnyInvocable<void(const absl::StatusOr<LossResult>&)>;

// A tensor's values as a matrix; vectors have one column.
struct Tensor {
  uint64_t rows = 0;
  uint64_t cols = 0;
  std::vector<float> values;  // [rows, cols]
};

struct TensorShape {
  uint64_t rows = 0;
  uint64_t cols = 0;  // 1 for vectors
};

// Bytes of one element; 0 for DTYPE_UNSPECIFIED and unknown values.
size_t ElementSize(v1::DType dtype);

// What an error of a Client says about a restart: the server is another process than it was, so
// gradients of the open step are gone.
struct Restart {
  uint64_t before = 0;  // incarnations
  uint64_t now = 0;
};
// What an ABORTED error says about a restart; nullopt if it is about something else.
std::optional<Restart> RestartOf(const absl::Status& status);
// Whether an ABORTED error says that the gradients of the open step were zeroed, or a checkpoint was loaded,
// after this client had added rows to them.
bool IsStepDiscarded(const absl::Status& status);

// The field of the UNAVAILABLE error that says that there is no server at ClientOptions::target.
inline constexpr absl::string_view kTargetField = "options.target";

// The structured detail of an error: the server's, if it sent one; else field and value of what the client
// itself refused, with incarnation 0.
std::optional<v1::ErrorDetail> ErrorDetailOf(const absl::Status& status);

}  // namespace lossd::client

namespace lossd::client::internal {

// INVALID_ARGUMENT unless it has at most 128 printable characters. `source` has named it: an option, or a
// variable of the environment.
absl::Status CheckRunName(absl::string_view run, absl::string_view source = "options.run");

// `digits` random hexadecimal digits of the system's, a multiple of 8: for the names that a client gives to
// runs and to calls that a server does once.
std::string RandomDigits(int digits);

// The functions below make the errors of the client itself: arguments that it refuses before anything is
// sent, messages of the server that the protocol does not allow, and steps whose gradients are gone. client.h
// describes these errors to callers.

// INVALID_ARGUMENT "<field> <problem>" for programs, too (ErrorDetailOf):
// ArgumentError("options.streams", 0, "is 0; it must be positive").
inline absl::Status ArgumentError(absl::string_view field, const absl::AlphaNum& value,
                                  absl::string_view problem) {
  return errors::WithViolation(absl::InvalidArgumentError(absl::StrCat(field, " ", problem)),
                               {std::string(field), std::string(problem), std::string(value.Piece())});
}

// INTERNAL "server sent <what>", for a message that the protocol does not allow, where `what` are arguments
// of absl::StrCat: ServerSent("step ", 7, " in answer to step ", 8).
template <typename... What>
absl::Status ServerSent(const What&... what) {
  return absl::InternalError(absl::StrCat("server sent ", what...));
}

// The errors of a trainer's step whose gradients are gone are ABORTED, with a payload by which RestartOf and
// IsStepDiscarded know them.

// With a Restart: the server was another process before, and what it had accumulated for `step` is gone.
absl::Status RestartedError(absl::string_view head, uint64_t before, uint64_t now,
                            std::optional<uint64_t> step);
// The same where no head is known.
absl::Status RestartedError(uint64_t before, uint64_t now);

// The head has gradients of another generation than the rows of the step were added to.
absl::Status DiscardedError(absl::string_view head, uint64_t step, uint64_t before, uint64_t now);
// The server says so: `refusal` is one that RefusesGeneration.
absl::Status DiscardedError(absl::string_view head, uint64_t step, const absl::Status& refusal);
// This client has started the step over while a call of it was under way.
absl::Status DiscardedByThisClientError(absl::string_view head, uint64_t step);

// Whether a call that ended with `status` may end otherwise when it is sent again as it was: UNAVAILABLE; or
// RESOURCE_EXHAUSTED that did not come from the server, whose errors have an ErrorDetail, but from the
// transport, for example "Received RST_STREAM with error code 11" of a server that is short of memory for
// messages. Such a call may have taken effect. A message that is too large for the transport stays too large.
bool IsTransient(const absl::Status& status);

// Whether the server has refused a call because the head has other gradients than the call names.
bool RefusesGeneration(const absl::Status& status);

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_CLIENT_OPTIONS_H_
