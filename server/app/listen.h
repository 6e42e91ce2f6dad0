// SPDX-License-Identifier: Apache-2.0
// The sockets of a server's gRPC addresses.
//
// Stateless; thread-safe.
#ifndef LOSSD_SERVER_APP_LISTEN_H_
#define LOSSD_SERVER_APP_LISTEN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/app/addresses.h"
#include "server/connections/listening_socket.h"

namespace lossd::app {

// Listens on all addresses, which get the ports that were chosen. `unix_mode`: of the files of Unix sockets.
// UNAVAILABLE naming the option `listen`.
absl::StatusOr<std::vector<connections::ListeningSocket>> OpenSockets(std::vector<Address>* addresses,
                                                                      uint32_t unix_mode);

// The addresses with commas between them.
std::string TextOf(const std::vector<Address>& addresses);

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_LISTEN_H_
