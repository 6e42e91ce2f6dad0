// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/http_server.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace lossd::metrics::http_server_test {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

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
  EXPECT_LT(absl::Now() - begin, absl::Seconds(1));
}

TEST_F(HttpServerTest, AddressesItCannotUse) {
  for (const char* address :
       {"", "nowhere", "127.0.0.1:", ":80", "127.0.0.1:70000", "127.0.0.1:80,8080", "127.0.0.1:80s"}) {
    EXPECT_EQ(HttpServer::Start(address, {}).status().code(), absl::StatusCode::kInvalidArgument) << address;
  }
  EXPECT_EQ(HttpServer::Start(server_->address(), {}).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace lossd::metrics::http_server_test
