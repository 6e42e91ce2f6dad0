// SPDX-License-Identifier: Apache-2.0
#include "client/cli/http_address.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/cpp/credentials.h"
#include "client/cpp/target.h"
#include "kernels/errors/field_error.h"

namespace lossd::cli {
namespace {

constexpr int kDefaultPort = 7071;  // of lossd's --http

// The host of gRPC's address as a URL has it; this machine for a Unix socket and other targets without a
// host.
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

}  // namespace lossd::cli
