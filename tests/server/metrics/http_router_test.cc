// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "server/metrics/http_server.h"

namespace lossd::metrics::http_router_test {
namespace {

using ::testing::HasSubstr;

const HttpHandlers& Handlers() {
  static const auto* handlers = new HttpHandlers{
      {"/", [](const HttpCall&) { return HttpResponse{.body = "page"}; }},
      {"/down", [](const HttpCall&) { return HttpResponse{.status = 503}; }},
      {"/begin",
       {[](const HttpCall&) { return HttpResponse{.body = "begun"}; }, HttpHandler::Effect::kChanges}},
      {"/heads/", [](const HttpCall& call) { return HttpResponse{.body = std::string(call.rest)}; }},
      {"/echo", [](const HttpCall& call) {
         std::string body;
         for (const auto& [name, value] : call.parameters) absl::StrAppend(&body, name, "=", value, ";");
         return HttpResponse{.body = body};
       }}};
  return *handlers;
}

HttpResponse RouteOnLoopback(const HttpRequest& request) {
  return Route(request, Handlers(), HttpAudience::kLoopbackHosts);
}

HttpRequest Get(absl::string_view target) {
  return {.method = "GET", .target = target, .version = "HTTP/1.1", .hosts = {"localhost"}};
}

TEST(HttpRouterTest, CallsTheHandlerOfThePath) {
  EXPECT_EQ(RouteOnLoopback(Get("/")).body, "page");
  EXPECT_EQ(RouteOnLoopback(Get("/down")).status, 503);
  EXPECT_EQ(RouteOnLoopback(Get("http://localhost:80/down")).status, 503);
  EXPECT_EQ(RouteOnLoopback(Get("HTTP://[::1]")).body, "page");
}

TEST(HttpRouterTest, PathsAreExact) {
  for (const char* target :
       {"", "*", "//", "/down/", "/Down", "/%64own", "down", "/down%00", "https://localhost/"}) {
    EXPECT_EQ(RouteOnLoopback(Get(target)).status, 404) << target;
  }
}

TEST(HttpRouterTest, APrefixTakesOneMoreName) {
  EXPECT_EQ(RouteOnLoopback(Get("/heads/lm")).body, "lm");
  EXPECT_EQ(RouteOnLoopback(Get("/heads/..")).body, "..");
  EXPECT_EQ(RouteOnLoopback(Get("/heads/%2e")).body, "%2e");
  EXPECT_EQ(RouteOnLoopback(Get("http://localhost/heads/lm")).body, "lm");
  for (const char* target :
       {"/heads", "/heads/", "/heads/lm/", "/heads/a/b", "/heads//", "//heads/lm", "heads/lm"}) {
    EXPECT_EQ(RouteOnLoopback(Get(target)).status, 404) << target;
  }
}

TEST(HttpRouterTest, HandlersGetTheParameters) {
  HttpRequest request = Get("/echo");
  request.parameters = {{"after", "12"}, {"after", ""}, {"%61", "b"}};
  EXPECT_EQ(RouteOnLoopback(request).body, "after=12;after=;%61=b;");
}

TEST(HttpRouterTest, OtherMethodsOnAnyPath) {
  for (const char* method : {"POST", "OPTIONS", "CONNECT", "get", ""}) {
    for (const char* target : {"/", "/missing", "*"}) {
      HttpRequest request = Get(target);
      request.method = method;
      EXPECT_EQ(RouteOnLoopback(request).status, 405) << method << " " << target;
    }
  }
  HttpRequest head = Get("/");
  head.method = "HEAD";
  EXPECT_EQ(RouteOnLoopback(head).status, 200);
}

TEST(HttpRouterTest, WhatChangesSomethingIsAskedWithPost) {
  HttpRequest request = Get("/begin");
  EXPECT_EQ(RouteOnLoopback(request).status, 405);
  EXPECT_EQ(RouteOnLoopback(request).allow, "POST");
  request.method = "HEAD";
  EXPECT_EQ(RouteOnLoopback(request).status, 405);
  request.method = "POST";
  EXPECT_EQ(RouteOnLoopback(request).body, "begun");
  request.target = "/";
  EXPECT_EQ(RouteOnLoopback(request).allow, "GET, HEAD");
}

TEST(HttpRouterTest, PagesOfOtherSitesChangeNothing) {
  HttpRequest request = Get("/begin");
  request.method = "POST";
  request.hosts = {"localhost:7071"};
  const auto status = [&](std::vector<absl::string_view> sites, std::vector<absl::string_view> origins) {
    request.fetch_sites = std::move(sites);
    request.origins = std::move(origins);
    return RouteOnLoopback(request).status;
  };
  EXPECT_EQ(status({}, {}), 200) << "lossctl and curl";
  EXPECT_EQ(status({"same-origin"}, {"http://localhost:7071"}), 200);
  EXPECT_EQ(status({"none"}, {}), 200) << "typed by a person";
  EXPECT_EQ(status({}, {"http://localhost:7071"}), 200);
  EXPECT_EQ(status({}, {"https://LOCALHOST:7071"}), 200) << "behind a proxy that speaks TLS";
  for (const char* site : {"cross-site", "same-site", "", "SAME-ORIGIN", "anything"}) {
    EXPECT_EQ(status({site}, {}), 403) << site;
    EXPECT_EQ(status({site}, {"http://localhost:7071"}), 403) << site;
    EXPECT_EQ(status({"same-origin", site}, {}), 403) << site;
  }
  for (const char* origin : {"https://example.com", "http://localhost", "http://localhost:7072", "null", "",
                             "http://127.0.0.1:7071", "localhost:7071", "http://localhost:7071/"}) {
    EXPECT_EQ(status({}, {origin}), 403) << origin;
    EXPECT_EQ(status({}, {"http://localhost:7071", origin}), 403) << origin;
  }
  EXPECT_THAT(RouteOnLoopback(request).body, HasSubstr("other web sites"));
  request.hosts = {};
  request.version = "HTTP/1.0";
  EXPECT_EQ(status({}, {"http://localhost:7071"}), 403) << "whose origin that is cannot be said";
  EXPECT_EQ(status({}, {}), 200);
  // Reading is kept from other pages by browsers themselves.
  request = Get("/");
  EXPECT_EQ(status({"cross-site"}, {"https://example.com"}), 200);
}

TEST(HttpRouterTest, ExactlyOneHost) {
  HttpRequest request = Get("/");
  request.hosts = {"localhost", "localhost"};
  EXPECT_EQ(RouteOnLoopback(request).status, 400);
  request.hosts = {};
  EXPECT_EQ(RouteOnLoopback(request).status, 400);
  request.version = "HTTP/1.0";
  EXPECT_EQ(RouteOnLoopback(request).status, 200);
}

TEST(HttpRouterTest, OtherHostsReachNoHandlerOnTheLoopback) {
  HttpRequest request = Get("/");
  request.hosts = {"example.com"};
  EXPECT_EQ(RouteOnLoopback(request).status, 403);
  EXPECT_THAT(RouteOnLoopback(request).body, HasSubstr("loopback"));
  EXPECT_EQ(Route(request, Handlers(), HttpAudience::kAnyHost).status, 200);
  request.target = "http://localhost/";  // the target's host counts
  EXPECT_EQ(RouteOnLoopback(request).status, 200);
  EXPECT_EQ(RouteOnLoopback(Get("http://example.com/")).status, 403);
}

TEST(HttpRouterTest, NamesOfTheLoopback) {
  for (const char* host : {"localhost", "LOCALHOST", "localhost:1", "127.0.0.1", "127.255.255.254:65535",
                           "[::1]", "[::1]:80", "[0:0:0:0:0:0:0:1]"}) {
    EXPECT_TRUE(NamesLoopback(host)) << host;
  }
  for (const char* host : {"",
                           ":",
                           ":80",
                           "localhost:",
                           "localhost:65536",
                           "localhost:000080",
                           "localhost:-1",
                           "localhost: 1",
                           " localhost",
                           "localhost.",
                           "localhost.example",
                           "128.0.0.1",
                           "127.1",
                           "127.0.0.1.1",
                           "[127.0.0.1]",
                           "::1",
                           "[::1",
                           "[::1]80",
                           "[::2]",
                           "[]",
                           "[",
                           "localhost:1:1",
                           "a@localhost"}) {
    EXPECT_FALSE(NamesLoopback(host)) << host;
  }
}

// The guard is asked only about requests that would have an answer, with the path that is answered.
TEST(HttpRouterTest, AGuardRefusesForWhoSentIt) {
  std::vector<std::string> asked;
  const HttpGuard guard = [&](const HttpRequest& request,
                              absl::string_view path) -> std::optional<HttpResponse> {
    asked.emplace_back(path);
    if (!request.authorizations.empty()) return std::nullopt;
    return HttpResponse{.status = 401};
  };
  const auto route = [&](const HttpRequest& request) {
    return Route(request, Handlers(), HttpAudience::kLoopbackHosts, guard).status;
  };
  HttpRequest request{.method = "GET", .target = "/", .version = "HTTP/1.1", .hosts = {"localhost"}};
  EXPECT_EQ(route(request), 401);
  request.authorizations = {"Bearer x"};
  EXPECT_EQ(route(request), 200);
  request.target = "http://localhost/down";
  EXPECT_EQ(route(request), 503);
  EXPECT_EQ(asked, (std::vector<std::string>{"/", "/", "/down"}));
  request.target = "/none";
  EXPECT_EQ(route(request), 404);
  request.method = "POST";
  EXPECT_EQ(route(request), 405);
  request.target = "/begin";
  request.origins = {"https://example.com"};
  EXPECT_EQ(route(request), 403);
  EXPECT_EQ(asked.size(), 3u);
}

}  // namespace
}  // namespace lossd::metrics::http_router_test
