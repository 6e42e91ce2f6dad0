// SPDX-License-Identifier: Apache-2.0
#include "client/cli/http_fetch.h"

#include <httplib.h>

#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/errors/field_error.h"

namespace lossd::cli {
namespace {

// What the server says about another status than 200, if it is a line of text.
std::string Reason(const HttpAnswer& answer) {
  constexpr size_t kMost = 300;
  std::string text(absl::StripAsciiWhitespace(answer.body));
  if (text.empty() || text.size() > kMost || !absl::StartsWith(answer.content_type, "text/plain")) {
    return "";
  }
  for (char& c : text) {
    if (absl::ascii_iscntrl(static_cast<unsigned char>(c))) c = '?';
  }
  return absl::StrCat(": ", text);
}

absl::StatusCode CodeOfAnswer(int status) {
  if (status == 403) return absl::StatusCode::kPermissionDenied;
  return status == 409 ? absl::StatusCode::kFailedPrecondition : absl::StatusCode::kInternal;
}

constexpr absl::string_view kHttps = "https://";

std::string UrlOf(const std::string& address) {
  return absl::StrContains(address, "://") ? address : absl::StrCat("http://", address);
}

absl::Status NoAddress(const std::string& address) {
  return errors::WithViolation(absl::InvalidArgumentError(absl::StrCat("\"", address, "\" is not HOST:PORT")),
                               {std::string(kHttpField), "must be HOST:PORT", address});
}

// Why there is no answer; httplib's own words are those of its enumeration.
std::string Cause(httplib::Error error, bool tls) {
  switch (error) {
    case httplib::Error::Connection:
      return "the connection was refused, or the host is not known";
    case httplib::Error::ConnectionTimeout:
      return "connecting took too long";
    case httplib::Error::Read:
      return tls ? "no answer came" : "no answer came; a server with --http_tls wants https://";
    case httplib::Error::SSLConnection:
      return "it does not speak TLS";
    case httplib::Error::SSLLoadingCerts:
      return "the certificates of --ca cannot be read";
    case httplib::Error::SSLServerVerification:
      return "its certificate is not trusted, or is for another name";
    default:
      return httplib::to_string(error);
  }
}

enum class Method { kGet, kPost };

// `client` is at `address`.
absl::StatusOr<HttpAnswer> Ask(httplib::Client* client, Method method, const std::string& address,
                               const std::string& path, absl::Duration timeout) {
  client->set_connection_timeout(absl::ToChronoMilliseconds(timeout));
  client->set_read_timeout(absl::ToChronoMilliseconds(timeout));
  const httplib::Result result = method == Method::kGet ? client->Get(path) : client->Post(path);
  if (!result) {
    return errors::WithViolation(
        absl::UnavailableError(absl::StrCat("nothing answers at ", UrlOf(address), path, " (",
                                            Cause(result.error(), absl::StartsWith(address, kHttps)),
                                            "); name the address with --http")),
        {std::string(kHttpField), "must be the address where a server answers HTTP", address});
  }
  return HttpAnswer{.status = result->status,
                    .content_type = result->get_header_value("Content-Type"),
                    .body = result->body};
}

absl::StatusOr<std::string> Body(Method method, const std::string& address, const std::string& path,
                                 const client::CredentialOptions& credentials, absl::Duration timeout) {
  const bool tls = absl::StartsWith(address, kHttps);
  const std::string url = UrlOf(address);
  httplib::Client client(url);
  if (!client.is_valid()) return NoAddress(address);
  if (tls && !credentials.ca.empty()) client.set_ca_cert_path(credentials.ca);
  if (!credentials.token.empty() && (tls || client::IsLocalTarget(absl::StripPrefix(url, "http://")))) {
    client.set_bearer_token_auth(credentials.token);
  }
  absl::StatusOr<HttpAnswer> answer = Ask(&client, method, address, path, timeout);
  if (!answer.ok()) return answer.status();
  if (answer->status == 401) {
    return absl::UnauthenticatedError(absl::StrCat(url, path, " wants a token that it knows (LOSSD_TOKEN)"));
  }
  if (answer->status != 200) {
    return absl::Status(CodeOfAnswer(answer->status),
                        absl::StrCat(url, path, " answered with status ", answer->status, Reason(*answer)));
  }
  return std::move(answer->body);
}

}  // namespace

absl::StatusOr<std::string> HttpFetch(const std::string& address, const std::string& path,
                                      const client::CredentialOptions& credentials, absl::Duration timeout) {
  return Body(Method::kGet, address, path, credentials, timeout);
}

absl::StatusOr<std::string> HttpPost(const std::string& address, const std::string& path,
                                     const client::CredentialOptions& credentials, absl::Duration timeout) {
  return Body(Method::kPost, address, path, credentials, timeout);
}

absl::StatusOr<HttpAnswer> HttpProbe(const std::string& address, const std::string& path,
                                     absl::Duration timeout) {
  httplib::Client client(UrlOf(address));
  if (!client.is_valid()) return NoAddress(address);
  client.enable_server_certificate_verification(false);
  return Ask(&client, Method::kGet, address, path, timeout);
}

}  // namespace lossd::cli
