// SPDX-License-Identifier: Apache-2.0
// ListenForHttp opens the listening sockets of the HTTP server.
//
// All functions are stateless and thread-safe.
#ifndef LOSSD_SERVER_METRICS_HTTP_LISTENER_H_
#define LOSSD_SERVER_METRICS_HTTP_LISTENER_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/connections/listening_socket.h"

namespace lossd::metrics {

struct HttpListener {
  std::vector<connections::ListeningSocket> sockets;
  std::string address;  // "host:port" with the port that was chosen
  bool loopback = false;
};

// Listens on "host:port" (IPv4 address or bracketed IPv6 address; port 0: any free one).
// INVALID_ARGUMENT if the address has another form, UNAVAILABLE if it cannot be bound.
absl::StatusOr<HttpListener> ListenForHttp(absl::string_view address);

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_HTTP_LISTENER_H_
