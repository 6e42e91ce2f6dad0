// A small HTTP server for metrics, health and the status page: GET and HEAD of fixed paths, nothing else.
//
// Thread-safe. Handlers run on the server's threads, several at once.
#ifndef LOSSD_SERVER_METRICS_HTTP_SERVER_H_
#define LOSSD_SERVER_METRICS_HTTP_SERVER_H_

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lossd::metrics {

struct HttpResponse {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
};

// By exact path, e.g. "/metrics".
using HttpHandlers = std::map<std::string, std::function<HttpResponse()>>;

class HttpServer {
 public:
  // Listens on "host:port" (IPv4 address or bracketed IPv6 address; port 0: any free one).
  // INVALID_ARGUMENT if the address has another form, UNAVAILABLE if it cannot be bound.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(absl::string_view address, HttpHandlers handlers);
  // Waits for handlers that are running.
  virtual ~HttpServer() = default;

  // "host:port" with the port that was chosen.
  virtual std::string address() const = 0;
};

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_HTTP_SERVER_H_
