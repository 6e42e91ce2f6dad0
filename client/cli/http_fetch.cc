#include "client/cli/http_fetch.h"

#include <httplib.h>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/errors/field_error.h"

namespace lossd::cli {
namespace {

// What the server says about another status than 200, if it is a line of text.
std::string Reason(const httplib::Response& response) {
  constexpr size_t kMost = 300;
  std::string text(absl::StripAsciiWhitespace(response.body));
  if (text.empty() || text.size() > kMost ||
      !absl::StartsWith(response.get_header_value("Content-Type"), "text/plain")) {
    return "";
  }
  for (char& c : text) {
    if (absl::ascii_iscntrl(static_cast<unsigned char>(c))) c = '?';
  }
  return absl::StrCat(": ", text);
}

absl::StatusCode CodeOf(int status) {
  if (status == 403) return absl::StatusCode::kPermissionDenied;
  return status == 409 ? absl::StatusCode::kFailedPrecondition : absl::StatusCode::kInternal;
}

}  // namespace

absl::StatusOr<std::string> HttpFetch(const std::string& address, const std::string& path,
                                      const client::CredentialOptions& credentials, absl::Duration timeout) {
  constexpr absl::string_view kHttps = "https://";
  const bool tls = absl::StartsWith(address, kHttps);
  const std::string url = absl::StrContains(address, "://") ? address : absl::StrCat("http://", address);
  httplib::Client client(url);
  if (!client.is_valid()) {
    return errors::WithViolation(
        absl::InvalidArgumentError(absl::StrCat("\"", address, "\" is not HOST:PORT")),
        {std::string(kHttpField), "must be HOST:PORT", address});
  }
  if (tls && !credentials.ca.empty()) client.set_ca_cert_path(credentials.ca);
  if (!credentials.token.empty() && (tls || client::IsLocalTarget(absl::StripPrefix(url, "http://")))) {
    client.set_bearer_token_auth(credentials.token);
  }
  client.set_connection_timeout(absl::ToChronoMilliseconds(timeout));
  client.set_read_timeout(absl::ToChronoMilliseconds(timeout));
  const httplib::Result result = client.Get(path);
  if (!result) {
    return errors::WithViolation(
        absl::UnavailableError(absl::StrCat("nothing answers at ", url, path, " (",
                                            httplib::to_string(result.error()),
                                            "); name the address with --http")),
        {std::string(kHttpField), "must be the address where a server answers HTTP", address});
  }
  if (result->status == 401) {
    return absl::UnauthenticatedError(absl::StrCat(url, path, " wants a token that it knows (LOSSD_TOKEN)"));
  }
  if (result->status != 200) {
    return absl::Status(CodeOf(result->status),
                        absl::StrCat(url, path, " answered with status ", result->status, Reason(*result)));
  }
  return result->body;
}

}  // namespace lossd::cli
