// SPDX-License-Identifier: Apache-2.0
// Who is at the other end of a call whose client has not shown who it is, as far as limits are concerned
// (PeerKey of access_control.h).
#ifndef LOSSD_SERVER_RPC_PEER_H_
#define LOSSD_SERVER_RPC_PEER_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace lossd::rpc {

// The peer of a connection that gRPC calls `uri`, e.g. "ipv4:10.0.0.7:41234" or "ipv6:%5Bfe80::1%5D:41234":
// its address without the port, "10.0.0.7". The address of the server's own machine does not tell one process
// from another, so there each connection is a peer of its own ("127.0.0.1:41234"). A connection over a Unix
// socket has no address at all; `connection` tells it from the others that are open. "" for callers in this
// process, which have no limits of their own. Thread-safe.
std::string PeerOf(absl::string_view uri, uint64_t connection);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_PEER_H_
