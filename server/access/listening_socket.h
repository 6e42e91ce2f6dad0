// SPDX-License-Identifier: Apache-2.0
// ListeningSocket owns a socket that listens, and the file of a Unix socket where it has one.
#ifndef LOSSD_SERVER_ACCESS_LISTENING_SOCKET_H_
#define LOSSD_SERVER_ACCESS_LISTENING_SOCKET_H_

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace lossd::access {

// Move-only, thread-compatible. Its end closes the socket and removes the socket's file.
class ListeningSocket {
 public:
  // On all addresses of `host` (an IPv6 address in brackets); port 0: any free one, the same for all.
  // UNAVAILABLE.
  static absl::StatusOr<std::vector<ListeningSocket>> OpenTcp(const std::string& host, int port);
  // At `path`, for users whom `mode` lets write to the file. `type`: SOCK_STREAM or SOCK_SEQPACKET. The file
  // of a server that ended without removing it is replaced; a lock on `path`.lock, a file that stays, keeps
  // two servers from doing so at the same time. Connections take no descriptors, if the kernel can keep them
  // out. UNAVAILABLE if another server listens there, if something else is there, or if the file cannot be
  // made.
  static absl::StatusOr<ListeningSocket> OpenUnix(const std::string& path, mode_t mode, int type);
  // The same in the abstract namespace, which has no files: any program of the network namespace can connect.
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
  int port() const { return port_; }  // 0: a Unix socket
  bool is_abstract() const { return is_abstract_; }

 private:
  ListeningSocket(int descriptor, int port) : descriptor_(descriptor), port_(port) {}

  int descriptor_ = -1;
  int port_ = 0;
  std::string path_;    // of a Unix socket
  int lock_ = -1;       // of the path
  uint64_t inode_ = 0;  // of the file: another one at the path is not this socket's
  bool is_abstract_ = false;
};

// The option that says whether a Unix socket takes descriptors that its peer sends. Connections inherit the
// option from the socket that listens. Linux has it since 6.16; before that, sockets take descriptors.
inline constexpr int kPassRights = 83;  // SO_PASSRIGHTS

// Sets an option that is a number. Where the system does not know it, the socket stays as it is.
void SetSocketOption(int descriptor, int level, int option, int value);

}  // namespace lossd::access

#endif  // LOSSD_SERVER_ACCESS_LISTENING_SOCKET_H_
