#include "server/metrics/http_server.h"

#include <CivetServer.h>
#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace lossd::metrics {
namespace {

absl::string_view Reason(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 503:
      return "Service Unavailable";
    default:
      return "Error";
  }
}

void Send(mg_connection* connection, const HttpResponse& response, bool with_body) {
  const std::string head =
      absl::StrCat("HTTP/1.1 ", response.status, " ", Reason(response.status),
                   "\r\nContent-Type: ", response.content_type, "\r\nContent-Length: ", response.body.size(),
                   "\r\nCache-Control: no-store", "\r\nX-Content-Type-Options: nosniff",
                   "\r\nContent-Security-Policy: default-src 'none'; style-src 'unsafe-inline'",
                   response.status == 405 ? "\r\nAllow: GET, HEAD" : "", "\r\nConnection: close\r\n\r\n");
  mg_write(connection, head.data(), head.size());
  if (with_body) mg_write(connection, response.body.data(), response.body.size());
}

// Answers every path and method itself, so that the library's file serving is never reached.
class Router final : public CivetHandler {
 public:
  explicit Router(HttpHandlers handlers) : handlers_(std::move(handlers)) {}

  using CivetHandler::handleDelete;
  using CivetHandler::handleGet;
  using CivetHandler::handleHead;
  using CivetHandler::handleOptions;
  using CivetHandler::handlePatch;
  using CivetHandler::handlePost;
  using CivetHandler::handlePut;

  bool handleGet(CivetServer*, mg_connection* connection) override { return Answer(connection, true); }
  bool handleHead(CivetServer*, mg_connection* connection) override { return Answer(connection, false); }
  bool handlePost(CivetServer*, mg_connection* connection) override { return Refuse(connection); }
  bool handlePut(CivetServer*, mg_connection* connection) override { return Refuse(connection); }
  bool handleDelete(CivetServer*, mg_connection* connection) override { return Refuse(connection); }
  bool handleOptions(CivetServer*, mg_connection* connection) override { return Refuse(connection); }
  bool handlePatch(CivetServer*, mg_connection* connection) override { return Refuse(connection); }

 private:
  bool Answer(mg_connection* connection, bool with_body) {
    const char* path = mg_get_request_info(connection)->local_uri;
    const auto it = handlers_.find(path == nullptr ? "" : path);
    const HttpResponse response =
        it == handlers_.end() ? HttpResponse{.status = 404, .body = "not found\n"} : it->second();
    Send(connection, response, with_body);
    return true;
  }

  static bool Refuse(mg_connection* connection) {
    Send(connection, {.status = 405, .body = "only GET and HEAD\n"}, true);
    return true;
  }

  const HttpHandlers handlers_;
};

class CivetHttpServer final : public HttpServer {
 public:
  CivetHttpServer(absl::string_view host, const std::vector<std::string>& options, HttpHandlers handlers)
      : router_(std::move(handlers)), server_(options), host_(host) {
    server_.addHandler("/", router_);
    port_ = Port();
  }

  // The library notices a request to stop when its poll returns: with a new connection, or after two
  // seconds.
  ~CivetHttpServer() override {
    std::atomic<bool> closed{false};
    std::thread waker([this, &closed] {
      while (!closed) {
        Knock();
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    });
    server_.close();
    closed = true;
    waker.join();
  }

  std::string address() const override { return absl::StrCat(host_, ":", port_); }

 private:
  int Port() {
    const std::vector<int> ports = server_.getListeningPorts();
    return ports.empty() ? 0 : ports.front();
  }

  // Connects to the server and hangs up; errors do not matter.
  void Knock() const {
    const absl::string_view host = host_ == "0.0.0.0" ? "127.0.0.1" : absl::string_view(host_);
    sockaddr_in to = {};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(port_));
    if (inet_pton(AF_INET, std::string(host).c_str(), &to.sin_addr) != 1) return;
    const int descriptor = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (descriptor < 0) return;
    (void)connect(descriptor, reinterpret_cast<const sockaddr*>(&to), sizeof(to));
    close(descriptor);
  }

  Router router_;  // outlives server_
  CivetServer server_;
  const std::string host_;
  int port_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(absl::string_view address,
                                                              HttpHandlers handlers) {
  const size_t colon = address.rfind(':');
  int port = -1;
  if (colon == absl::string_view::npos || colon == 0 || !absl::SimpleAtoi(address.substr(colon + 1), &port) ||
      port < 0 || port > 65535 || address.find_first_of(", +rs") != absl::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("http address must be <IP address>:<port>, got ", address));
  }
  const std::vector<std::string> options = {
      "listening_ports", std::string(address), "num_threads", "4", "request_timeout_ms",
      "10000",           "enable_keep_alive",  "no"};
  try {
    return std::unique_ptr<HttpServer>(
        new CivetHttpServer(address.substr(0, colon), options, std::move(handlers)));
  } catch (const CivetException& error) {
    return absl::UnavailableError(absl::StrCat("cannot listen for HTTP on ", address, ": ", error.what()));
  }
}

}  // namespace lossd::metrics
