// SPDX-License-Identifier: Apache-2.0
// The addresses of a server. ParseAddresses reads them from a flag ("host:port", or "unix:PATH" of a Unix
// socket), OpenSockets listens on them, and WritePortFile tells the programs that start the server which
// ports were chosen.
//
// All functions are stateless and thread-safe.
#ifndef LOSSD_SERVER_APP_ADDRESSES_H_
#define LOSSD_SERVER_APP_ADDRESSES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/connections/listening_socket.h"

namespace lossd::app {

struct Address {
  std::string host;  // as given; an IPv6 address with its brackets; all of a Unix socket's address
  int port = 0;      // kUnixSocket: a Unix socket
  static constexpr int kUnixSocket = -1;
  std::string text() const;
  // Of a Unix socket: "/run/lossd" of "unix:/run/lossd" and of "unix:///run/lossd".
  std::string socket_path() const;
};

// INVALID_ARGUMENT naming `option` unless `text` is "host:port" with a port in [0, 65535], or "unix:" and a
// path that the system can take.
absl::StatusOr<Address> ParseAddress(absl::string_view option, absl::string_view text);

// One or more addresses with commas between them. INVALID_ARGUMENT as ParseAddress, or if an address is there
// twice.
absl::StatusOr<std::vector<Address>> ParseAddresses(absl::string_view option, absl::string_view text);

// True for localhost, 127.0.0.0/8, [::1] and Unix sockets.
bool IsLoopback(const Address& address);

// Opens the sockets of a server's gRPC addresses: listens on all addresses, which get the ports that were
// chosen. `unix_mode`: of the files of Unix sockets. UNAVAILABLE naming the option `listen`.
absl::StatusOr<std::vector<connections::ListeningSocket>> OpenSockets(std::vector<Address>* addresses,
                                                                      uint32_t unix_mode);

// The addresses with commas between them.
std::string TextOf(const std::vector<Address>& addresses);

// Writes {"grpc": ..., "http": ...} to `path`: the addresses that the server has chosen, for programs that
// start it on any free port. A reader sees the whole file or none. An error names the path, and then no file
// is left.
absl::Status WritePortFile(const std::string& path, const std::string& grpc, const std::string& http);

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_ADDRESSES_H_
