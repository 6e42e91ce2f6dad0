// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/http_router.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace lossd::metrics {
namespace {

struct Target {
  std::optional<absl::string_view> host;  // of the absolute form
  absl::string_view path;
};

Target ParseTarget(absl::string_view target) {
  constexpr absl::string_view kScheme = "http://";
  if (!absl::StartsWithIgnoreCase(target, kScheme)) return {.path = target};
  target.remove_prefix(kScheme.size());
  const size_t slash = std::min(target.find('/'), target.size());
  const absl::string_view path = target.substr(slash);
  return {.host = target.substr(0, slash), .path = path.empty() ? "/" : path};
}

// The handler of the path, and what of the path is behind its prefix; end() if there is none.
std::pair<HttpHandlers::const_iterator, absl::string_view> FindHandler(const HttpHandlers& handlers,
                                                                       absl::string_view path) {
  const size_t name = path.rfind('/') + 1;  // 0 if there is no slash
  const bool of_prefix = name > 1 && name < path.size();
  const auto exact = handlers.find(path);
  if (exact != handlers.end() && (path == "/" || name < path.size())) return {exact, ""};
  return of_prefix ? std::make_pair(handlers.find(path.substr(0, name)), path.substr(name))
                   : std::make_pair(handlers.end(), absl::string_view());
}

bool IsPort(absl::string_view text) {
  int port = 0;
  return !text.empty() && text.size() <= 5 && std::all_of(text.begin(), text.end(), absl::ascii_isdigit) &&
         absl::SimpleAtoi(text, &port) && port <= 65535;
}

bool IsLoopbackIpv4(absl::string_view host) {
  in_addr address;
  return inet_pton(AF_INET, std::string(host).c_str(), &address) == 1 && (ntohl(address.s_addr) >> 24) == 127;
}

bool IsLoopbackIpv6(absl::string_view host) {
  in6_addr address;
  return inet_pton(AF_INET6, std::string(host).c_str(), &address) == 1 && IN6_IS_ADDR_LOOPBACK(&address);
}

// "127.0.0.1:7071" of "http://127.0.0.1:7071"; nothing of "null", which sandboxed pages and files have.
std::optional<absl::string_view> HostOfOrigin(absl::string_view origin) {
  const bool url = absl::ConsumePrefix(&origin, "http://") || absl::ConsumePrefix(&origin, "https://");
  return url ? std::make_optional(origin) : std::nullopt;
}

}  // namespace

bool IsOfAnotherPage(const HttpRequest& request) {
  if (!request.fetch_sites.empty()) {
    return !std::all_of(request.fetch_sites.begin(), request.fetch_sites.end(),
                        [](absl::string_view site) { return site == "same-origin" || site == "none"; });
  }
  return std::any_of(request.origins.begin(), request.origins.end(), [&](absl::string_view origin) {
    const std::optional<absl::string_view> host = HostOfOrigin(origin);
    return !host.has_value() || request.hosts.empty() ||
           !absl::EqualsIgnoreCase(*host, request.hosts.front());
  });
}

bool NamesLoopback(absl::string_view host) {
  const size_t name_end = absl::StartsWith(host, "[") ? host.find(']') : 0;
  if (name_end == absl::string_view::npos) return false;
  const size_t colon = host.find(':', name_end);
  if (colon != absl::string_view::npos) {
    if (!IsPort(host.substr(colon + 1))) return false;
    host = host.substr(0, colon);
  }
  if (absl::ConsumePrefix(&host, "[")) return absl::ConsumeSuffix(&host, "]") && IsLoopbackIpv6(host);
  return absl::EqualsIgnoreCase(host, "localhost") || IsLoopbackIpv4(host);
}

HttpResponse Route(const HttpRequest& request, const HttpHandlers& handlers, HttpAudience audience,
                   const HttpGuard& guard) {
  const size_t least_hosts = request.version == "HTTP/1.0" ? 0 : 1;
  if (request.hosts.size() > 1 || request.hosts.size() < least_hosts) {
    return {.status = 400, .body = "a request has exactly one Host\n"};
  }
  const Target target = ParseTarget(request.target);
  std::optional<absl::string_view> host = target.host;
  if (!host.has_value() && !request.hosts.empty()) host = request.hosts.front();
  if (audience == HttpAudience::kLoopbackHosts && host.has_value() && !NamesLoopback(*host)) {
    return {.status = 403,
            .body = "this server listens on the loopback and answers for loopback hosts only\n"};
  }
  const auto [found, rest] = FindHandler(handlers, target.path);
  const bool changes = found != handlers.end() && found->second.effect == HttpHandler::Effect::kChanges;
  if (changes ? request.method != "POST" : request.method != "GET" && request.method != "HEAD") {
    const std::string methods = changes ? "POST" : "GET, HEAD";
    return {.status = 405, .body = absl::StrCat("only ", methods, "\n"), .allow = methods};
  }
  if (found == handlers.end()) return {.status = 404, .body = "not found\n"};
  if (changes && IsOfAnotherPage(request)) {
    return {.status = 403, .body = absl::StrCat(target.path, " is not for pages of other web sites\n")};
  }
  if (guard != nullptr) {
    if (std::optional<HttpResponse> refusal = guard(request, target.path); refusal.has_value())
      return *std::move(refusal);
  }
  return found->second.function({.rest = rest, .parameters = request.parameters});
}

}  // namespace lossd::metrics
