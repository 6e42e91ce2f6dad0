// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/connection_acceptor.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace lossd::rpc {
namespace {

// Whose connections are counted together: an address, or of a Unix socket a user ("uid 1000").
std::string TextOf(const sockaddr_storage& address, int descriptor) {
  if (address.ss_family == AF_UNIX) {
    ucred user = {};
    socklen_t size = sizeof(user);
    const bool known = getsockopt(descriptor, SOL_SOCKET, SO_PEERCRED, &user, &size) == 0;
    return known ? absl::StrCat("uid ", user.uid) : "unix";
  }
  char text[INET6_ADDRSTRLEN] = "";
  const void* const bytes =
      address.ss_family == AF_INET
          ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in&>(address).sin_addr)
          : &reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  inet_ntop(address.ss_family, bytes, text, sizeof(text));
  return text;
}

// The number of a socket; 0 if the descriptor is not open.
uint64_t InodeOf(int descriptor) {
  struct stat status = {};
  if (fstat(descriptor, &status) != 0 || !S_ISSOCK(status.st_mode)) return 0;
  return status.st_ino;
}

}  // namespace

ConnectionAcceptor::ConnectionAcceptor(std::vector<ListeningSocket> listeners, const ConnectionLimits& limits)
    : listeners_(std::move(listeners)), limits_(limits), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

ConnectionAcceptor::~ConnectionAcceptor() {
  Stop();
  close(wake_);
}

void ConnectionAcceptor::Start(Take take) {
  take_ = std::move(take);
  thread_ = std::thread([this] { Run(); });
}

void ConnectionAcceptor::Stop() {
  if (!thread_.joinable()) return;
  eventfd_write(wake_, 1);
  thread_.join();
}

void ConnectionAcceptor::Run() {
  std::vector<pollfd> ready = {{.fd = wake_, .events = POLLIN}};
  for (const ListeningSocket& listener : listeners_)
    ready.push_back({.fd = listener.descriptor(), .events = POLLIN});
  while (true) {
    if (poll(ready.data(), ready.size(), -1) < 0 && errno != EINTR) return;
    if (ready.front().revents != 0) return;
    for (size_t i = 1; i < ready.size(); ++i) {
      if (ready[i].revents != 0) AcceptFrom(ready[i].fd);
    }
  }
}

void ConnectionAcceptor::AcceptFrom(int listener) {
  sockaddr_storage from = {};
  socklen_t size = sizeof(from);
  const int descriptor =
      accept4(listener, reinterpret_cast<sockaddr*>(&from), &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (descriptor < 0) {
    // Out of descriptors: those that wait stay in the backlog for a while.
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
      absl::SleepFor(absl::Milliseconds(50));
    return;
  }
  const std::string address = TextOf(from, descriptor);
  const absl::string_view limit = Admit(descriptor, address);
  if (!limit.empty()) {
    limits_.on_refused(limit, address);
    close(descriptor);
    return;
  }
  if (from.ss_family != AF_UNIX) {
    SetSocketOption(descriptor, IPPROTO_TCP, TCP_NODELAY, 1);
    SetSocketOption(descriptor, IPPROTO_TCP, TCP_USER_TIMEOUT,
                    static_cast<int>(absl::ToInt64Milliseconds(limits_.dead_peer_timeout)));
  }
  take_(listener, descriptor);
}

absl::string_view ConnectionAcceptor::Admit(int descriptor, const std::string& address) {
  absl::MutexLock lock(&mutex_);
  connections_.erase(descriptor);  // what had the number before is closed
  if (!LimitReached(address).empty()) ForgetClosed();
  const absl::string_view limit = LimitReached(address);
  if (limit.empty()) connections_[descriptor] = {.inode = InodeOf(descriptor), .address = address};
  return limit;
}

absl::string_view ConnectionAcceptor::LimitReached(const std::string& address) const {
  if (static_cast<int64_t>(connections_.size()) >= limits_.in_all) return "max_connections";
  const int64_t same = std::count_if(connections_.begin(), connections_.end(),
                                     [&](const auto& entry) { return entry.second.address == address; });
  return same >= limits_.per_address ? "max_connections_per_address" : "";
}

void ConnectionAcceptor::ForgetClosed() {
  std::erase_if(connections_, [](const auto& entry) { return InodeOf(entry.first) != entry.second.inode; });
}

int64_t ConnectionAcceptor::connections() {
  absl::MutexLock lock(&mutex_);
  ForgetClosed();
  return static_cast<int64_t>(connections_.size());
}

}  // namespace lossd::rpc
