// SPDX-License-Identifier: Apache-2.0
// Who is at the other end of a connection, as the kernel knows it.
//
// Stateless; thread-safe.
#ifndef LOSSD_SERVER_CONNECTIONS_PEER_H_
#define LOSSD_SERVER_CONNECTIONS_PEER_H_

#include <sys/socket.h>
#include <sys/types.h>

#include <optional>
#include <string>

namespace lossd::connections {

struct Peer {
  // Whose connections are counted together: "10.0.0.5", "127.0.0.1 uid 1000" on the loopback, or "uid 1000"
  // of a Unix socket.
  std::string name;
  // Of a program of this host, where the kernel says so: always over a Unix socket, and over the loopback
  // unless the program has closed its end already or the kernel has no sock_diag.
  std::optional<uid_t> user;
  pid_t process = 0;  // over a Unix socket
  bool is_loopback = false;
};

// Of a connection that `from` has made.
Peer PeerOf(int connection, const sockaddr_storage& from);

// Whether the peer is this process's user or root, which may do to the process what they like.
bool IsOwnUser(const Peer& peer);

// Whether the kernel says who is at the other end of connections over the loopback.
bool KnowsLoopbackUsers();

}  // namespace lossd::connections

#endif  // LOSSD_SERVER_CONNECTIONS_PEER_H_
