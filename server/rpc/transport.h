// SPDX-License-Identifier: Apache-2.0
// The functions that set up gRPC's transport: Configure sets gRPC's own limits, TlsCredentials makes the
// credentials of a server with TLS, and LogGrpcMessages turns gRPC's messages into lines of the log.
//
// All functions are stateless and thread-safe.
#ifndef LOSSD_SERVER_RPC_TRANSPORT_H_
#define LOSSD_SERVER_RPC_TRANSPORT_H_

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <cstdint>
#include <memory>

#include "absl/time/time.h"
#include "server/access/certificates.h"

namespace lossd::rpc {

// gRPC's own limits: its memory, the calls on a connection, the size of a message, and the times of a
// connection.
struct TransportOptions {
  // The memory of gRPC: messages that are being received, and buffers of connections. When it is used up,
  // gRPC takes no new connections and cancels calls. A call whose messages the server has not read yet holds
  // one message and a window of 1/1024 of this memory. 0: 256 MiB, or 16 messages if that is more.
  int64_t bytes = 0;
  int64_t max_message_bytes = int64_t{5} << 20;  // of a message, received or sent
  int64_t max_calls_per_connection = 320;
  absl::Duration handshake_timeout = absl::Seconds(20);        // for TLS and HTTP/2
  absl::Duration idle_connection_timeout = absl::Minutes(30);  // a connection without a call ends
  // After this time a connection takes no new calls, and ends when its last call ends. Clients open another
  // connection for new calls by themselves.
  absl::Duration connection_age = absl::Hours(1);
};

// Sets these limits in `builder`.
void Configure(const TransportOptions& options, grpc::ServerBuilder* builder);

// Whether the server asks clients for TLS certificates.
enum class ClientCertificates {
  kNone,      // does not ask
  kOptional,  // verifies a certificate if the client has one
  kRequired,  // a client without a valid one gets no connection
};

// The credentials of a server with TLS 1.2 or 1.3. Certificates are looked up again for each connection, so
// the server uses new files without a restart; open connections keep their certificates. `material` must
// outlive the credentials. The credentials must outlive every server that uses them, because gRPC does not
// own them.
std::shared_ptr<grpc::ServerCredentials> TlsCredentials(access::ReloadedTls* material,
                                                        ClientCertificates clients);

// From now on gRPC's own messages become lines of the server's log. Anyone who reaches the port can make a
// TLS handshake fail, and gRPC writes a message for each such handshake, so the number of lines is bounded
// (log::LineBudget). Has effect on the whole process. May be repeated.
void LogGrpcMessages();

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_TRANSPORT_H_
