// SPDX-License-Identifier: Apache-2.0
// Parses the addresses of a server, listens on them, and makes its security (addresses.h).
#include "server/app/addresses.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::app {
namespace {

constexpr absl::string_view kUnix = "unix:";
constexpr size_t kMaxSocketPath = sizeof(sockaddr_un::sun_path) - 1;

absl::StatusOr<Address> ParseSocket(absl::string_view option, absl::string_view text) {
  Address address{.host = std::string(text), .port = Address::kUnixSocket};
  if (address.socket_path().size() > kMaxSocketPath) {
    return errors::FieldError(option, absl::StrCat("have a path of at most ", kMaxSocketPath, " bytes"),
                              text);
  }
  return address;
}

}  // namespace

std::string Address::text() const { return port == kUnixSocket ? host : absl::StrCat(host, ":", port); }

std::string Address::socket_path() const {
  if (port != kUnixSocket) return "";
  const std::string path = host.substr(kUnix.size());
  if (path.empty() || path.front() != '/') return path;
  return absl::StrCat("/", path.substr(std::min(path.find_first_not_of('/'), path.size())));
}

absl::StatusOr<Address> ParseAddress(absl::string_view option, absl::string_view text) {
  if (absl::StartsWith(text, kUnix) && text.size() > kUnix.size()) return ParseSocket(option, text);
  const size_t colon = text.rfind(':');
  Address address;
  const bool split = colon != absl::string_view::npos && colon > 0;
  if (!split || !absl::SimpleAtoi(text.substr(colon + 1), &address.port) || address.port < 0 ||
      address.port > 65535) {
    return errors::FieldError(option, "be host:port with a port in [0, 65535], or unix:PATH", text);
  }
  address.host = std::string(text.substr(0, colon));
  const bool bracketed = address.host.front() == '[' && address.host.back() == ']';
  if (!bracketed && address.host.find(':') != std::string::npos) {
    return errors::FieldError(option, "have an IPv6 address in brackets", text);
  }
  return address;
}

absl::StatusOr<std::vector<Address>> ParseAddresses(absl::string_view option, absl::string_view text) {
  std::vector<Address> addresses;
  for (const absl::string_view one : absl::StrSplit(text, ',')) {
    LOSSD_TRY(Address address, ParseAddress(option, one));
    const bool again = std::any_of(addresses.begin(), addresses.end(), [&](const Address& other) {
      return other.text() == address.text() && address.port != 0;
    });
    if (again) return errors::FieldError(option, "name an address once", text);
    addresses.push_back(std::move(address));
  }
  return addresses;
}

bool IsLoopback(const Address& address) {
  if (address.port == Address::kUnixSocket) return true;
  if (address.host == "localhost" || address.host == "[::1]") return true;
  in_addr ipv4;
  if (inet_pton(AF_INET, address.host.c_str(), &ipv4) != 1) return false;
  return (ntohl(ipv4.s_addr) >> 24) == 127;
}

namespace {

// Listens on one address, and adds the sockets to `sockets`.
absl::Status Open(Address* address, uint32_t unix_mode, std::vector<access::ListeningSocket>* sockets) {
  if (address->port == Address::kUnixSocket) {
    absl::StatusOr<access::ListeningSocket> socket =
        access::ListeningSocket::OpenUnix(address->socket_path(), unix_mode, SOCK_STREAM);
    if (!socket.ok()) return absl::UnavailableError(absl::StrCat("listen: ", socket.status().message()));
    sockets->push_back(*std::move(socket));
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<access::ListeningSocket>> opened =
      access::ListeningSocket::OpenTcp(address->host, address->port);
  if (!opened.ok()) {
    return absl::UnavailableError(
        absl::StrCat("listen: ", opened.status().message(), " (is the port taken?)"));
  }
  address->port = opened->front().port();
  for (access::ListeningSocket& socket : *opened) sockets->push_back(std::move(socket));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<access::ListeningSocket>> OpenSockets(std::vector<Address>* addresses,
                                                                 uint32_t unix_mode) {
  std::vector<access::ListeningSocket> sockets;
  for (Address& address : *addresses) {
    LOSSD_RETURN_IF_ERROR(Open(&address, unix_mode, &sockets));
  }
  return sockets;
}

std::string TextOf(const std::vector<Address>& addresses) {
  return absl::StrJoin(
      addresses, ",", [](std::string* out, const Address& address) { absl::StrAppend(out, address.text()); });
}

absl::Status WritePortFile(const std::string& path, const std::string& grpc, const std::string& http) {
  const std::string temporary = absl::StrCat(path, ".", getpid(), ".tmp");
  const nlohmann::json addresses = {{"grpc", grpc}, {"http", http}};
  const std::string text = addresses.dump() + "\n";
  FILE* const file = std::fopen(temporary.c_str(), "w");
  if (file == nullptr)
    return absl::ErrnoToStatus(errno, absl::StrCat("port_file: cannot create ", temporary));
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const bool closed = std::fclose(file) == 0;
  if (written && closed && std::rename(temporary.c_str(), path.c_str()) == 0) return absl::OkStatus();
  absl::Status status = absl::ErrnoToStatus(errno, absl::StrCat("port_file: cannot write ", path));
  std::remove(temporary.c_str());
  return status;
}

namespace {

// These paths need no token, because probes of orchestrators and load balancers have none.
constexpr absl::string_view kHealthPaths[] = {"/livez", "/readyz", "/healthz"};

template <typename Paths>
bool Contains(const Paths& paths, absl::string_view path) {
  return std::find(std::begin(paths), std::end(paths), path) != std::end(paths);
}

absl::Status Needs(absl::string_view option, const std::string& value, absl::string_view other,
                   const std::string& other_value) {
  if (value.empty() || !other_value.empty()) return absl::OkStatus();
  return errors::FieldError(option, absl::StrCat("be given together with ", other), value);
}

absl::Status CheckTogether(const SecurityOptions& options) {
  absl::Status status = Needs("tls_cert", options.tls_cert, "tls_key", options.tls_key);
  status.Update(Needs("tls_key", options.tls_key, "tls_cert", options.tls_cert));
  status.Update(Needs("tls_client_ca", options.tls_client_ca, "tls_cert", options.tls_cert));
  status.Update(Needs("tls_client_ca", options.tls_client_ca, "role_file", options.role_file));
  status.Update(Needs("role_file", options.role_file, "tls_client_ca", options.tls_client_ca));
  if (options.http_tls) status.Update(Needs("http_tls", "true", "tls_cert", options.tls_cert));
  if (options.http_token) status.Update(Needs("http_token", "true", "token_file", options.token_file));
  return status;
}

bool HasTls(const SecurityOptions& options) { return !options.tls_cert.empty(); }
absl::Status InTheClear(absl::string_view option, const Address& address) {
  return errors::FieldError(option,
                            "be a loopback address or have TLS, because clients would send their tokens "
                            "without encryption",
                            address.text());
}

}  // namespace

bool Asks(const SecurityOptions& options) {
  return !options.tls_client_ca.empty() || !options.token_file.empty();
}

absl::Status CheckGrpcAddress(const SecurityOptions& options, const Address& address) {
  if (IsLoopback(address)) return absl::OkStatus();
  if (!HasTls(options) && !options.token_file.empty()) return InTheClear("listen", address);
  if (options.insecure || (HasTls(options) && Asks(options))) return absl::OkStatus();
  return errors::FieldError(
      "listen",
      HasTls(options) ? "be a loopback address unless clients have to say who they are: give "
                        "--tls_client_ca and --role_file, or --token_file, or allow it with --insecure"
                      : "be a loopback address unless connections are encrypted and clients have to "
                        "say who they are: give --tls_cert, --tls_key and --tls_client_ca or "
                        "--token_file, or allow it with --insecure",
      address.text());
}

absl::Status CheckHttpAddress(const SecurityOptions& options, const Address& address) {
  if (IsLoopback(address)) return absl::OkStatus();
  if (!options.http_tls && options.http_token) return InTheClear("http", address);
  if (options.insecure || options.http_tls) return absl::OkStatus();
  return errors::FieldError(
      "http",
      "be a loopback address unless connections are encrypted: give --http_tls, or allow "
      "it with --insecure",
      address.text());
}

absl::StatusOr<std::unique_ptr<Security>> Security::Create(const SecurityOptions& options,
                                                           rpc::AccessControl::NameAt name_at) {
  LOSSD_RETURN_IF_ERROR(CheckTogether(options));
  std::unique_ptr<access::ReloadedTls> tls;
  if (HasTls(options)) {
    LOSSD_TRY(tls,
              access::WatchTlsMaterial({.certificate = {"tls_cert", options.tls_cert},
                                        .key = {"tls_key", options.tls_key},
                                        .client_authorities = {"tls_client_ca", options.tls_client_ca}}));
  }
  LOSSD_TRY(auto authority,
            access::Authority::Create({"role_file", options.role_file}, {"token_file", options.token_file}));
  return std::unique_ptr<Security>(
      new Security(options, std::move(tls), std::move(authority), std::move(name_at)));
}

std::shared_ptr<grpc::ServerCredentials> Security::MakeCredentials() const {
  if (tls_ == nullptr) return grpc::InsecureServerCredentials();
  if (options_.tls_client_ca.empty()) return rpc::TlsCredentials(tls_.get(), rpc::ClientCertificates::kNone);
  return rpc::TlsCredentials(tls_.get(), options_.token_file.empty() ? rpc::ClientCertificates::kRequired
                                                                     : rpc::ClientCertificates::kOptional);
}

metrics::HttpSecurity Security::http() {
  metrics::HttpSecurity security;
  if (options_.http_tls) security.tls = tls_.get();
  if (asks()) {
    security.guard = [this](const metrics::HttpRequest& request, absl::string_view path) {
      return GuardHttp(request, path);
    };
  }
  return security;
}

std::optional<metrics::HttpResponse> Security::GuardHttp(const metrics::HttpRequest& request,
                                                         absl::string_view path) {
  if (Contains(kHealthPaths, path)) return std::nullopt;
  if (!options_.http_token && !Contains(metrics::kOperatorPaths, path)) return std::nullopt;
  if (!options_.http_token) {
    return metrics::HttpResponse{
        .status = 403,
        .body = "only for operators, whom this server knows over HTTP if it has --http_token\n"};
  }
  std::string identity;
  const absl::Status allowed = CheckHttp(request, path, &identity);
  if (allowed.ok()) return std::nullopt;
  const bool is_known = !identity.empty();
  audit_.Refused({.identity = identity,
                  .holder = {.name = is_known ? identity : request.peer_name, .is_known = is_known},
                  .address = request.peer,
                  .method = "HTTP",
                  .head = ""},
                 allowed);
  return metrics::HttpResponse{.status = absl::IsUnauthenticated(allowed) ? 401 : 403,
                               .body = absl::StrCat(allowed.message(), "\n")};
}

absl::Status Security::CheckHttp(const metrics::HttpRequest& request, absl::string_view path,
                                 std::string* name) const {
  access::Presented presented;
  if (request.authorizations.size() == 1) presented.authorization = request.authorizations.front();
  LOSSD_TRY(const access::Identity identity, authority_->Identify(presented));
  *name = identity.name;
  if (!Contains(metrics::kOperatorPaths, path)) return absl::OkStatus();  // every role may read
  return access::CheckRole(identity, access::Role::kAdmin, path);
}

std::string Security::Text() const {
  std::string text = tls_ == nullptr ? "plaintext" : "TLS";
  if (!options_.tls_client_ca.empty()) absl::StrAppend(&text, ", client certificates");
  if (!options_.token_file.empty()) absl::StrAppend(&text, ", tokens");
  if (!asks()) absl::StrAppend(&text, ", no authentication");
  return text;
}

}  // namespace lossd::app
