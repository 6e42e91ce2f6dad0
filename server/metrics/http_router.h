// SPDX-License-Identifier: Apache-2.0
// What the HTTP server answers to a request, apart from any network: GET and HEAD of the paths that have a
// handler, POST of those whose handler changes something, and an error for everything else.
//
// All functions are stateless and thread-safe.
#ifndef LOSSD_SERVER_METRICS_HTTP_ROUTER_H_
#define LOSSD_SERVER_METRICS_HTTP_ROUTER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace lossd::metrics {

struct HttpResponse {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
  std::string allow;  // with 405: the methods that are answered
};

// Names and values of a query, "?name=value&...", in the order in which they were sent. %-escapes are not
// decoded.
using HttpParameters = std::vector<std::pair<absl::string_view, absl::string_view>>;

// What a handler gets of a request. The views are valid during the call.
struct HttpCall {
  absl::string_view rest;  // "lm" of "/heads/lm" for the handler of "/heads/"; else empty
  HttpParameters parameters;
};
using HttpFunction = std::function<HttpResponse(const HttpCall&)>;

// What answers for a path. One that changes something is asked with POST, all others with GET or HEAD:
// browsers send GET for whatever page names an address, and caches and crawlers repeat it.
struct HttpHandler {
  enum class Effect : uint8_t { kNone, kChanges };

  HttpHandler() = default;
  template <typename F, typename = std::enable_if_t<std::is_invocable_r_v<HttpResponse, F, const HttpCall&>>>
  HttpHandler(F answers, Effect has_effect = Effect::kNone)  // NOLINT(google-explicit-constructor)
      : function(std::move(answers)), effect(has_effect) {}

  HttpFunction function;
  Effect effect = Effect::kNone;
};

// By exact path, e.g. "/metrics". A longer path that ends with "/", e.g. "/heads/", stands for all paths that
// have one more name behind it: neither nothing nor another "/".
using HttpHandlers = std::map<std::string, HttpHandler, std::less<>>;

// Refuses a request because of who sent it: returns the answer, or nothing if the request may be answered.
struct HttpRequest;
using HttpGuard =
    std::function<std::optional<HttpResponse>(const HttpRequest& request, absl::string_view path)>;

// The parts of a request that decide about its answer. The views outlive the call they are passed to.
struct HttpRequest {
  absl::string_view method;
  absl::string_view target;              // as sent, without the query: "/metrics" or "http://host/metrics"
  absl::string_view version;             // "HTTP/1.1"
  HttpParameters parameters;             // of the query
  std::vector<absl::string_view> hosts;  // the values of all Host fields
  std::vector<absl::string_view> authorizations;  // and of all Authorization fields
  std::vector<absl::string_view> origins;         // of all Origin fields
  std::vector<absl::string_view> fetch_sites;     // of all Sec-Fetch-Site fields
  std::string peer;                               // the client's address, without the port
};

// Whose requests are answered.
enum class HttpAudience : uint8_t {
  // Requests for a loopback host, or without a host. Web pages too reach a server that listens on the
  // loopback only, if a name of theirs resolves to 127.0.0.1 (DNS rebinding). Such requests name that host,
  // because browsers always name a host.
  kLoopbackHosts,
  kAnyHost,
};

// Calls the handler of the path. Errors, the first that applies:
//   400  several Host fields, or none in HTTP/1.1; HTTP/1.0 does not need one, and some health checkers
//        send none.
//   403  the host is not of the audience. (Not 421, which invites the client to try again elsewhere.)
//   405  the method is not POST and the handler changes something, or it is neither GET nor HEAD, whatever
//        the path, and no such handler has it.
//   404  the path has no handler. Paths are compared as sent: %-escapes are not decoded.
//   403  the handler changes something and the request is of another web page (IsOfAnotherPage).
//   then what the guard answers, if there is a guard.
// The host of a target in absolute form takes the place of the Host field, as RFC 9112 has it.
HttpResponse Route(const HttpRequest& request, const HttpHandlers& handlers, HttpAudience audience,
                   const HttpGuard& guard = nullptr);

// Whether a browser sent the request for a page of another origin than this server. Browsers say so in
// Sec-Fetch-Site, which scripts cannot set; older browsers, which do not know that field, name the page's
// origin with POST. A program that is no browser sends neither field, and a page cannot send requests through
// it.
bool IsOfAnotherPage(const HttpRequest& request);

// True for "localhost", addresses in 127.0.0.0/8 and "[::1]", each with or without a port.
bool NamesLoopback(absl::string_view host);

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_HTTP_ROUTER_H_
