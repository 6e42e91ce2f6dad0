// SPDX-License-Identifier: Apache-2.0
// HTTP requests as libmicrohttpd hands them over. A server on the loopback runs a handler for loopback hosts
// only, which is what stops web pages that rebind their name (DNS rebinding), and only for GET and HEAD of
// its paths.
//
// Input: method, target, version and Host fields, separated by zero bytes.
#include <regex>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/metrics/http_server.h"
#include "tests/fuzz/fuzz.h"

namespace lossd::fuzz {
namespace {

// Written apart from the router, and wider in one thing only: it takes any text of digits and points after
// 127.
bool MayNameLoopback(const std::string& host) {
  static const std::regex kLoopback(
      R"((localhost|127(\.\d{1,3}){3}|\[[0:]*:0*1\]|\[[0:.]*:0\.0\.0\.1\])(:\d+)?)",
      std::regex::icase | std::regex::optimize);
  return host.size() < 200 && std::regex_match(host, kLoopback);
}

std::string HostOf(const metrics::HttpRequest& request) {
  const absl::string_view target = request.target;
  if (!absl::StartsWithIgnoreCase(target, "http://")) {
    return std::string(request.hosts.empty() ? "localhost" : request.hosts.front());
  }
  const absl::string_view rest = target.substr(7);
  return std::string(rest.substr(0, rest.find('/')));
}

void CheckRoute(const metrics::HttpRequest& request) {
  std::string ran;
  const metrics::HttpHandlers handlers = {
      {"/", [&](const auto&) { return ran = "/", metrics::HttpResponse{}; }},
      {"/heads/",
       [&](const metrics::HttpCall& call) {
         FUZZ_CHECK(!call.rest.empty() && !absl::StrContains(call.rest, "/"), call.rest);
         return ran = absl::StrCat("/heads/", call.rest), metrics::HttpResponse{};
       }},
      {"/begin",
       {[&](const auto&) { return ran = "/begin", metrics::HttpResponse{}; },
        metrics::HttpHandler::Effect::kChanges}},
      {"/metrics", [&](const auto&) { return ran = "/metrics", metrics::HttpResponse{}; }},
      {"/healthz", [&](const auto&) { return ran = "/healthz", metrics::HttpResponse{}; }}};
  const metrics::HttpResponse response =
      metrics::Route(request, handlers, metrics::HttpAudience::kLoopbackHosts);
  FUZZ_CHECK(ran.empty() == (response.status != 200), absl::StrCat(response.status, " but ran ", ran));
  const auto anywhere = metrics::Route(request, handlers, metrics::HttpAudience::kAnyHost);
  FUZZ_CHECK(response.status == 403 || response.status == anywhere.status,
             "the audience changes more than 403");
  if (response.status != 200) return;
  if (ran == "/begin") {
    FUZZ_CHECK(request.method == "POST", request.method);
    for (absl::string_view site : request.fetch_sites) FUZZ_CHECK(!absl::StrContains(site, "cross"), site);
    if (request.fetch_sites.empty() && !request.origins.empty())
      FUZZ_CHECK(absl::EndsWithIgnoreCase(request.origins.back(), request.hosts.front()), "another origin");
  } else {
    FUZZ_CHECK(request.method == "GET" || request.method == "HEAD", request.method);
  }
  FUZZ_CHECK(request.hosts.size() <= 1, "several hosts");
  FUZZ_CHECK(MayNameLoopback(HostOf(request)), HostOf(request));
  FUZZ_CHECK(absl::EndsWith(request.target, ran) || ran == "/", request.target);
}

}  // namespace
}  // namespace lossd::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lossd;
  const std::vector<absl::string_view> parts = absl::StrSplit(fuzz::AsText(data, size), '\0');
  if (parts.size() < 3) return 0;
  metrics::HttpRequest request = {.method = parts[0], .target = parts[1], .version = parts[2]};
  for (absl::string_view part : absl::MakeConstSpan(parts).subspan(3)) {
    if (absl::ConsumePrefix(&part, "Origin: ")) {
      request.origins.push_back(part);
    } else if (absl::ConsumePrefix(&part, "Sec-Fetch-Site: ")) {
      request.fetch_sites.push_back(part);
    } else {
      request.hosts.push_back(part);
    }
  }
  fuzz::CheckRoute(request);
  return 0;
}
