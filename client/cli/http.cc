// SPDX-License-Identifier: Apache-2.0
// lossctl's HTTP client, and the parser of metrics (http.h).
#include "client/cli/http.h"

#include <httplib.h>

#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/cpp/probe.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::cli {

// ---- Addresses ----

namespace {

constexpr int kDefaultPort = 7071;  // lossd's default for --http

// The host in a gRPC address, as a URL writes it. For a Unix socket and other targets without a host: this
// machine.
std::string HostOf(const std::string& target, bool ipv6) {
  const std::string host = client::internal::HostAndPortOf(target).host;
  if (host.empty()) return ipv6 ? "[::1]" : "127.0.0.1";
  return absl::StrContains(host, ':') ? absl::StrCat("[", host, "]") : host;
}

absl::Status NoHttp(const std::string& message, const std::string& value) {
  return errors::WithViolation(absl::FailedPreconditionError(message),
                               {"--http", "must be an address where the server answers HTTP", value});
}

}  // namespace

bool IsHttpAddress(absl::string_view text) {
  const bool url = absl::ConsumePrefix(&text, "http://") || absl::ConsumePrefix(&text, "https://");
  const bool has_port = text.find(':', text.find(']') == text.npos ? 0 : text.find(']')) != text.npos;
  return client::internal::TargetProblem(url && !has_port ? absl::StrCat(text, ":1") : text).empty() &&
         !client::internal::HostAndPortOf(url && !has_port ? absl::StrCat(text, ":1") : text).host.empty();
}

std::string DefaultHttpAddress(const std::string& target) {
  return absl::StrCat("http://", HostOf(target, false), ":", kDefaultPort);
}

absl::StatusOr<std::string> HttpAddressOf(const v1::ServerDescription& server, const std::string& target) {
  if (!server.has_http()) return DefaultHttpAddress(target);
  const std::string& url = server.http();
  if (url.empty()) {
    return NoHttp(absl::StrCat("the server at ", target, " has no HTTP side, since its --http is empty"), "");
  }
  const size_t begin = url.find("://"), end = url.rfind(':');
  if (begin == std::string::npos || end <= begin + 3) {
    return absl::InternalError(
        absl::StrCat("the server says that it answers HTTP at \"", url, "\", which is no URL"));
  }
  const std::string scheme = url.substr(0, begin), host = url.substr(begin + 3, end - begin - 3);
  const std::string port = url.substr(end);
  const bool everywhere = host == "0.0.0.0" || host == "[::]";
  if (everywhere) return absl::StrCat(scheme, "://", HostOf(target, host == "[::]"), port);
  const bool local = client::IsLocalTarget(absl::StrCat(host, port));
  if (local && !client::IsLocalTarget(target)) {
    return NoHttp(absl::StrCat("the server at ", target, " answers HTTP only on its own machine, at ", url,
                               "; name an address that leads there with --http, or have it listen elsewhere"),
                  url);
  }
  const bool has_name = !client::internal::HostAndPortOf(target).host.empty();
  if (scheme == "https" && has_name) return absl::StrCat(scheme, "://", HostOf(target, false), port);
  return url;
}

// ---- Pages ----

namespace {

// What the server says in an answer with another status than 200, if the text is a single line.
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

// Why there is no answer, in words. httplib's own texts are the names of its enumeration.
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

// Sends the request. `client` is connected to `address`, which errors name.
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
  LOSSD_TRY(HttpAnswer answer, Ask(&client, method, address, path, timeout));
  if (answer.status == 401) {
    return absl::UnauthenticatedError(absl::StrCat(url, path, " wants a token that it knows (LOSSD_TOKEN)"));
  }
  if (answer.status != 200) {
    return absl::Status(CodeOfAnswer(answer.status),
                        absl::StrCat(url, path, " answered with status ", answer.status, Reason(answer)));
  }
  return std::move(answer.body);
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

// ---- Metrics ----

namespace {

// Reads the label value that starts after its opening quote, at text[*at]. Leaves *at after the closing
// quote.
std::string ReadQuoted(absl::string_view text, size_t* at) {
  std::string value;
  while (*at < text.size() && text[*at] != '"') {
    char c = text[(*at)++];
    if (c == '\\' && *at < text.size()) {
      c = text[(*at)++];
      if (c == 'n') c = '\n';
    }
    value += c;
  }
  ++*at;
  return value;
}

// Reads {a="b",...} at text[*at]. Leaves *at after it.
bool ReadLabels(absl::string_view text, size_t* at, std::map<std::string, std::string>* labels) {
  ++*at;  // skips the brace
  while (*at < text.size() && text[*at] != '}') {
    const size_t equals = text.find("=\"", *at);
    if (equals == absl::string_view::npos) return false;
    const std::string name(absl::StripAsciiWhitespace(text.substr(*at, equals - *at)));
    *at = equals + 2;
    (*labels)[name] = ReadQuoted(text, at);
    while (*at < text.size() && (text[*at] == ',' || text[*at] == ' ')) ++*at;
  }
  if (*at >= text.size()) return false;
  ++*at;
  return true;
}

std::optional<double> ParseNumber(absl::string_view text) {
  if (text == "+Inf") return std::numeric_limits<double>::infinity();
  double value;
  if (!absl::SimpleAtod(text, &value)) return std::nullopt;
  return value;
}

std::optional<MetricSample> ParseLine(absl::string_view line) {
  line = absl::StripAsciiWhitespace(line);
  if (line.empty() || line[0] == '#') return std::nullopt;
  MetricSample sample;
  size_t at = line.find_first_of("{ ");
  if (at == absl::string_view::npos) return std::nullopt;
  sample.name = std::string(line.substr(0, at));
  if (line[at] == '{' && !ReadLabels(line, &at, &sample.labels)) return std::nullopt;
  const std::vector<absl::string_view> rest = absl::StrSplit(line.substr(at), ' ', absl::SkipEmpty());
  if (rest.empty()) return std::nullopt;
  const std::optional<double> value = ParseNumber(rest[0]);
  if (!value.has_value()) return std::nullopt;
  sample.value = *value;
  return sample;
}

}  // namespace

std::vector<MetricSample> ParseMetrics(absl::string_view text) {
  std::vector<MetricSample> samples;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    if (std::optional<MetricSample> sample = ParseLine(line)) samples.push_back(*std::move(sample));
  }
  return samples;
}

Buckets BucketsOf(const std::vector<MetricSample>& samples, absl::string_view name) {
  const std::string bucket_name = absl::StrCat(name, "_bucket");
  Buckets buckets;
  for (const MetricSample& sample : samples) {
    if (sample.name != bucket_name) continue;
    const auto bound = sample.labels.find("le");
    if (bound == sample.labels.end()) continue;
    if (const std::optional<double> upper = ParseNumber(bound->second)) buckets[*upper] += sample.value;
  }
  return buckets;
}

Buckets Difference(const Buckets& later, const Buckets& earlier) {
  Buckets result = later;
  for (auto& [upper, count] : result) {
    const auto it = earlier.find(upper);
    if (it != earlier.end()) count -= it->second;
  }
  return result;
}

std::optional<double> Quantile(const Buckets& buckets, double q) {
  if (buckets.empty() || buckets.rbegin()->second <= 0) return std::nullopt;
  const double rank = q * buckets.rbegin()->second;
  double lower = 0, below = 0;
  for (const auto& [upper, count] : buckets) {
    if (count >= rank && count > below) {
      if (std::isinf(upper)) return lower;
      return lower + (upper - lower) * (rank - below) / (count - below);
    }
    lower = upper;
    below = count;
  }
  return lower;
}

}  // namespace lossd::cli
