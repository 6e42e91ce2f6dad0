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

// Limits of gRPC: memory, calls of a connection, the size of a message, and how long a connection may take to
// begin or be idle.
struct TransportOptions {
  // Messages that are being received, and buffers of connections. At its end gRPC takes no new connections
  // and cancels calls. A call that is behind holds one message and a window of 1/1024 of this. 0: 256 MiB, or
  // 16 messages if that is more.
  int64_t bytes = 0;
  int64_t max_message_bytes = int64_t{5} << 20;  // received or sent
  int64_t max_calls_per_connection = 320;
  absl::Duration handshake_timeout = absl::Seconds(20);        // of TLS and HTTP/2
  absl::Duration idle_connection_timeout = absl::Minutes(30);  // without a call
  // After that a connection takes no new calls, for which clients make another one by themselves, and ends
  // with its last.
  absl::Duration connection_age = absl::Hours(1);
};

void Configure(const TransportOptions& options, grpc::ServerBuilder* builder);

enum class ClientCertificates {
  kNone,      // are not asked for
  kOptional,  // are verified if there is one
  kRequired,  // a client without a valid one gets no connection
};

// gRPC over TLS. Certificates are looked up again for each connection, so new files are taken without a
// restart; open connections keep theirs. `material` outlives the credentials, and the credentials outlive
// every server that has them: gRPC does not keep them. TLS 1.2 or 1.3.
std::shared_ptr<grpc::ServerCredentials> TlsCredentials(access::ReloadedTls* material,
                                                        ClientCertificates clients);

// From now on gRPC's own messages are lines of the log. Anyone who reaches the port can make a TLS handshake
// fail, and gRPC writes a message for each such handshake, so the number of lines is bounded
// (log::LineBudget). For the whole process; may be repeated.
void LogGrpcMessages();

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_TRANSPORT_H_
