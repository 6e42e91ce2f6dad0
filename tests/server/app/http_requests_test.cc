// SPDX-License-Identifier: Apache-2.0
// What the linked lossd program answers to HTTP requests of every kind, and that none of them ends it. The
// program is the one of this build: its threads carry the static thread-local data of all libraries it links,
// which a test of the HTTP server alone does not have.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "tests/support/raw_http.h"
#include "tests/support/server_process.h"

namespace lossd::http_requests_test {
namespace {

using test::HttpExchange;
using test::HttpGet;
using test::HttpStatus;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kNoAnswer = 0;  // the server hangs up without a word

struct Case {
  std::string name;
  std::string request;
  std::vector<int> statuses;  // any of these
};

std::string Request(absl::string_view method, absl::string_view target, absl::string_view more_headers = "") {
  return absl::StrCat(method, " ", target, " HTTP/1.1\r\nHost: localhost\r\n", more_headers, "\r\n");
}

std::string GetFrom(absl::string_view host) {
  return absl::StrCat("GET /healthz HTTP/1.1\r\nHost: ", host, "\r\n\r\n");
}

std::string ManyHeaders(int count) {
  std::string headers;
  for (int i = 0; i < count; ++i) absl::StrAppend(&headers, "X-Header-", i, ": value\r\n");
  return headers;
}

// The start of a TLS 1.2 handshake: record header, ClientHello, random bytes, cipher suites.
std::string TlsHello() {
  std::string hello = {'\x16', '\x03', '\x01', '\x00', '\x7c', '\x01',
                       '\x00', '\x00', '\x78', '\x03', '\x03'};
  for (int i = 0; i < 118; ++i) hello.push_back(static_cast<char>(37 * i));
  return hello;
}

class HttpRequestsTest : public ::testing::Test {
 protected:
  explicit HttpRequestsTest(const std::vector<std::string>& flags = {"--http=127.0.0.1:0"})
      : server_(LOSSD_BINARY, flags) {}

  const std::string& address() const { return server_.http(); }

  // Sends each request on a connection of its own, checks the status, and that the server serves on. A
  // request that ends the server is reported by its name, and the others are still tried.
  void Try(const std::vector<Case>& cases) {
    for (const Case& test_case : cases) {
      const std::string answer = HttpExchange(address(), test_case.request);
      EXPECT_THAT(test_case.statuses, Contains(HttpStatus(answer)))
          << test_case.name << " was answered with: " << answer.substr(0, 200);
      CheckServes(test_case.name);
    }
  }

  void CheckServes(absl::string_view after) {
    const int status = HttpStatus(HttpGet(address(), "/healthz"));
    if (status == 200) return;
    const int end = server_.WaitFor(absl::Seconds(2));
    if (end == -1000) {
      ADD_FAILURE() << "after " << after << " /healthz has status " << status;
    } else {
      ADD_FAILURE() << after << " ended the server with status " << end;
      server_.Start();
    }
  }

  test::ServerProcess server_;
};

TEST_F(HttpRequestsTest, KnownPaths) {
  for (const char* path : {"/", "/history.json", "/events.json", "/page/page.js", "/page/page.css",
                           "/page/icon.svg", "/metrics", "/livez", "/readyz", "/healthz"}) {
    const std::string get = HttpGet(address(), path);
    EXPECT_EQ(HttpStatus(get), 200) << path;
    const size_t body = get.find("\r\n\r\n") + 4;
    EXPECT_GT(get.size(), body) << path;
    const std::string head = HttpExchange(address(), Request("HEAD", path));
    EXPECT_EQ(HttpStatus(head), 200) << path;
    EXPECT_EQ(head.size(), head.find("\r\n\r\n") + 4) << path << " HEAD has a body";
    EXPECT_THAT(head, HasSubstr("Content-Length: ")) << path;
    EXPECT_THAT(head, Not(HasSubstr("Content-Length: 0\r\n"))) << path;
  }
  EXPECT_THAT(HttpGet(address(), "/metrics"), HasSubstr("lossd_build_info"));
  EXPECT_EQ(HttpStatus(HttpGet(address(), "/healthz?verbose=1")), 200);
}

TEST_F(HttpRequestsTest, AnswersForbidCachingSniffingScriptsAndFrames) {
  for (const char* path : {"/", "/metrics", "/healthz", "/missing"}) {
    const std::string answer = HttpGet(address(), path);
    for (const char* header :
         {"Cache-Control: no-store\r\n", "X-Content-Type-Options: nosniff\r\n", "X-Frame-Options: DENY\r\n",
          "Referrer-Policy: no-referrer\r\n", "Content-Security-Policy: default-src 'none'",
          "frame-ancestors 'none'", "Connection: close\r\n"}) {
      EXPECT_THAT(answer, HasSubstr(header)) << path;
    }
  }
}

TEST_F(HttpRequestsTest, UnknownPaths) {
  std::vector<Case> cases;
  for (const char* target :
       {"/missing", "/healthz/", "/healthz/more", "//healthz", "/../etc/passwd", "/%2e%2e/etc/passwd",
        "/metrics%00", "/%6detrics", "*", "metrics", "http://localhost/missing"}) {
    cases.push_back({absl::StrCat("GET ", target), Request("GET", target), {404}});
  }
  Try(cases);
}

TEST_F(HttpRequestsTest, OtherMethods) {
  std::vector<Case> cases;
  for (const char* method : {"ACL",
                             "BASELINE-CONTROL",
                             "BIND",
                             "CHECKIN",
                             "CHECKOUT",
                             "CONNECT",
                             "COPY",
                             "DELETE",
                             "LABEL",
                             "LINK",
                             "LOCK",
                             "MERGE",
                             "MKACTIVITY",
                             "MKCALENDAR",
                             "MKCOL",
                             "MKREDIRECTREF",
                             "MKWORKSPACE",
                             "MOVE",
                             "OPTIONS",
                             "ORDERPATCH",
                             "PATCH",
                             "POST",
                             "PRI",
                             "PROPFIND",
                             "PROPPATCH",
                             "PUT",
                             "REBIND",
                             "REPORT",
                             "SEARCH",
                             "TRACE",
                             "UNBIND",
                             "UNCHECKOUT",
                             "UNLINK",
                             "UNLOCK",
                             "UPDATE",
                             "UPDATEREDIRECTREF",
                             "VERSION-CONTROL",
                             "get",
                             "Get",
                             "G",
                             "GETS",
                             "FROB",
                             "M-SEARCH",
                             "!#$%&'*+-.^_`|~"}) {
    for (const char* target : {"/", "/metrics", "/missing", "*"}) {
      cases.push_back({absl::StrCat(method, " ", target), Request(method, target), {405}});
    }
  }
  Try(cases);
  EXPECT_THAT(HttpExchange(address(), Request("POST", "/")), HasSubstr("Allow: GET, HEAD\r\n"));
}

TEST_F(HttpRequestsTest, WhatIsNotARequest) {
  Try({{"a bare word", "HELLO\r\n\r\n", {400, kNoAnswer}},
       {"a bare word without an end of headers", "HELLO\r\n", {400, kNoAnswer}},
       {"a method without a target", "GET\r\n\r\n", {400, kNoAnswer}},
       {"a method and a target without a version", "GET /\r\n\r\n", {400, 505, kNoAnswer}},
       {"an empty target", "GET  HTTP/1.1\r\nHost: localhost\r\n\r\n", {400, 404, kNoAnswer}},
       {"an empty method", " / HTTP/1.1\r\nHost: localhost\r\n\r\n", {400, 405, kNoAnswer}},
       {"HTTP/2 preface", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 505, kNoAnswer}},
       {"HTTP/3.0", "GET / HTTP/3.0\r\nHost: localhost\r\n\r\n", {400, 505, kNoAnswer}},
       {"HTTP/0.9", "GET / HTTP/0.9\r\n\r\n", {400, 505, kNoAnswer}},
       {"a version that is no number", "GET / HTTP/one\r\nHost: localhost\r\n\r\n", {400, 505, kNoAnswer}},
       {"another protocol", "GET / RTSP/1.0\r\nHost: localhost\r\n\r\n", {400, 505, kNoAnswer}},
       {"control bytes", "\x01\x02\x03\r\n\r\n", {400, kNoAnswer}},
       {"a header without a colon", Request("GET", "/", "no colon\r\n"), {400, kNoAnswer}}});
}

TEST_F(HttpRequestsTest, RequestsThatAreTooLarge) {
  const std::string long_path = "/" + std::string(20'000, 'a');
  const std::string long_header = absl::StrCat("X-Long: ", std::string(20'000, 'a'), "\r\n");
  Try({{"20 kB of URI", Request("GET", long_path), {414, 431, kNoAnswer}},
       {"1 MB of URI", Request("GET", std::string(1'000'000, '/')), {414, 431, kNoAnswer}},
       {"20 kB of query", Request("GET", "/?" + std::string(20'000, 'a')), {414, 431, kNoAnswer}},
       {"20 kB of method", Request(std::string(20'000, 'A'), "/"), {400, 405, 414, 431, 501, kNoAnswer}},
       {"a header of 20 kB", Request("GET", "/", long_header), {413, 431, kNoAnswer}},
       {"a header of 1 MB",
        Request("GET", "/", absl::StrCat("X-Long: ", std::string(1'000'000, 'a'), "\r\n")),
        {413, 431, kNoAnswer}},
       {"10,000 headers", Request("GET", "/", ManyHeaders(10'000)), {413, 431, kNoAnswer}},
       {"1 MB without an end of line", std::string(1'000'000, 'x'), {400, 414, 431, kNoAnswer}}});
}

TEST_F(HttpRequestsTest, RequestsOfReasonableSize) {
  Try({{"100 headers", Request("GET", "/healthz", ManyHeaders(100)), {200}},
       {"4 kB of cookies",
        Request("GET", "/healthz", absl::StrCat("Cookie: a=", std::string(4096, 'b'), "\r\n")),
        {200}}});
}

TEST_F(HttpRequestsTest, BodiesAreNotRead) {
  Try({{"GET with a body", Request("GET", "/healthz", "Content-Length: 5\r\n") + "hello", {200}},
       {"POST with a body", Request("POST", "/", "Content-Length: 5\r\n") + "hello", {405}},
       {"POST whose body never comes", Request("POST", "/", "Content-Length: 1000000000\r\n"), {405}},
       {"POST of a trace, whose body never comes",
        Request("POST", "/trace?seconds=0", "Content-Length: 1000000000\r\n"),
        {400}},
       {"a chunked POST",
        Request("POST", "/", "Transfer-Encoding: chunked\r\n") + "5\r\nhello\r\n0\r\n\r\n",
        {405}},
       {"a broken chunked POST",
        Request("POST", "/", "Transfer-Encoding: chunked\r\n") + "zz\r\nhello",
        {405, kNoAnswer}},
       {"POST that waits for leave",
        Request("POST", "/", "Content-Length: 5\r\nExpect: 100-continue\r\n"),
        {405, 417}},
       {"a negative length", Request("POST", "/", "Content-Length: -1\r\n"), {400, 405, kNoAnswer}},
       {"a length beyond 64 bits",
        Request("POST", "/", "Content-Length: 99999999999999999999999\r\n"),
        {400, 405, 413, kNoAnswer}}});
}

TEST_F(HttpRequestsTest, NoUpgrades) {
  const std::string websocket =
      "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
      "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
  Try({{"a WebSocket of /", Request("GET", "/", websocket), {200}},
       {"a WebSocket of /metrics", Request("GET", "/metrics", websocket), {200}},
       {"h2c",
        Request(
            "GET", "/healthz",
            "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"),
        {200}}});
}

TEST_F(HttpRequestsTest, FormsOfTheTarget) {
  Try({{"absolute form", Request("GET", "http://localhost/healthz"), {200}},
       {"absolute form with a port", Request("GET", "HTTP://127.0.0.1:80/healthz?q"), {200}},
       {"absolute form without a path", Request("GET", "http://localhost"), {200}},
       {"authority form", Request("CONNECT", "localhost:80"), {405}},
       {"OPTIONS *", Request("OPTIONS", "*"), {405}}});
}

// A connection is closed after its first answer; requests that follow on it are not answered.
TEST_F(HttpRequestsTest, PipelinedRequests) {
  std::string requests;
  for (int i = 0; i < 100; ++i) requests += Request("GET", "/healthz");
  const std::string answer = HttpExchange(address(), requests);
  EXPECT_EQ(HttpStatus(answer), 200);
  EXPECT_EQ(answer.find("HTTP/1.1", 1), std::string::npos) << answer;
  CheckServes("100 pipelined requests");
}

// Half of something and then silence, until the client hangs up.
TEST_F(HttpRequestsTest, HalfARequest) {
  for (const std::string& half : std::vector<std::string>{
           "", "G", "GET / HT", "GET / HTTP/1.1\r\n", "GET / HTTP/1.1\r\nHost: local",
           "POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhe", TlsHello()}) {
    test::RawHttp connection(address());
    ASSERT_TRUE(connection.connected());
    EXPECT_TRUE(connection.Send(half));
    CheckServes(absl::StrCat("\"", half, "\" and silence"));
    connection.FinishSending();
    connection.ReadToEnd();
    EXPECT_FALSE(connection.timed_out()) << half;
    CheckServes(absl::StrCat("\"", half, "\" and an end"));
  }
}

// Pages of other sites reach a loopback port when a name of theirs resolves to it (DNS rebinding); their
// requests carry that name.
TEST_F(HttpRequestsTest, HostsOfALoopbackServer) {
  std::vector<Case> cases;
  for (const char* host : {"localhost", "LocalHost", "localhost:7071", "127.0.0.1", "127.0.0.1:7071",
                           "127.1.2.3", "[::1]", "[::1]:7071"}) {
    cases.push_back({absl::StrCat("Host: ", host), GetFrom(host), {200}});
  }
  for (const char* host :
       {"example.com", "example.com:7071", "localhost.example.com", "127.0.0.1.example.com", "10.0.0.1",
        "0.0.0.0", "[::2]", "::1", "[::1", "[::1]x", "localhost:", "localhost:x", "localhost:99999999",
        "user@localhost", "127.1", "2130706433", "\"localhost\""}) {
    cases.push_back({absl::StrCat("Host: ", host), GetFrom(host), {403}});
  }
  cases.push_back({"an empty Host", GetFrom(""), {403}});
  cases.push_back(
      {"another Host and a known path", "GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n", {403}});
  cases.push_back(
      {"another Host and a wrong method", "POST / HTTP/1.1\r\nHost: evil.example\r\n\r\n", {403}});
  cases.push_back({"a target elsewhere", Request("GET", "http://evil.example/healthz"), {403}});
  cases.push_back({"HTTP/1.1 without Host", "GET /healthz HTTP/1.1\r\n\r\n", {400}});
  cases.push_back({"two Hosts", Request("GET", "/healthz", "Host: evil.example\r\n"), {400}});
  cases.push_back({"HTTP/1.0 without Host", "GET /healthz HTTP/1.0\r\n\r\n", {200}});
  cases.push_back(
      {"HTTP/1.0 with another Host", "GET /healthz HTTP/1.0\r\nHost: evil.example\r\n\r\n", {403}});
  Try(cases);
}

class PublicHttpTest : public HttpRequestsTest {
 protected:
  PublicHttpTest() : HttpRequestsTest({"--http=0.0.0.0:0", "--insecure"}) {}
};

TEST_F(PublicHttpTest, AnyHostPassesBeyondTheLoopback) {
  Try({{"Host: example.com", GetFrom("example.com:7071"), {200}},
       {"Host: localhost", GetFrom("localhost"), {200}},
       {"a target elsewhere", Request("GET", "http://example.com/healthz"), {200}},
       {"HTTP/1.1 without Host", "GET /healthz HTTP/1.1\r\n\r\n", {400}},
       {"two Hosts", Request("GET", "/healthz", "Host: example.com\r\n"), {400}},
       {"HTTP/1.0 without Host", "GET /healthz HTTP/1.0\r\n\r\n", {200}}});
}

}  // namespace
}  // namespace lossd::http_requests_test
