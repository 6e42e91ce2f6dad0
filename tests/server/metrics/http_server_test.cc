// SPDX-License-Identifier: Apache-2.0
// Tests of the HTTP server: its answers, its router, and the listener.
#include "server/metrics/http_server.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/support/raw_http.h"

namespace lossd::metrics::http_server_test {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// ---- Server ----

class HttpServerTest : public ::testing::Test {
 protected:
  HttpServerTest() {
    auto server = HttpServer::Start(
        "127.0.0.1:0",
        {{"/",
          [](const HttpCall&) { return HttpResponse{.content_type = "text/html", .body = "<p>page</p>"}; }},
         {"/healthz", [](const HttpCall&) { return HttpResponse{.status = 503, .body = "draining\n"}; }}});
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    const std::string address = server_->address();
    port_ = std::atoi(address.substr(address.rfind(':') + 1).c_str());
  }

  // Everything the server answers to these bytes.
  std::string Exchange(const std::string& request) {
    const int descriptor = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in to = {};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(port_));
    inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
    EXPECT_EQ(connect(descriptor, reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
    EXPECT_EQ(send(descriptor, request.data(), request.size(), 0), static_cast<ssize_t>(request.size()));
    std::string answer;
    char buffer[4096];
    for (ssize_t n; (n = recv(descriptor, buffer, sizeof(buffer), 0)) > 0;)
      answer.append(buffer, static_cast<size_t>(n));
    close(descriptor);
    return answer;
  }
  std::string Request(const std::string& method, const std::string& path) {
    return Exchange(
        absl::StrCat(method, " ", path, " HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"));
  }

  std::unique_ptr<HttpServer> server_;
  int port_ = 0;
};

TEST(HttpServerSilenceTest, AHandlerThatDoesNotEndIsASignOfNoLife) {
  absl::Notification begun, may_end;
  auto server = HttpServer::Start("127.0.0.1:0", {{"/slow", [&](const HttpCall&) {
                                                     begun.Notify();
                                                     may_end.WaitForNotification();
                                                     return HttpResponse{.body = "late"};
                                                   }}});
  ASSERT_TRUE(server.ok()) << server.status();
  std::string answer;
  std::thread client([&] { answer = test::HttpGet((*server)->address(), "/slow"); });
  begun.WaitForNotification();
  // The thread that accepts shows a sign of life every second.
  while ((*server)->Silence() < absl::Seconds(3)) absl::SleepFor(absl::Milliseconds(10));
  may_end.Notify();
  client.join();
  EXPECT_EQ(test::HttpStatus(answer), 200);
  while ((*server)->Silence() > absl::Seconds(2)) absl::SleepFor(absl::Milliseconds(10));
}

TEST_F(HttpServerTest, AnswersGetAndHead) {
  const std::string get = Request("GET", "/");
  EXPECT_THAT(get, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(get, HasSubstr("Content-Type: text/html\r\n"));
  EXPECT_THAT(get, EndsWith("\r\n\r\n<p>page</p>"));
  const std::string head = Request("HEAD", "/");
  EXPECT_THAT(head, HasSubstr("Content-Length: 11\r\n"));
  EXPECT_THAT(head, Not(HasSubstr("page")));
  EXPECT_THAT(Request("GET", "/?query=1"), StartsWith("HTTP/1.1 200"));
}

TEST_F(HttpServerTest, PassesTheHandlersStatusOn) {
  const std::string answer = Request("GET", "/healthz");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 503 Service Unavailable\r\n"));
  EXPECT_THAT(answer, EndsWith("draining\n"));
}

TEST_F(HttpServerTest, UnknownPaths) {
  for (const char* path : {"/missing", "/healthz/more", "/../etc/passwd", "/%2e%2e/etc/passwd"}) {
    EXPECT_THAT(Request("GET", path),
                ::testing::AnyOf(StartsWith("HTTP/1.1 404"), StartsWith("HTTP/1.1 400")))
        << path;
  }
}

TEST_F(HttpServerTest, OtherMethods) {
  for (const char* method : {"POST", "PUT", "DELETE", "PATCH"}) {
    const std::string answer = Request(method, "/");
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 405")) << method;
    EXPECT_THAT(answer, HasSubstr("Allow: GET, HEAD\r\n")) << method;
  }
}

TEST_F(HttpServerTest, GarbageDoesNoHarm) {
  Exchange("\x01\x02\x03\r\n\r\n");
  EXPECT_THAT(Request("GET", "/"), StartsWith("HTTP/1.1 200"));
}

TEST_F(HttpServerTest, StopsAtOnce) {
  const absl::Time begin = absl::Now();
  server_.reset();
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
}

TEST_F(HttpServerTest, AddressesItCannotUse) {
  for (const char* address :
       {"", "nowhere", "127.0.0.1:", ":80", "127.0.0.1:70000", "127.0.0.1:80,8080", "127.0.0.1:80s"}) {
    EXPECT_EQ(HttpServer::Start(address, {}).status().code(), absl::StatusCode::kInvalidArgument) << address;
  }
  EXPECT_EQ(HttpServer::Start(server_->address(), {}).status().code(), absl::StatusCode::kUnavailable);
}

// ---- Router ----

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

// ---- Listener ----

TEST(HttpListenerTest, AFreePort) {
  const auto listener = ListenForHttp("127.0.0.1:0");
  ASSERT_TRUE(listener.ok()) << listener.status();
  EXPECT_THAT(listener->address, StartsWith("127.0.0.1:"));
  EXPECT_NE(listener->address, "127.0.0.1:0");
  EXPECT_TRUE(listener->loopback);
  const auto second = ListenForHttp(listener->address);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(second.status().message(), HasSubstr(listener->address));
}

TEST(HttpListenerTest, TheLoopbackAndBeyond) {
  for (const auto& [address, loopback] : {std::pair("127.3.2.1:0", true), std::pair("0.0.0.0:0", false)}) {
    const auto listener = ListenForHttp(address);
    ASSERT_TRUE(listener.ok()) << listener.status();
    EXPECT_EQ(listener->loopback, loopback) << address;
  }
}

TEST(HttpListenerTest, Ipv6) {
  const auto listener = ListenForHttp("[::1]:0");
  if (absl::IsUnavailable(listener.status())) GTEST_SKIP() << listener.status();  // a machine without IPv6
  ASSERT_TRUE(listener.ok()) << listener.status();
  EXPECT_THAT(listener->address, StartsWith("[::1]:"));
  EXPECT_TRUE(listener->loopback);
}

TEST(HttpListenerTest, AddressesItCannotUse) {
  for (const char* address :
       {"", ":", ":80", "nowhere", "localhost:80", "127.0.0.1", "127.0.0.1:", "127.0.0.1:70000",
        "127.0.0.1:-1", "127.0.0.1:+80", "127.0.0.1:80s", "127.0.0.1:80,8080", "127.1:80", "::1:80",
        "[::1]80", "[::1:80", "[127.0.0.1]:80"}) {
    const auto listener = ListenForHttp(address);
    EXPECT_EQ(listener.status().code(), absl::StatusCode::kInvalidArgument) << address;
    EXPECT_THAT(listener.status().message(), HasSubstr(address));
  }
}

}  // namespace
}  // namespace lossd::metrics::http_server_test
