// SPDX-License-Identifier: Apache-2.0
// gRPC's own messages as lines of the log. gRPC writes one for each TLS handshake that fails, which whoever
// reaches the port can cause, so that their number is bounded (log::LineBudget).
#ifndef LOSSD_SERVER_RPC_GRPC_LOG_H_
#define LOSSD_SERVER_RPC_GRPC_LOG_H_

namespace lossd::rpc {

// For the whole process; may be repeated. Thread-safe.
void LogGrpcMessages();

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_GRPC_LOG_H_
