// SPDX-License-Identifier: Apache-2.0
#include "server/app/security.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"
#include "server/metrics/http_pages.h"

namespace lossd::app {
namespace {

// Probes of an orchestrator and of a load balancer bring no token.
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

absl::StatusOr<std::unique_ptr<Security>> Security::Create(const SecurityOptions& options) {
  if (absl::Status status = CheckTogether(options); !status.ok()) return status;
  std::unique_ptr<access::ReloadedTls> tls;
  if (HasTls(options)) {
    auto watched = access::WatchTlsMaterial({.certificate = {"tls_cert", options.tls_cert},
                                             .key = {"tls_key", options.tls_key},
                                             .client_authorities = {"tls_client_ca", options.tls_client_ca}});
    if (!watched.ok()) return watched.status();
    tls = *std::move(watched);
  }
  auto authority =
      access::Authority::Create({"role_file", options.role_file}, {"token_file", options.token_file});
  if (!authority.ok()) return authority.status();
  return std::unique_ptr<Security>(new Security(options, std::move(tls), *std::move(authority)));
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
  const absl::Status allowed = CheckHttp(request, path);
  if (allowed.ok()) return std::nullopt;
  audit_.Refused({.identity = "", .address = request.peer, .method = "HTTP", .head = ""}, allowed);
  return metrics::HttpResponse{.status = absl::IsUnauthenticated(allowed) ? 401 : 403,
                               .body = absl::StrCat(allowed.message(), "\n")};
}

absl::Status Security::CheckHttp(const metrics::HttpRequest& request, absl::string_view path) const {
  access::Presented presented;
  if (request.authorizations.size() == 1) presented.authorization = request.authorizations.front();
  const absl::StatusOr<access::Identity> identity = authority_->Identify(presented);
  if (!identity.ok()) return identity.status();
  if (!Contains(metrics::kOperatorPaths, path)) return absl::OkStatus();  // every role may read
  return access::CheckRole(*identity, access::Role::kAdmin, path);
}

std::string Security::Text() const {
  std::string text = tls_ == nullptr ? "plaintext" : "TLS";
  if (!options_.tls_client_ca.empty()) absl::StrAppend(&text, ", client certificates");
  if (!options_.token_file.empty()) absl::StrAppend(&text, ", tokens");
  if (!asks()) absl::StrAppend(&text, ", no authentication");
  return text;
}

}  // namespace lossd::app
