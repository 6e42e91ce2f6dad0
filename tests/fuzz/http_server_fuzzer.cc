// SPDX-License-Identifier: Apache-2.0
// Bytes on a connection to the HTTP port, through the kernel, libmicrohttpd and the server's own callbacks.
// The server closes the connection, answers with a status that it or the library gives, and goes on answering
// others.
#include <algorithm>
#include <array>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/metrics/http_server.h"
#include "tests/fuzz/fuzz.h"
#include "tests/support/raw_http.h"

namespace lossd::fuzz {
namespace {

constexpr std::array<int, 11> kStatuses = {200, 400, 403, 404, 405, 408, 413, 414, 431, 501, 505};
constexpr int kInputsPerCheck = 64;

// What the request says, which the handler may read to its end.
metrics::HttpResponse Echo(const metrics::HttpCall& call) {
  FUZZ_CHECK(!call.rest.empty() && !absl::StrContains(call.rest, "/"), call.rest);
  std::string body(call.rest);
  for (const auto& [name, value] : call.parameters) absl::StrAppend(&body, "\n", name, "=", value);
  return {.body = body};
}

std::unique_ptr<metrics::HttpServer> StartServer() {
  auto server = metrics::HttpServer::Start(
      "127.0.0.1:0",
      {{"/", [](const auto&) { return metrics::HttpResponse{.body = "page\n"}; }},
       {"/heads/", [](const auto& call) { return Echo(call); }},
       {"/metrics", [](const auto&) { return metrics::HttpResponse{.body = std::string(100'000, 'm')}; }},
       {"/healthz", [](const auto&) { return metrics::HttpResponse{.body = "ok\n"}; }}});
  FUZZ_CHECK(server.ok(), server.status().ToString());
  return *std::move(server);
}

std::string Exchange(const std::string& address, absl::string_view request) {
  test::RawHttp connection(address);
  FUZZ_CHECK(connection.connected(), "the server takes no connection");
  connection.Send(request);
  connection.FinishSending();
  std::string answer = connection.ReadToEnd();
  FUZZ_CHECK(!connection.timed_out(), "the server neither answers nor hangs up");
  connection.Reset();  // leaves no port waiting
  return answer;
}

void CheckAnswer(absl::string_view answer) {
  if (answer.empty()) return;
  const int status = test::HttpStatus(answer);
  FUZZ_CHECK(std::find(kStatuses.begin(), kStatuses.end(), status) != kStatuses.end(), answer);
  // An answer of the server's own; the library refuses by itself what is no HTTP.
  const bool own = status == 200 || status == 403 || status == 404 || status == 405;
  FUZZ_CHECK(!own || absl::StrContains(answer, "X-Content-Type-Options: nosniff"), answer);
}

}  // namespace
}  // namespace lossd::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lossd;
  static const std::unique_ptr<metrics::HttpServer> server = fuzz::StartServer();
  static int inputs = 0;
  fuzz::CheckAnswer(fuzz::Exchange(server->address(), fuzz::AsText(data, size)));
  if (++inputs % fuzz::kInputsPerCheck != 0) return 0;
  const std::string health =
      fuzz::Exchange(server->address(), "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n");
  FUZZ_CHECK(test::HttpStatus(health) == 200, health);
  return 0;
}
