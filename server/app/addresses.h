// SPDX-License-Identifier: Apache-2.0
// The addresses of a server, and the security of its connections. ParseAddresses reads addresses from a flag
// ("host:port", or "unix:PATH" for a Unix socket). OpenSockets listens on them. WritePortFile writes the
// ports to a file, for programs that start the server. Security has the certificates, tokens and roles.
// CheckGrpcAddress and CheckHttpAddress check that a server may listen at an address with its security
// options.
//
// All classes and functions are thread-safe.
#ifndef LOSSD_SERVER_APP_ADDRESSES_H_
#define LOSSD_SERVER_APP_ADDRESSES_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/access/audit_log.h"
#include "server/access/authority.h"
#include "server/access/certificates.h"
#include "server/access/listening_socket.h"
#include "server/app/server_options.h"
#include "server/metrics/http_server.h"
#include "server/rpc/access_control.h"
#include "server/rpc/transport.h"

namespace lossd::app {

struct Address {
  // The host in the form in which it was given. An IPv6 address keeps its brackets. For a Unix socket it is
  // the whole address, "unix:PATH".
  std::string host;
  int port = 0;  // kUnixSocket for a Unix socket
  static constexpr int kUnixSocket = -1;
  std::string text() const;
  // The path of a Unix socket: "/run/lossd" for "unix:/run/lossd" and for "unix:///run/lossd".
  std::string socket_path() const;
};

// Parses "host:port" with a port in [0, 65535], or "unix:" and a path that the system accepts. Otherwise
// returns INVALID_ARGUMENT, which names `option`.
absl::StatusOr<Address> ParseAddress(absl::string_view option, absl::string_view text);

// Parses one or more addresses with commas between them. INVALID_ARGUMENT as ParseAddress, or if an address
// is given twice.
absl::StatusOr<std::vector<Address>> ParseAddresses(absl::string_view option, absl::string_view text);

// True for localhost, 127.0.0.0/8, [::1] and Unix sockets.
bool IsLoopback(const Address& address);

// Listens on all gRPC addresses of a server, and replaces port 0 in `addresses` by the actual ports.
// `unix_mode`: permissions of the files of Unix sockets. UNAVAILABLE naming the option `listen`.
absl::StatusOr<std::vector<access::ListeningSocket>> OpenSockets(std::vector<Address>* addresses,
                                                                 uint32_t unix_mode);

// The texts of the addresses with commas between them.
std::string TextOf(const std::vector<Address>& addresses);

// Writes {"grpc": ..., "http": ...} with the actual addresses to `path`, for programs that start the server
// on any free port. A reader sees either the complete file or no file. After an error, which names the path,
// there is no file.
absl::Status WritePortFile(const std::string& path, const std::string& grpc, const std::string& http);

// Security makes the certificates, tokens and roles of a server from its options, for gRPC and for HTTP.

// Whether the options require callers to authenticate.
bool Asks(const SecurityOptions& options);

// Check that a server with these options may listen at the address. INVALID_ARGUMENT names `listen` or
// `http`, and the missing option.
absl::Status CheckGrpcAddress(const SecurityOptions& options, const Address& address);
absl::Status CheckHttpAddress(const SecurityOptions& options, const Address& address);

class Security {
 public:
  // Reads the files. INVALID_ARGUMENT, which names option and path, if a file is not valid or options
  // contradict each other. `name_at` returns the owner of a gRPC connection from a loopback address, for the
  // log.
  static absl::StatusOr<std::unique_ptr<Security>> Create(const SecurityOptions& options,
                                                          rpc::AccessControl::NameAt name_at = nullptr);

  // Whether callers must authenticate.
  bool asks() const { return authority_->asks(); }
  // The results of the following functions live as long as this object.
  const rpc::AccessControl& access_control() const { return access_control_; }
  const std::shared_ptr<grpc::ServerCredentials>& credentials() const { return credentials_; }
  // The credentials of the service for other ranks. They have the same certificate. They ask for no client
  // certificates, because ranks are admitted by their secret.
  const std::shared_ptr<grpc::ServerCredentials>& rank_credentials() const { return rank_credentials_; }
  metrics::HttpSecurity http();
  access::ReloadedTls* tls() const { return tls_.get(); }  // null: no TLS

  // A description for the log, such as "plaintext, no authentication" or "TLS, client certificates, tokens".
  std::string Text() const;

 private:
  Security(const SecurityOptions& options, std::unique_ptr<access::ReloadedTls> tls,
           std::unique_ptr<access::Authority> authority, rpc::AccessControl::NameAt name_at)
      : options_(options),
        tls_(std::move(tls)),
        authority_(std::move(authority)),
        access_control_(authority_.get(), &audit_, std::move(name_at)),
        credentials_(MakeCredentials()),
        rank_credentials_(tls_ == nullptr ? grpc::InsecureServerCredentials()
                                          : rpc::TlsCredentials(tls_.get(), rpc::ClientCertificates::kNone)) {
  }

  std::shared_ptr<grpc::ServerCredentials> MakeCredentials() const;
  std::optional<metrics::HttpResponse> GuardHttp(const metrics::HttpRequest& request, absl::string_view path);
  // OK if the token of the request has the role that the path needs. Sets `name` to the token's owner, if the
  // server knows the token.
  absl::Status CheckHttp(const metrics::HttpRequest& request, absl::string_view path,
                         std::string* name) const;

  const SecurityOptions options_;
  const std::unique_ptr<access::ReloadedTls> tls_;  // null: no TLS
  const std::unique_ptr<access::Authority> authority_;
  access::AuditLog audit_;
  const rpc::AccessControl access_control_;
  // gRPC uses these after the server has started.
  const std::shared_ptr<grpc::ServerCredentials> credentials_;
  const std::shared_ptr<grpc::ServerCredentials> rank_credentials_;
};

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_ADDRESSES_H_
