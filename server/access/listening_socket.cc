// SPDX-License-Identifier: Apache-2.0
#include "server/access/listening_socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/errors/status_macros.h"
#include "proto/wire/region_packets.h"
#include "server/access/closer.h"

namespace lossd::access {
namespace {

constexpr int kBacklog = 1024;

struct AddressListDeleter {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};

// The port field of a socket address, in network byte order.
uint16_t& PortOf(sockaddr* address) {
  if (address->sa_family == AF_INET) return reinterpret_cast<sockaddr_in*>(address)->sin_port;
  return reinterpret_cast<sockaddr_in6*>(address)->sin6_port;
}

// Makes a socket that listens on `address`, and sets the port in `address` to the bound port. -1 with errno
// on failure.
int ListenOn(sockaddr* address, socklen_t size) {
  const int descriptor = socket(address->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (descriptor < 0) return -1;
  SetSocketOption(descriptor, SOL_SOCKET, SO_REUSEADDR, 1);
  if (address->sa_family == AF_INET6) {
    // [::] accepts IPv4 too, like gRPC's own listener.
    const bool any = IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<sockaddr_in6*>(address)->sin6_addr);
    SetSocketOption(descriptor, IPPROTO_IPV6, IPV6_V6ONLY, any ? 0 : 1);
  }
  if (bind(descriptor, address, size) == 0 && listen(descriptor, kBacklog) == 0 &&
      getsockname(descriptor, address, &size) == 0) {
    return descriptor;
  }
  const int error = errno;
  close(descriptor);
  errno = error;
  return -1;
}

// Makes a Unix socket that takes no descriptors from its peers, if the kernel supports that.
int UnixSocket(int type) {
  const int descriptor = socket(AF_UNIX, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  SetSocketOption(descriptor, SOL_SOCKET, kPassRights, 0);
  return descriptor;
}

absl::Status CannotListen(const std::string& path, absl::string_view why) {
  return absl::UnavailableError(absl::StrCat("cannot listen on unix:", path, ": ", why));
}

uint64_t InodeAt(const std::string& path) {
  struct stat status = {};
  return lstat(path.c_str(), &status) == 0 ? status.st_ino : 0;
}

// Whether a process listens at `address`.
bool SomebodyListens(const sockaddr_un& address, int type) {
  wire::OwnedDescriptor probe(UnixSocket(type));
  if (!probe) return true;
  const int result = connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  const int error = errno;
  CloseElsewhere(std::move(probe));  // the listener may have sent descriptors
  return result == 0 || (error != ECONNREFUSED && error != ENOENT);
}

// Removes a stale socket file at `path`. The caller holds the lock of the path.
absl::Status RemoveStale(const std::string& path, const sockaddr_un& address, int type) {
  struct stat status = {};
  if (lstat(path.c_str(), &status) != 0) return absl::OkStatus();  // if there is a problem, bind reports it
  if (!S_ISSOCK(status.st_mode)) return CannotListen(path, "there is a file that is not a socket");
  if (SomebodyListens(address, type)) return CannotListen(path, "another program listens there");
  if (unlink(path.c_str()) != 0 && errno != ENOENT) return CannotListen(path, std::strerror(errno));
  return absl::OkStatus();
}

}  // namespace

void SetSocketOption(int descriptor, int level, int option, int value) {
  setsockopt(descriptor, level, option, &value, sizeof(value));
}

absl::StatusOr<std::vector<ListeningSocket>> ListeningSocket::OpenTcp(const std::string& host, int port) {
  absl::string_view name = host;
  if (absl::ConsumePrefix(&name, "[")) absl::ConsumeSuffix(&name, "]");
  const addrinfo hints = {.ai_flags = AI_PASSIVE | AI_NUMERICSERV, .ai_socktype = SOCK_STREAM};
  addrinfo* found = nullptr;
  const int failed = getaddrinfo(std::string(name).c_str(), absl::StrCat(port).c_str(), &hints, &found);
  const std::unique_ptr<addrinfo, AddressListDeleter> addresses(found);
  if (failed != 0)
    return absl::UnavailableError(absl::StrCat("cannot resolve ", host, ": ", gai_strerror(failed)));
  std::vector<ListeningSocket> listeners;
  std::string error;
  int bound = port;
  for (addrinfo* one = found; one != nullptr; one = one->ai_next) {
    if (one->ai_family != AF_INET && one->ai_family != AF_INET6) continue;
    PortOf(one->ai_addr) = htons(static_cast<uint16_t>(bound));
    const int listener = ListenOn(one->ai_addr, one->ai_addrlen);
    if (listener < 0) {
      error = std::strerror(errno);
      if (errno == EADDRINUSE) break;  // a second server on the port is an error
      continue;
    }
    bound = ntohs(PortOf(one->ai_addr));
    listeners.push_back(ListeningSocket(listener, bound));
    error.clear();
  }
  if (listeners.empty() || !error.empty())
    return absl::UnavailableError(absl::StrCat("cannot listen on ", host, ":", port, ": ", error));
  return listeners;
}

absl::StatusOr<ListeningSocket> ListeningSocket::OpenUnix(const std::string& path, mode_t mode, int type) {
  sockaddr_un address = {.sun_family = AF_UNIX};
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return CannotListen(path, absl::StrCat("the path has ", path.size(), " bytes; a socket's has 1 to ",
                                           sizeof(address.sun_path) - 1));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  ListeningSocket made(-1, 0);
  const std::string lock_path = absl::StrCat(path, ".lock");
  made.lock_ = open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (made.lock_ < 0) return CannotListen(path, absl::StrCat(lock_path, ": ", std::strerror(errno)));
  if (flock(made.lock_, LOCK_EX | LOCK_NB) != 0) return CannotListen(path, "another lossd listens there");
  LOSSD_RETURN_IF_ERROR(RemoveStale(path, address, type));
  made.descriptor_ = UnixSocket(type);
  if (made.descriptor_ < 0) return CannotListen(path, std::strerror(errno));
  if (bind(made.descriptor_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0)
    return CannotListen(path, std::strerror(errno));
  made.path_ = path;
  made.inode_ = InodeAt(path);
  // No program can connect before listen, so the mode applies to all connections.
  if (chmod(path.c_str(), mode) != 0 || listen(made.descriptor_, kBacklog) != 0)
    return CannotListen(path, std::strerror(errno));
  return made;
}

absl::StatusOr<ListeningSocket> ListeningSocket::OpenAbstract(const std::string& name, int type) {
  sockaddr_un address = {.sun_family = AF_UNIX};
  if (name.empty() || name.size() >= sizeof(address.sun_path))
    return CannotListen(name, "the name is empty or too long");
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  ListeningSocket made(UnixSocket(type), 0);
  made.is_abstract_ = true;
  if (made.descriptor_ < 0 || bind(made.descriptor_, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(made.descriptor_, kBacklog) != 0) {
    return CannotListen(name, std::strerror(errno));
  }
  return made;
}

ListeningSocket::~ListeningSocket() {
  if (descriptor_ >= 0) close(descriptor_);
  if (!path_.empty() && inode_ != 0 && InodeAt(path_) == inode_) unlink(path_.c_str());
  if (lock_ >= 0) close(lock_);
}

}  // namespace lossd::access
