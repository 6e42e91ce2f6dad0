// SPDX-License-Identifier: Apache-2.0
// The HTTP port of the linked lossd program under load: half-open connections, clients that take no answers,
// 100,000 random requests, and a stop in the middle of it.
//
// The requirement for a scrape beside 1,000 half-open connections is one second. The bound here is
// kScrapeLimit, which leaves room for a slow machine that is shared with other tests.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
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

namespace lossd::http_load_test {
namespace {

using test::HttpGet;
using test::HttpStatus;
using test::RawHttp;
using ::testing::HasSubstr;

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
  HttpLoadTest() : server_(LOSSD_BINARY, {"--http=127.0.0.1:0"}) {
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
}  // namespace lossd::http_load_test
