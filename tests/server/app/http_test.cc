// SPDX-License-Identifier: Apache-2.0
// What the linked lossd program answers to HTTP requests of every kind, and that none of them ends it, alone
// and under load. The program is the one of this build: its threads carry the static thread-local data of all
// libraries it links, which a test of the HTTP server alone does not have.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/support/raw_http.h"
#include "tests/support/server_process.h"

namespace lossd::http_test {
namespace {

using test::HttpExchange;
using test::HttpGet;
using test::HttpStatus;
using test::RawHttp;
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

// ---- Under load ----
// The HTTP port of the linked lossd program under load: half-open connections, clients that take no answers,
// 100,000 random requests, and a stop in the middle of it.
//
// The requirement for a scrape beside 1,000 half-open connections is one second. The bound here is
// kScrapeLimit, which leaves room for a slow machine that is shared with other tests.

constexpr absl::Duration kScrapeLimit = absl::Seconds(4);
// How long a stop may take with open connections: the drain's own second, and room for a slow machine.
constexpr absl::Duration kStopLimit = absl::Seconds(5);
constexpr char kHalfARequest[] = "GET /metrics HTTP/1.1\r\nHost: local";

// What load must not make grow.
struct Footprint {
  int64_t resident_kib = 0;
  int64_t threads = 0;
  int64_t descriptors = 0;
};

Footprint Measure(pid_t pid) {
  const std::string folder = absl::StrCat("/proc/", pid);
  Footprint footprint;
  std::ifstream status(folder + "/status");
  for (std::string key; status >> key; std::getline(status, key)) {
    if (key == "VmRSS:") status >> footprint.resident_kib;
    if (key == "Threads:") status >> footprint.threads;
  }
  footprint.descriptors = std::distance(std::filesystem::directory_iterator(folder + "/fd"), {});
  EXPECT_GT(footprint.resident_kib, 0);
  EXPECT_GT(footprint.threads, 0);
  return footprint;
}

void AllowDescriptors(rlim_t count) {
  rlimit limit = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  ASSERT_GE(limit.rlim_max, count);
  limit.rlim_cur = count;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
}

class HttpLoadTest : public ::testing::Test {
 protected:
  static constexpr int kServerDescriptors = 1024;  // the common limit of a process

  static void SetUpTestSuite() { AllowDescriptors(kServerDescriptors); }
  HttpLoadTest() : server_(LOSSD_BINARY, {"--http=127.0.0.1:0", "--log_level=warning"}) {
    AllowDescriptors(4096);  // of this process; the server has started with fewer
  }
  ~HttpLoadTest() override { AllowDescriptors(kServerDescriptors); }

  const std::string& address() const { return server_.http(); }

  std::vector<RawHttp> OpenAndSend(int count, absl::string_view bytes,
                                   const std::function<std::string(int)>& source) const {
    std::vector<RawHttp> connections;
    for (int i = 0; i < count; ++i) {
      connections.emplace_back(address(), absl::Seconds(60), source(i));
      EXPECT_TRUE(connections.back().connected()) << i;
      connections.back().Send(bytes);
    }
    return connections;
  }
  static std::string Loopback(int) { return "127.0.0.1"; }

  void CheckScrapesAreAnswered() {
    for (const char* path : {"/healthz", "/metrics", "/"}) {
      const absl::Time begin = absl::Now();
      EXPECT_EQ(HttpStatus(HttpGet(address(), path)), 200) << path;
      EXPECT_LT(absl::Now() - begin, kScrapeLimit) << path;
    }
    ASSERT_TRUE(server_.Running()) << "ended with status " << server_.WaitFor(absl::Seconds(1));
  }

  test::ServerProcess server_;
};

TEST_F(HttpLoadTest, EightHalfOpenConnections) {
  const auto connections = OpenAndSend(8, kHalfARequest, Loopback);
  CheckScrapesAreAnswered();
}

TEST_F(HttpLoadTest, AThousandHalfOpenConnectionsFromTheScrapersAddress) {
  const Footprint before = Measure(server_.pid());
  const auto connections = OpenAndSend(1000, kHalfARequest, Loopback);
  CheckScrapesAreAnswered();
  const Footprint after = Measure(server_.pid());
  EXPECT_LE(after.threads, before.threads + 4);
  EXPECT_LT(after.descriptors, before.descriptors + 400);
}

TEST_F(HttpLoadTest, AThousandHalfOpenConnectionsFromTenAddresses) {
  const Footprint before = Measure(server_.pid());
  const auto connections =
      OpenAndSend(1000, kHalfARequest, [](int i) { return absl::StrCat("127.0.1.", 1 + i % 10); });
  CheckScrapesAreAnswered();
  EXPECT_LT(Measure(server_.pid()).descriptors, before.descriptors + 400);
}

// Programs of the server's machine are told apart by their users, whatever addresses of the loopback they
// take.
class HttpUsersTest : public HttpLoadTest {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "only root can play other users";
  }

  // Half-open connections of one user from ten addresses.
  std::vector<RawHttp> OpenAs(uid_t user, int count) const {
    const test::AsUser as(user);
    return OpenAndSend(count, kHalfARequest, [](int i) { return absl::StrCat("127.0.1.", 1 + i % 10); });
  }
  // lossd_limits_reached_total.
  int64_t Reached(absl::string_view flag) const {
    const std::string metrics = HttpGet(address(), "/metrics");
    const std::string series = absl::StrCat("\nlossd_limits_reached_total{limit=\"", flag, "\"} ");
    const size_t at = metrics.find(series);
    return at == std::string::npos ? 0 : std::atoll(metrics.c_str() + at + series.size());
  }

  static constexpr uid_t kOther = 60'001;
};

TEST_F(HttpUsersTest, AUserMakesRoomWithHisOwnConnectionsAlone) {
  // A connection on which nothing happens for 10 seconds is closed: on a busy machine, try again.
  for (bool was_quick = false; !was_quick;) {
    const int64_t before = Reached("http_connections_per_address");
    RawHttp own(address());
    const absl::Time begin = absl::Now();
    own.Send("GET /livez HTTP/1.1\r\n");
    const auto others = OpenAs(kOther, 200);
    EXPECT_GE(Reached("http_connections_per_address"), before + 72);
    own.Send("Host: localhost\r\n\r\n");
    const std::string answer = own.ReadToEnd();
    was_quick = absl::Now() - begin < absl::Seconds(8);
    EXPECT_TRUE(HttpStatus(answer) == 200 || !was_quick) << answer;
  }
  EXPECT_EQ(Reached("http_connections"), 0);
  EXPECT_NE(HttpGet(address(), "/events.json").find("\"http_connections_per_address was reached"),
            std::string::npos)
      << "which is no flag";
  EXPECT_NE(
      server_.log().find(absl::StrCat("limit=http_connections_per_address address=\"uid ", kOther, "\"")),
      std::string::npos)
      << server_.log();
}

TEST_F(HttpUsersTest, ManyUsersMakeRoomTogether) {
  const auto first = OpenAs(kOther, 100);
  const auto second = OpenAs(kOther + 1, 100);
  const auto third = OpenAs(kOther + 2, 100);
  EXPECT_GE(Reached("http_connections"), 44);  // 256 are open at most
  EXPECT_EQ(Reached("http_connections_per_address"), 0);
  CheckScrapesAreAnswered();
}

TEST_F(HttpLoadTest, ClientsThatTakeNoAnswer) {
  const auto connections = OpenAndSend(200, "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", Loopback);
  CheckScrapesAreAnswered();
}

TEST_F(HttpLoadTest, StopsWithOpenConnections) {
  const auto silent = OpenAndSend(20, "", Loopback);
  const auto half = OpenAndSend(20, kHalfARequest, Loopback);
  const auto unread = OpenAndSend(20, "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", Loopback);
  server_.Signal(SIGTERM);
  EXPECT_EQ(server_.WaitFor(kStopLimit), 0);
}

// Makes requests out of valid ones by random mutations, or out of nothing.
class RequestMutator {
 public:
  explicit RequestMutator(uint32_t seed) : random_(seed) {}

  uint32_t Draw(uint32_t below) { return std::uniform_int_distribution<uint32_t>(0, below - 1)(random_); }

  std::string Next() {
    if (Draw(10) == 0) return RandomBytes(1 + Draw(2000));
    std::string request = kValid[Draw(std::size(kValid))];
    for (uint32_t i = Draw(6); i > 0; --i) Mutate(request);
    return request;
  }

 private:
  static constexpr const char* kValid[] = {
      "GET /metrics HTTP/1.1\r\nHost: localhost\r\nUser-Agent: Prometheus\r\nAccept: text/plain\r\n\r\n",
      "GET / HTTP/1.1\r\nHost: 127.0.0.1:7071\r\nConnection: keep-alive\r\nCookie: a=b; c=d\r\n\r\n",
      "HEAD /healthz HTTP/1.1\r\nHost: [::1]\r\n\r\n",
      "GET /healthz HTTP/1.0\r\n\r\n",
      "GET http://localhost/livez?a=b&c=%20d HTTP/1.1\r\nHost: localhost\r\n\r\n",
      "POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 11\r\n\r\nhello world",
      "POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nA: "
      "b\r\n\r\n",
      "PROPFIND / HTTP/1.1\r\nHost: localhost\r\nDepth: 1\r\nExpect: 100-continue\r\n\r\n",
      "GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
      "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
      "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
      "GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Digest username=\"a\", nonce=\"b\"\r\n\r\n"};
  static constexpr const char* kPieces[] = {
      "\r\n", "\n",  "\r",      "\r\n\r\n", ":",     " ",
      "%",    "%00", "chunked", "\t",       "-1",    "99999999999999999999",
      "?",    "&",   "=",       "HTTP/1.1", "Host:", "Content-Length: 1\r\n"};

  std::string RandomBytes(uint32_t count) {
    std::string bytes;
    for (uint32_t i = 0; i < count; ++i) bytes.push_back(static_cast<char>(Draw(256)));
    return bytes;
  }

  void Mutate(std::string& request) {
    const size_t at = Draw(static_cast<uint32_t>(request.size()) + 1);
    switch (Draw(8)) {
      case 0:
        if (at < request.size()) request[at] = static_cast<char>(Draw(256));
        break;
      case 1:
        request.insert(at, RandomBytes(1 + Draw(8)));
        break;
      case 2:
        request.erase(at, 1 + Draw(20));
        break;
      case 3:
        request.insert(at, request.substr(Draw(static_cast<uint32_t>(request.size()) + 1), 1 + Draw(60)));
        break;
      case 4:
        request.insert(at, kPieces[Draw(std::size(kPieces))]);
        break;
      case 5:
        request.resize(at);
        break;
      case 6:
        request += kValid[Draw(std::size(kValid))];
        break;
      case 7:
        if (Draw(20) == 0) request.insert(at, Draw(40'000), static_cast<char>(Draw(256)));
        break;
    }
  }

  std::mt19937 random_;
};

struct Outcome {
  int64_t answered = 0;    // with a status
  int64_t unfinished = 0;  // neither an answer nor the end of the connection within kPatience
  bool refused = false;    // a connection was not accepted
};

// Sends `count` requests, one a connection: most are followed by an end and read to the end, some are left at
// once.
Outcome SendRandomRequests(const std::string& address, uint32_t seed, int count) {
  constexpr absl::Duration kPatience =
      absl::Seconds(5);  // the server would wait longer for the rest of a request
  RequestMutator mutator(seed);
  Outcome outcome;
  for (int i = 0; i < count && !outcome.refused; ++i) {
    RawHttp connection(address, kPatience);
    outcome.refused = !connection.connected();
    connection.Send(mutator.Next());
    const uint32_t manner = mutator.Draw(10);
    if (manner == 0) continue;
    if (manner == 1) {
      connection.Reset();
      continue;
    }
    connection.FinishSending();
    if (HttpStatus(connection.ReadToEnd()) != 0) ++outcome.answered;
    if (connection.timed_out()) ++outcome.unfinished;
  }
  return outcome;
}

TEST_F(HttpLoadTest, AHundredThousandRandomRequests) {
  constexpr uint32_t kSeed = 20'000;
  constexpr int kThreads = 4;
  constexpr int kRequests = 100'000;
  constexpr int64_t kMoreKib = 32 << 10;
  constexpr int64_t kMoreThreads = 16;  // gRPC starts and ends some as it likes; a leak would have thousands
  constexpr int64_t kMoreDescriptors = 8;
  std::cout << "seeds " << kSeed << " to " << kSeed + kThreads - 1 << "\n";
  CheckScrapesAreAnswered();
  const Footprint before = Measure(server_.pid());

  std::vector<Outcome> outcomes(kThreads);
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < kThreads; ++i) {
    threads.emplace_back(
        [&, i] { outcomes[i] = SendRandomRequests(address(), kSeed + i, kRequests / kThreads); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Outcome& outcome : outcomes) {
    EXPECT_FALSE(outcome.refused);
    EXPECT_GT(outcome.answered, kRequests / kThreads / 4);
    EXPECT_EQ(outcome.unfinished, 0);
  }

  ASSERT_NO_FATAL_FAILURE(CheckScrapesAreAnswered());
  EXPECT_THAT(HttpGet(address(), "/metrics"), HasSubstr("lossd_build_info"));
  Footprint after = Measure(server_.pid());
  for (int i = 0; i < 100 && after.descriptors > before.descriptors + kMoreDescriptors; ++i) {
    absl::SleepFor(absl::Milliseconds(100));  // the last connections are being closed
    after = Measure(server_.pid());
  }
  EXPECT_LE(after.descriptors, before.descriptors + kMoreDescriptors);
  EXPECT_LE(after.threads, before.threads + kMoreThreads);
#ifndef LOSSD_SANITIZED  // sanitizers keep freed memory for a while
  EXPECT_LE(after.resident_kib, before.resident_kib + kMoreKib);
#endif
}

}  // namespace
}  // namespace lossd::http_test
