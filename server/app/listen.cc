// SPDX-License-Identifier: Apache-2.0
#include "server/app/listen.h"

#include <sys/socket.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace lossd::app {
namespace {

// Listens on one address, and adds the sockets to `sockets`.
absl::Status Open(Address* address, uint32_t unix_mode, std::vector<connections::ListeningSocket>* sockets) {
  if (address->port == Address::kUnixSocket) {
    absl::StatusOr<connections::ListeningSocket> socket =
        connections::ListeningSocket::OpenUnix(address->socket_path(), unix_mode, SOCK_STREAM);
    if (!socket.ok()) return absl::UnavailableError(absl::StrCat("listen: ", socket.status().message()));
    sockets->push_back(*std::move(socket));
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<connections::ListeningSocket>> opened =
      connections::ListeningSocket::OpenTcp(address->host, address->port);
  if (!opened.ok()) {
    return absl::UnavailableError(
        absl::StrCat("listen: ", opened.status().message(), " (is the port taken?)"));
  }
  address->port = opened->front().port();
  for (connections::ListeningSocket& socket : *opened) sockets->push_back(std::move(socket));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<connections::ListeningSocket>> OpenSockets(std::vector<Address>* addresses,
                                                                      uint32_t unix_mode) {
  std::vector<connections::ListeningSocket> sockets;
  for (Address& address : *addresses) {
    if (absl::Status status = Open(&address, unix_mode, &sockets); !status.ok()) return status;
  }
  return sockets;
}

std::string TextOf(const std::vector<Address>& addresses) {
  return absl::StrJoin(
      addresses, ",", [](std::string* out, const Address& address) { absl::StrAppend(out, address.text()); });
}

}  // namespace lossd::app
