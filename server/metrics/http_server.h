// SPDX-License-Identifier: Apache-2.0
// A small HTTP server for metrics, health and the status page: GET and HEAD of the paths that have a handler,
// POST of those that change something, nothing else. It reads no files and no request bodies, and it switches
// to no other protocol.
//
// Thread-safe. Handlers run on the server's one thread, one at a time, and every client waits for the one
// that runs: a handler must not wait for the device, a disk or another client. An answer is copied before it
// is sent, so that a client that takes it slowly delays no other.
//
// Answers. Route (http_router.h) decides about well-formed requests; a request that is not well-formed or too
// large gets an error of the library's (400, 413, 414, 431, 505) or is hung up on. A connection is closed
// after one answer. A server that is bound to a loopback address answers requests for loopback hosts only.
//
// Limits. The thread has kStackBytes of stack, which has to hold the static thread-local data of all
// libraries of the program (BLAS takes 60 KiB) and the handlers. A request line and its header fields share
// kRequestBytes. A connection on which nothing happens for kIdleSeconds is closed. A new connection drops
// those older than HttpConnectionLimits::age; it drops the oldest one when there are more than
// HttpConnectionLimits::in_all, and the oldest one of its own address when that has more than
// HttpConnectionLimits::per_address. A client is therefore never refused because others hold connections, not
// even others at the same address, and these cost one descriptor each and no thread. The server takes at most
// kMostDescriptors descriptors for connections, which leaves most of a process's usual 1,024 to gRPC.
#ifndef LOSSD_SERVER_METRICS_HTTP_SERVER_H_
#define LOSSD_SERVER_METRICS_HTTP_SERVER_H_

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/access/tls_material.h"
#include "server/metrics/http_router.h"

namespace lossd::metrics {

// How the server protects itself. Both may be left out.
struct HttpSecurity {
  access::ReloadedTls* tls = nullptr;  // HTTPS; outlives the server. Clients' certificates are not asked for
  HttpGuard guard;                     // asked before a handler runs
};

class HttpServer {
 public:
  static constexpr size_t kStackBytes = size_t{1} << 20;
  static constexpr size_t kRequestBytes = size_t{16} << 10;
  static constexpr unsigned kIdleSeconds = 10;
  static constexpr unsigned kMostDescriptors = 288;  // connections, and dropped ones that are being closed

  // Listens on "host:port" (IPv4 address or bracketed IPv6 address; port 0: any free one).
  // INVALID_ARGUMENT if the address has another form, UNAVAILABLE if it cannot be bound.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(absl::string_view address, HttpHandlers handlers,
                                                           HttpSecurity security = {});
  // Waits for the handler that is running and closes all connections.
  virtual ~HttpServer() = default;

  // "host:port" with the port that was chosen.
  virtual std::string address() const = 0;
};

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_HTTP_SERVER_H_
