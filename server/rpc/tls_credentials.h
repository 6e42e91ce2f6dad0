// SPDX-License-Identifier: Apache-2.0
// gRPC over TLS with certificates that are looked up again for each connection, so that new files are taken
// without a restart. Connections that stand keep theirs.
#ifndef LOSSD_SERVER_RPC_TLS_CREDENTIALS_H_
#define LOSSD_SERVER_RPC_TLS_CREDENTIALS_H_

#include <grpcpp/security/server_credentials.h>

#include <memory>

#include "server/access/tls_material.h"

namespace lossd::rpc {

enum class ClientCertificates {
  kNone,      // are not asked for
  kOptional,  // are verified if there is one
  kRequired,  // a client without a valid one gets no connection
};

// `material` outlives the credentials, and the credentials outlive every server that has them: gRPC does not
// keep them. TLS 1.2 or 1.3.
std::shared_ptr<grpc::ServerCredentials> TlsCredentials(access::ReloadedTls* material,
                                                        ClientCertificates clients);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_TLS_CREDENTIALS_H_
