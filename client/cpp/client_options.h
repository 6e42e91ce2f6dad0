// SPDX-License-Identifier: Apache-2.0
// What a client is made with: its options, and the credentials by which it proves who it is and knows who the
// server is. Also what the errors of a Client say to programs. client.h includes this file.
//
// Functions are stateless and thread-safe; structs are plain data.
#ifndef LOSSD_CLIENT_CPP_CLIENT_OPTIONS_H_
#define LOSSD_CLIENT_CPP_CLIENT_OPTIONS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
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

// How rows in memory of GPUs (Memory::kDevice) travel, and why: of all GPUs that rows came from so far. The
// reason has the way of each if there were several.
struct DeviceTransportChoice {
  // "cuda_ipc", or as rows of the host, which rows of some GPU are copied to then.
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

// How calls are sent again: those that break, and those that begin again when what they look at changes.
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

  // A connection whose peer takes no data for this long is given up. It also bounds how much later than its
  // timeout a call may end, since the caller's memory must not be in a send queue any more.
  absl::Duration dead_peer_timeout = absl::Seconds(30);

  RetryOptions retry;

  // How the rows of loss computations travel: "grpc", in messages; "shared_memory", in memory that client and
  // server share, which both have to be on one host for; "cuda_ipc", rows of any GPU (Memory::kDevice) in
  // memory of the server's nearest GPU, which this process has to see, and others as with "auto"; "auto",
  // rows on a GPU of the server in memory of that one, others in shared memory, if it can be had. With
  // "shared_memory" and "cuda_ipc" Connect fails if the memory cannot be had. A slice that finds no room in
  // the memory travels in messages.
  std::string transport = TransportFromEnvironment();
  // Asked for, of the host's memory and of each GPU's as they are needed; the server may give less. Nullopt:
  // 4 MiB of each at first, and up to 256 MiB as calls need them: about four times the rows of the largest.
  std::optional<int64_t> shared_memory_bytes;

  // Names the program that trains, in at most 128 printable characters: a head says who applied its last step
  // (v1::HeadHistory), and errors say which other program trains it. Processes of one training may share a
  // name. "": no name.
  std::string run = RunFromEnvironment();

  // 0: the client takes the server as it finds it. Otherwise the incarnation that the caller knows from
  // before (a script that calls one program after the other): Connect, and calls that accumulate or apply
  // gradients, fail as after a restart if the server is another process by now.
  uint64_t expected_incarnation = 0;
};

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

// INVALID_ARGUMENT naming options.run unless it has at most 128 printable characters.
// client/python/src/lossd/_run.py does the same.
absl::Status CheckRunName(absl::string_view run);

// `digits` random hexadecimal digits of the system's, a multiple of 8: for the names that a client gives to
// runs and to calls that a server does once.
std::string RandomDigits(int digits);

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_CLIENT_OPTIONS_H_
