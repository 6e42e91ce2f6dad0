// SPDX-License-Identifier: Apache-2.0
// ListeningSocket owns a listening socket, and the file of a Unix socket.
#ifndef LOSSD_SERVER_ACCESS_LISTENING_SOCKET_H_
#define LOSSD_SERVER_ACCESS_LISTENING_SOCKET_H_

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace lossd::access {

// A listening socket. The destructor closes it and removes its file. Move-only, thread-compatible.
class ListeningSocket {
 public:
  // Listens on all addresses of `host` (an IPv6 address in brackets). Port 0: any free port, the same for all
  // addresses. UNAVAILABLE.
  static absl::StatusOr<std::vector<ListeningSocket>> OpenTcp(const std::string& host, int port);
  // Listens on a Unix socket at `path`. Users who may write to the file by its `mode` can connect. `type`:
  // SOCK_STREAM or SOCK_SEQPACKET. Replaces a file that an ended server has left. A lock on the file
  // `path`.lock, which is never removed, keeps two servers from replacing it at the same time. Connections
  // take no descriptors, if the kernel can keep them out. UNAVAILABLE if another server listens there, if the
  // file is no socket, or if it cannot be made.
  static absl::StatusOr<ListeningSocket> OpenUnix(const std::string& path, mode_t mode, int type);
  // Listens on an abstract Unix socket, which has no file: any program of the network namespace can connect.
  // UNAVAILABLE.
  static absl::StatusOr<ListeningSocket> OpenAbstract(const std::string& name, int type);

  ListeningSocket(ListeningSocket&& other) noexcept
      : descriptor_(std::exchange(other.descriptor_, -1)),
        port_(other.port_),
        path_(std::move(other.path_)),
        lock_(std::exchange(other.lock_, -1)),
        inode_(other.inode_),
        is_abstract_(other.is_abstract_) {}
  ListeningSocket& operator=(ListeningSocket&&) = delete;
  ~ListeningSocket();

  int descriptor() const { return descriptor_; }
  int port() const { return port_; }  // 0 for a Unix socket
  bool is_abstract() const { return is_abstract_; }

 private:
  ListeningSocket(int descriptor, int port) : descriptor_(descriptor), port_(port) {}

  int descriptor_ = -1;
  int port_ = 0;
  std::string path_;  // the path of a Unix socket
  int lock_ = -1;     // the lock of the path
  // The inode of this socket's file. A file at the path with another inode belongs to another socket.
  uint64_t inode_ = 0;
  bool is_abstract_ = false;
};

// The socket option that decides whether a Unix socket takes descriptors that its peer sends. Connections
// inherit it from the listening socket. It exists since Linux 6.16; before that, sockets always take
// descriptors.
inline constexpr int kPassRights = 83;  // SO_PASSRIGHTS

// Sets an integer option. If the system does not know the option, does nothing.
void SetSocketOption(int descriptor, int level, int option, int value);

}  // namespace lossd::access

#endif  // LOSSD_SERVER_ACCESS_LISTENING_SOCKET_H_
