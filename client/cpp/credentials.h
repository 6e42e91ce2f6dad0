// SPDX-License-Identifier: Apache-2.0
// How a client proves who it is, and how it knows who the server is.
#ifndef LOSSD_CLIENT_CPP_CREDENTIALS_H_
#define LOSSD_CLIENT_CPP_CREDENTIALS_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

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

}  // namespace lossd::client

#endif  // LOSSD_CLIENT_CPP_CREDENTIALS_H_
