// SPDX-License-Identifier: Apache-2.0
// Hands connections that were accepted to gRPC, which else accepts as many as come.
//
// Stateless; thread-safe.
#ifndef LOSSD_SERVER_CONNECTIONS_GRPC_TAKER_H_
#define LOSSD_SERVER_CONNECTIONS_GRPC_TAKER_H_

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <memory>

#include "server/connections/connection_acceptor.h"

namespace lossd::connections {

// Of the server that is being built: gets connections once it is there. The credentials outlive the server.
ConnectionAcceptor::Take GrpcTaker(grpc::ServerBuilder* builder,
                                   const std::shared_ptr<grpc::ServerCredentials>& credentials);

}  // namespace lossd::connections

#endif  // LOSSD_SERVER_CONNECTIONS_GRPC_TAKER_H_
