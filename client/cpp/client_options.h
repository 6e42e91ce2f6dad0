// SPDX-License-Identifier: Apache-2.0
// The public types of the C++ client (client.h, which includes this file): what a client is made with
// (ClientOptions, Credentials), what its calls take and return (Microbatch, ComputeOptions, LossResult), and
// how a program reads its errors (RestartOf, ErrorDetailOf). The functions in the namespace `internal` make
// those errors, for the client alone.
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

// What Credentials are made from. Each file is in PEM format and is read once, when the Credentials are made.
// An empty string means that there is no such file or token.
struct CredentialOptions {
  // A file with the certificates of the authorities that sign servers' certificates. If it is given, the
  // connection uses TLS, and the server's certificate must be valid for the host in ClientOptions::target.
  std::string ca;
  // Files with the client's own certificate chain and with its key, for servers with --tls_client_ca. Both
  // are given or none, and only together with `ca`.
  std::string cert;
  std::string key;
  // The token itself, for servers with --token_file. The client sends it only over TLS, to a loopback address
  // or to a Unix socket.
  std::string token;
};

// How a client proves who it is and whom it trusts. Immutable and thread-safe.
class Credentials {
 public:
  // Plain TCP: no encryption, no identity. For loopback and networks trusted as a whole.
  static std::shared_ptr<const Credentials> Insecure();

  // INVALID_ARGUMENT, naming the option and the path, if a file cannot be read or used, or if options
  // contradict each other.
  static absl::StatusOr<std::shared_ptr<const Credentials>> Create(const CredentialOptions& options);

  // Credentials, or their options, from the environment variables LOSSD_CA, LOSSD_CERT, LOSSD_KEY (paths) and
  // LOSSD_TOKEN (the token).
  static absl::StatusOr<std::shared_ptr<const Credentials>> FromEnvironment();
  static CredentialOptions OptionsFromEnvironment();

  virtual ~Credentials() = default;
};

// Whether a gRPC target is a loopback address, localhost or a Unix socket.
bool IsLocalTarget(absl::string_view target);

// The value of an environment variable; empty if it is not set.
std::string EnvironmentVariable(const char* name);

// The value of the environment variable LOSSD_SERVER; "127.0.0.1:7070" if it is empty.
std::string TargetFromEnvironment();

// The value of the environment variable LOSSD_TRANSPORT; "auto" if it is empty.
std::string TransportFromEnvironment();

// The value of the environment variable LOSSD_RUN; if it is empty, "<host>:<pid>-<8 random hexadecimal
// digits>", which no other client has.
std::string RunFromEnvironment();

// How many connections the client has, and why.
struct ConnectionChoice {
  int connections = 1;
  std::string reason;  // a text for users
};

// How rows in GPU memory (Memory::kDevice) travel, and why. It covers all GPUs that rows came from so far; if
// there were several GPUs, the reason names the transport of each.
struct DeviceTransportChoice {
  // "cuda_ipc"; or the transport of rows in host memory, if the rows of at least one GPU are copied to the
  // host.
  std::string transport;
  std::string reason;  // a text for users
};

// How rows travel, and why.
struct TransportChoice {
  std::string transport;  // of rows in host memory: "shared_memory" or "grpc"
  std::string reason;     // a text for users
  ConnectionChoice connections;
  DeviceTransportChoice device;
};

// How often, and after which waits, the client repeats a call: one whose connection broke, or one that begins
// again because the weights have changed.
struct RetryOptions {
  int max_attempts = 3;  // attempts of one call, or of one stream of ComputeLoss, with the first; at least 1
  absl::Duration initial_backoff = absl::Milliseconds(250);  // grows fourfold with every attempt, with jitter
  absl::Duration max_backoff = absl::Seconds(5);
};

struct ClientOptions {
  std::string target = TargetFromEnvironment();    // host:port, or any gRPC target name
  std::shared_ptr<const Credentials> credentials;  // null: Credentials::FromEnvironment()

  // The number of connections to the server, in [1, 64]. The streams of loss computations are spread over
  // them. Nullopt: the client begins with one connection and opens more, up to 8, as long as each further
  // connection makes rows in messages travel faster.
  std::optional<int> channels;
  absl::Duration connect_timeout = absl::Seconds(10);
  bool wait_for_server = false;  // wait for a server that is not there yet, e.g. while it starts
  int64_t max_message_bytes = int64_t{64} << 20;  // the limit of one message, sent or received

  // Defaults for calls that name no timeout of their own.
  absl::Duration call_timeout = absl::Seconds(60);      // for descriptions, gradient norms, steps
  absl::Duration transfer_timeout = absl::Minutes(30);  // for creation, tensors, checkpoints
  absl::Duration loss_timeout = absl::Minutes(10);      // for ComputeLoss with all its repeats and waits

  // The client closes a connection if the server takes no data from it for this long. A call may end later
  // than its timeout by at most this time, because the call waits until no send queue holds the caller's
  // memory any more.
  absl::Duration dead_peer_timeout = absl::Seconds(30);

  RetryOptions retry;

  // How the rows of loss computations travel:
  //   "grpc"           In messages.
  //   "shared_memory"  In host memory that client and server share. Both have to be on one host.
  //   "cuda_ipc"       Rows of any GPU (Memory::kDevice): in memory of the server's nearest GPU, which this
  //                    process has to see. Rows of the host: as with "auto".
  //   "auto"           Rows on a GPU of the server: in memory of that GPU. Other rows: in shared memory. In
  //                    messages if the memory cannot be had.
  // With "shared_memory" and "cuda_ipc" Connect fails if the server does not share such memory. A slice that
  // finds no room in the memory travels in messages.
  std::string transport = TransportFromEnvironment();
  // The bytes of shared memory that the client asks for: this number of host memory, and the same number of
  // the memory of each GPU. The client asks when a call first needs the memory, and the server may give less.
  // Nullopt: the client asks for 4 MiB at first, and later for about four times the rows of the largest call,
  // up to 256 MiB.
  std::optional<int64_t> shared_memory_bytes;

  // A name for the program that trains, of at most 128 printable characters. A head records which run applied
  // its last step (v1::HeadHistory), and errors say which other run trains the head. Processes of one
  // training may share a name. Empty: the program has no name.
  std::string run = RunFromEnvironment();

  // The incarnation that the server must have, which the caller knows from an earlier client: for scripts
  // that call one program after the other. If the server is another process by now, Connect and calls that
  // accumulate or apply gradients fail as after a restart. 0: any server process is accepted.
  uint64_t expected_incarnation = 0;

  // With the transport "cuda_ipc": Connect opens memory of this GPU if it is one of the server's. The number
  // is the one that this process has for the GPU. Nullopt: the GPU that the calling thread works on.
  std::optional<int> gpu;
};

// Whether the caller's hidden states and their gradients are in host memory or on a GPU (kDevice).
//
// kDevice is memory of a GPU of this host as CUDA's driver and runtime allocate it. The GPU need not be the
// server's, and any transport (ClientOptions) may be used: the client copies rows to and from memory of the
// server's GPU, or through host memory.
// The client copies on CUDA streams of its own. So work that writes the hidden states, or still uses the
// memory of the gradients, must have ended before the call begins (cudaStreamSynchronize), or must be on the
// stream that Microbatch::stream names. When the call is done, work on any stream may use the gradients. The
// first such call loads CUDA's driver, which takes a moment.
// INVALID_ARGUMENT if the memory is not that of a GPU, or if hidden states and gradients are on different
// GPUs. UNAVAILABLE if there is no driver, or if the driver fails; such a failure counts as a broken stream.
enum class Memory { kHost, kDevice };

// A run of consecutive rows of a microbatch with their own weight and normalizer in the loss. Example: the
// rows that predict the token after the next one. See lossd.v1.Depth.
struct Depth {
  uint64_t rows = 0;
  float weight = 1.0f;  // multiplies the loss and the gradients of the rows; finite, >= 0
  // With REDUCTION_MEAN: the divisor of the sum over the rows. Nullopt: the number of valid targets of the
  // rows; with loss.use_class_weights it must be given.
  std::optional<double> normalizer;
  // The hidden states of the rows and their gradients, [rows, D] each; not owned. They are for callers whose
  // depths do not lie one behind the other in memory; then Microbatch::hidden and LossOutputs::grad_hidden
  // are null. `hidden` is set in all depths or in none, and so is `grad_hidden`. Both may be null in a depth
  // without rows.
  const void* hidden = nullptr;
  void* grad_hidden = nullptr;
};

// The input of one loss computation: its rows. With `embedding`, the input of a call for embedding rows.
struct Microbatch {
  std::string head;
  // The open step that the gradients belong to. Required with ComputeOptions::accumulate_gradients.
  std::optional<uint64_t> step;
  // Names the microbatch within (head, step). Sending the same id again with the same contents is safe.
  uint64_t id = 0;

  uint64_t hidden_size = 0;  // D
  v1::DType hidden_dtype = v1::DTYPE_BF16;
  // Hidden states, [N, D] of hidden_dtype; not owned. May be null if N == 0, if no row is valid, or if
  // `depths` have the hidden states.
  const void* hidden = nullptr;
  Memory memory = Memory::kHost;  // where `hidden` and LossOutputs::grad_hidden are
  // With Memory::kDevice: a CUDA stream (cudaStream_t, CUstream) of the GPU that has `hidden`. The client's
  // copies wait, on the GPU, for the work that was put on the stream before the call, and not for later work.
  // The earlier work must not wait for calls of this client. The stream may be destroyed before the call is
  // done. A null pointer is CUDA's default stream; with nullopt the copies wait for no stream.
  std::optional<void*> stream;
  // The targets; their count is N. Each is a class in [0, V) or ComputeOptions::loss.ignore_index. Copied.
  absl::Span<const int32_t> targets;
  // Empty, or [N]: factors of the rows' losses and gradients. Copied.
  absl::Span<const float> row_weights;
  // The per-row inputs of ComputeOptions::loss.objective. Each is [N] and finite if the objective needs it,
  // else empty. Copied.
  absl::Span<const float> advantages;
  absl::Span<const float> old_logprobs;
  absl::Span<const float> ref_logprobs;
  // Divides the rows into depths, in order: at most 64 depths, with N rows in all. Empty: the rows are not
  // divided. Not with REDUCTION_NONE. The server reads the weights once for all depths.
  std::vector<Depth> depths;

  // With ComputeOptions::loss.distillation: the teacher's hidden states of the rows, [N, teacher_hidden_size]
  // of hidden_dtype, in the same kind of memory as `hidden`; not owned.
  const void* teacher_hidden = nullptr;
  uint64_t teacher_hidden_size = 0;
  // With ComputeOptions::loss.rest: soft targets. Each row has `target_count` classes with their weights;
  // both arrays are [N, target_count], as in lossd.v1.OpenMicrobatch. Copied.
  absl::Span<const int32_t> target_classes;
  absl::Span<const float> target_weights;
  uint32_t target_count = 0;  // at most 256
  // If set, the call computes no loss: the head's weight serves as an embedding, and `targets` are token ids
  // in [0, V).
  //   EMBEDDING_ROWS       `hidden` is null, and LossOutputs::grad_hidden gets the row of the weight that
  //                        each id names, rounded to hidden_dtype; zeros for
  //                        ComputeOptions::loss.ignore_index. Client::ComputeLoss begins again, as for a
  //                        loss, if the weights change meanwhile.
  //   EMBEDDING_GRADIENTS  `hidden` has the gradient with respect to each row. It is added, times
  //                        ComputeOptions::grad_output, to the gradient of the weight's row, exactly once.
  //                        `id` must name a microbatch of its own, not that of a loss. Needs
  //                        ComputeOptions::accumulate_gradients.
  // ComputeOptions::reduction does not matter. The call must ask for no other option or result of a loss. In
  // its LossResult only the counts of rows, the versions and the costs have a meaning.
  v1::Embedding embedding = v1::EMBEDDING_UNSPECIFIED;
  // The classes whose log probabilities LossOutputs::class_logprobs receives: [K] if they are the same for
  // all rows, else [N, K], where K is LossOutputs::class_count. Each class is in [0, V); order and repeats
  // are free. Copied.
  absl::Span<const int32_t> classes;
};

// The caller's buffers for results; not owned. The server computes and sends only results that have a buffer.
// After an error the contents of the buffers are unspecified.
struct LossOutputs {
  // dL/dx, [N, D] of Microbatch::hidden_dtype; 0 for ignored rows. Null if not wanted.
  void* grad_hidden = nullptr;
  // Results per row. Each span is empty (not wanted) or [N]. Logarithms are natural; values of ignored rows
  // are 0.
  absl::Span<float> row_loss;
  absl::Span<float> row_lse;       // log sum exp of the logits
  absl::Span<float> row_entropy;   // entropy of the softmax, in nats
  absl::Span<float> row_logprob;   // log p of the target
  absl::Span<int32_t> row_argmax;  // class of the largest logit; -1 for ignored rows
  // [N, class_count]: log p of Microbatch::classes. class_count is at most 256; if it is 0, the span is
  // empty.
  absl::Span<float> class_logprobs;
  uint32_t class_count = 0;
  // The `top_k` most probable classes of each row and their log p: [N, top_k] each, empty if top_k is 0. The
  // most probable class comes first, and the smaller one of equally probable classes. Ignored rows have class
  // -1 and log p 0. top_k is at most 128, and at most V.
  absl::Span<float> top_logprobs;
  absl::Span<int32_t> top_classes;
  uint32_t top_k = 0;
};

// How a loss is computed, and how its rows travel.
struct ComputeOptions {
  v1::LossOptions loss;

  // Loss and gradient scale.
  // With REDUCTION_NONE the call computes no gradients (see `retain`), and LossResult::loss is the sum.
  v1::Reduction reduction = v1::REDUCTION_MEAN;
  // With REDUCTION_MEAN: the divisor of the sums. Nullopt: the number of valid targets of the microbatch;
  // with loss.use_class_weights it must be given (the sum of u_y over valid rows). With Microbatch::depths it
  // must be nullopt, because each depth has its own normalizer.
  std::optional<double> normalizer;
  // The gradient of the final objective with respect to this loss. It multiplies every gradient. Nullopt
  // means 1.
  std::optional<float> grad_output;
  // Whether to add dL/dW, dL/db, ... to the head's accumulated gradients. Each row is added at most once,
  // even if connections break.
  bool accumulate_gradients = false;
  // With REDUCTION_NONE: whether the server retains the hidden states, under Microbatch::id, for
  // Client::Backward.
  bool retain = false;

  // How rows travel.
  // The number of concurrent streams. A computation has fewer streams if it has few rows, or if other
  // computations use the client's spare streams: every computation has one stream of its own, and all
  // computations share 64 spare ones. 0: one stream per connection; for rows in shared host memory one stream
  // for each 8 MiB of rows, at most four and at most half of the machine's cores, unless the server is
  // deterministic.
  int streams = 0;
  // The most bytes of hidden states in one slice; the limits of the server bound a slice too. Nullopt: 1 MiB
  // in a message, 4 MiB in shared host memory, and in shared GPU memory a quarter of that memory.
  std::optional<uint64_t> slice_bytes;

  absl::Duration timeout = absl::ZeroDuration();  // zero: ClientOptions::loss_timeout
  int max_attempts = 0;                           // zero: RetryOptions::max_attempts

  // The callback takes microseconds. The client may then call it on any of its threads, several callbacks at
  // the same time, which saves the time of waking the thread of callbacks.
  bool short_callback = false;
};

// The input of Client::Backward: the upstream gradients of the rows of a microbatch that was computed with
// ComputeOptions::retain.
struct RetainedGradients {
  std::string head;
  // The step in which the rows were retained; it must still be open. Required with accumulate_gradients.
  std::optional<uint64_t> step;
  uint64_t id = 0;  // Microbatch::id

  uint64_t hidden_size = 0;                 // D
  v1::DType hidden_dtype = v1::DTYPE_BF16;  // as when the rows were retained
  Memory memory = Memory::kHost;            // where the `grad_hidden` of Client::Backward is
  std::optional<void*> stream;              // as Microbatch::stream, of the GPU that has `grad_hidden`
  // [N], finite: the gradient of the objective with respect to each row's loss. The values of ignored rows do
  // not matter. Copied.
  absl::Span<const float> grad_loss;
  // Each is empty (zeros) or [N]: the gradient with respect to each row's log sum exp and entropy. Copied.
  absl::Span<const float> grad_lse;
  absl::Span<const float> grad_entropy;
};

// The options of Client::Backward. Each member means what it means in ComputeOptions.
struct BackwardOptions {
  bool accumulate_gradients = false;
  int streams = 0;
  absl::Duration timeout = absl::ZeroDuration();
  int max_attempts = 0;
  bool short_callback = false;
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
  double normalizer = 1;   // the divisor that was used; 1 for REDUCTION_SUM and with depths
  // The probability that GRADIENTS_FILTERED left out of the gradients, summed over valid rows.
  double dropped_mass = 0;
  // For sampled gradients (GRADIENTS_SAMPLED, GRADIENTS_AUTO), summed over valid rows: the expected square of
  // the error that sampling adds to the gradient of the logits, and the square of that gradient.
  double sampling_variance = 0;
  double squared_gradient = 0;
  // The predicted relative error of the gradients: sqrt(sampling_variance / squared_gradient). 0 if nothing
  // was sampled.
  double gradient_error() const;
  v1::ObjectiveSums objective;  // of ComputeOptions::loss.objective; all 0 without one
  // With ComputeOptions::loss.distillation, row weights applied: loss_sum is weight * divergence_sum +
  // target_weight * target_loss_sum. Both are 0 without a distillation; target_loss_sum is 0 too if
  // target_weight is 0.
  double divergence_sum = 0;
  double target_loss_sum = 0;

  uint64_t valid_rows = 0;
  // Rows that a head with a draft vocabulary ignored, because their target is not in HeadSpec.class_list.
  uint64_t unlisted_rows = 0;
  uint64_t correct_rows = 0;        // largest logit is the target's
  uint64_t accumulated_rows = 0;    // valid rows added to the accumulators by this call
  uint64_t repeated_rows = 0;       // valid rows that had been added before (a repeat after a broken call)
  std::vector<DepthResult> depths;  // one for each of Microbatch::depths

  // The state of the server that computed the results.
  uint64_t incarnation = 0;
  uint64_t step = 0;
  uint64_t weights_version = 0;  // of the weights that were used; 0 if the server does not report one

  // Cost.
  double queue_seconds = 0;     // time that slices waited for the device, summed
  double compute_seconds = 0;   // time of slices on the device, summed
  double wall_seconds = 0;      // the time from the call to its result
  uint64_t sent_bytes = 0;      // payload only, with repeats
  uint64_t received_bytes = 0;  // payload only, with repeats
  int streams = 0;
  int repeats = 0;  // streams that were sent again
};

// The callback of a loss computation. The client calls it once, on a thread that all callbacks of the client
// share (or see ComputeOptions::short_callback), so long work belongs on another thread. The callback must
// not destroy the Client or its own PendingLoss, and must not wait for another PendingLoss.
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

// A restart of the server that an error of a Client reports: the server is another process than before, so
// the gradients of the open step are lost.
struct Restart {
  uint64_t before = 0;  // incarnations
  uint64_t now = 0;
};
// The restart that an ABORTED error reports; nullopt if the error has another cause.
std::optional<Restart> RestartOf(const absl::Status& status);
// Whether an ABORTED error says that the gradients of the open step were zeroed, or a checkpoint was loaded,
// after this client had added rows to them.
bool IsStepDiscarded(const absl::Status& status);

// The field that the UNAVAILABLE error names if there is no server at ClientOptions::target.
inline constexpr absl::string_view kTargetField = "options.target";

// The structured detail of an error: the detail that the server sent, if there is one; else the field and the
// value that the client itself refused, with incarnation 0.
std::optional<v1::ErrorDetail> ErrorDetailOf(const absl::Status& status);

}  // namespace lossd::client

namespace lossd::client::internal {

// INVALID_ARGUMENT unless `run` has at most 128 printable characters. `source` is the name of the option or
// environment variable that gave the run, for the error.
absl::Status CheckRunName(absl::string_view run, absl::string_view source = "options.run");

// Returns `digits` (a multiple of 8) random hexadecimal digits from the system's source of randomness. The
// client uses them to name runs, and calls that a server carries out only once.
std::string RandomDigits(int digits);

// The functions below make the errors of the client itself: arguments that it refuses before anything is
// sent, messages of the server that the protocol does not allow, and steps whose gradients are gone. client.h
// describes these errors to callers.

// INVALID_ARGUMENT with the message "<field> <problem>"; ErrorDetailOf returns field and value. Example:
// ArgumentError("options.streams", 0, "is 0; it must be positive").
inline absl::Status ArgumentError(absl::string_view field, const absl::AlphaNum& value,
                                  absl::string_view problem) {
  return errors::WithViolation(absl::InvalidArgumentError(absl::StrCat(field, " ", problem)),
                               {std::string(field), std::string(problem), std::string(value.Piece())});
}

// INTERNAL "server sent <what>", for a message that the protocol does not allow. `what` are arguments of
// absl::StrCat. Example: ServerSent("step ", 7, " in answer to step ", 8).
template <typename... What>
absl::Status ServerSent(const What&... what) {
  return absl::InternalError(absl::StrCat("server sent ", what...));
}

// The errors for a step whose gradients are lost. They are ABORTED and have a payload that RestartOf and
// IsStepDiscarded read.

// An error with a Restart: the server was another process before, and the gradients that it had accumulated
// for `step` are lost.
absl::Status RestartedError(absl::string_view head, uint64_t before, uint64_t now,
                            std::optional<uint64_t> step);
// As above, for an error that is not about one head.
absl::Status RestartedError(uint64_t before, uint64_t now);

// The head has gradients of another generation than the rows of the step were added to.
absl::Status DiscardedError(absl::string_view head, uint64_t step, uint64_t before, uint64_t now);
// As above, for an error of the server: `refusal` is a status for which RefusesGeneration is true.
absl::Status DiscardedError(absl::string_view head, uint64_t step, const absl::Status& refusal);
// This client has started the step again while a call of the step was under way.
absl::Status DiscardedByThisClientError(absl::string_view head, uint64_t step);

// Whether a call that ended with `status` may succeed when the same call is sent again. True for UNAVAILABLE.
// True for RESOURCE_EXHAUSTED that comes from the transport and not from the server; errors of the server
// have an ErrorDetail. An example is "Received RST_STREAM with error code 11" from a server that is short of
// memory for messages. False for a message that is too large for the transport, because it stays too large. A
// call for which this is true may have taken effect.
bool IsTransient(const absl::Status& status);

// Whether the server refused a call because the head's gradients are of another generation than the call
// names.
bool RefusesGeneration(const absl::Status& status);

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_CLIENT_OPTIONS_H_
