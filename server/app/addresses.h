// SPDX-License-Identifier: Apache-2.0
// The addresses of a server and who may come in by them. ParseAddresses reads addresses from a flag
// ("host:port", or "unix:PATH" of a Unix socket), OpenSockets listens on them, and WritePortFile tells the
// programs that start the server which ports were chosen. Security makes the certificates, tokens and roles;
// CheckGrpcAddress and CheckHttpAddress say whether a server with these options may listen at an address.
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
  std::string host;  // as given; an IPv6 address with its brackets; all of a Unix socket's address
  int port = 0;      // kUnixSocket: a Unix socket
  static constexpr int kUnixSocket = -1;
  std::string text() const;
  // Of a Unix socket: "/run/lossd" of "unix:/run/lossd" and of "unix:///run/lossd".
  std::string socket_path() const;
};

// INVALID_ARGUMENT naming `option` unless `text` is "host:port" with a port in [0, 65535], or "unix:" and a
// path that the system can take.
absl::StatusOr<Address> ParseAddress(absl::string_view option, absl::string_view text);

// One or more addresses with commas between them. INVALID_ARGUMENT as ParseAddress, or if an address is there
// twice.
absl::StatusOr<std::vector<Address>> ParseAddresses(absl::string_view option, absl::string_view text);

// True for localhost, 127.0.0.0/8, [::1] and Unix sockets.
bool IsLoopback(const Address& address);

// Opens the sockets of a server's gRPC addresses: listens on all addresses, which get the ports that were
// chosen. `unix_mode`: of the files of Unix sockets. UNAVAILABLE naming the option `listen`.
absl::StatusOr<std::vector<access::ListeningSocket>> OpenSockets(std::vector<Address>* addresses,
                                                                 uint32_t unix_mode);

// The addresses with commas between them.
std::string TextOf(const std::vector<Address>& addresses);

// Writes {"grpc": ..., "http": ...} to `path`: the addresses that the server has chosen, for programs that
// start it on any free port. A reader sees the whole file or none. An error names the path, and then no file
// is left.
absl::Status WritePortFile(const std::string& path, const std::string& grpc, const std::string& http);

// Security makes the certificates, tokens and roles of a server from its options, for gRPC and for HTTP.
// CheckGrpcAddress and CheckHttpAddress say whether a server with these options may listen at an address.
//
// All classes and functions are thread-safe.

// Whether callers have to say who they are.
bool Asks(const SecurityOptions& options);

// Whether the address may be bound with these options: INVALID_ARGUMENT naming `listen` or `http` and what is
// missing.
absl::Status CheckGrpcAddress(const SecurityOptions& options, const Address& address);
absl::Status CheckHttpAddress(const SecurityOptions& options, const Address& address);

class Security {
 public:
  // Reads the files. INVALID_ARGUMENT, naming option and path, if one is not in order or options do not go
  // together. `name_at`: whose connections of gRPC come from an address of the loopback; for the log.
  static absl::StatusOr<std::unique_ptr<Security>> Create(const SecurityOptions& options,
                                                          rpc::AccessControl::NameAt name_at = nullptr);

  // Whether callers have to say who they are.
  bool asks() const { return authority_->asks(); }
  // The following live as long as this object.
  const rpc::AccessControl& access_control() const { return access_control_; }
  const std::shared_ptr<grpc::ServerCredentials>& credentials() const { return credentials_; }
  // Of the other ranks' service: the same certificate; ranks are admitted by their secret.
  const std::shared_ptr<grpc::ServerCredentials>& rank_credentials() const { return rank_credentials_; }
  metrics::HttpSecurity http();
  access::ReloadedTls* tls() const { return tls_.get(); }  // null: no TLS

  // For the log: "plaintext, no authentication", "TLS, client certificates, tokens".
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
  // OK if the token of the request has the role that the path needs. `name`: whose the token is, if the
  // server knows it.
  absl::Status CheckHttp(const metrics::HttpRequest& request, absl::string_view path,
                         std::string* name) const;

  const SecurityOptions options_;
  const std::unique_ptr<access::ReloadedTls> tls_;  // null: no TLS
  const std::unique_ptr<access::Authority> authority_;
  access::AuditLog audit_;
  const rpc::AccessControl access_control_;
  // gRPC asks these after the server has started.
  const std::shared_ptr<grpc::ServerCredentials> credentials_;
  const std::shared_ptr<grpc::ServerCredentials> rank_credentials_;
};

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_ADDRESSES_H_
