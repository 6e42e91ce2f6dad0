// SPDX-License-Identifier: Apache-2.0
#include "server/connections/grpc_taker.h"

namespace lossd::connections {

ConnectionAcceptor::Take GrpcTaker(grpc::ServerBuilder* builder,
                                   const std::shared_ptr<grpc::ServerCredentials>& credentials) {
  const std::shared_ptr<grpc::experimental::ExternalConnectionAcceptor> taker =
      builder->experimental().AddExternalConnectionAcceptor(
          grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, credentials);
  return [taker](int listener, int connection) {
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters accepted;
    accepted.listener_fd = listener;
    accepted.fd = connection;
    taker->HandleNewConnection(&accepted);
  };
}

}  // namespace lossd::connections
