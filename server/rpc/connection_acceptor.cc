#include "server/rpc/connection_acceptor.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"

namespace lossd::rpc {
namespace {

constexpr int kBacklog = 1024;

struct AddressListDeleter {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};

// The port of a socket address, in network order.
uint16_t& PortOf(sockaddr* address) {
  if (address->sa_family == AF_INET) return reinterpret_cast<sockaddr_in*>(address)->sin_port;
  return reinterpret_cast<sockaddr_in6*>(address)->sin6_port;
}

std::string TextOf(const sockaddr_storage& address) {
  char text[INET6_ADDRSTRLEN] = "";
  const void* const bytes =
      address.ss_family == AF_INET
          ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in&>(address).sin_addr)
          : &reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  inet_ntop(address.ss_family, bytes, text, sizeof(text));
  return text;
}

void SetOption(int descriptor, int level, int option, int value) {
  setsockopt(descriptor, level, option, &value, sizeof(value));
}

// A socket that listens on `address`, whose port becomes the one that was bound; -1 and errno if there is
// none.
int ListenOn(sockaddr* address, socklen_t size) {
  const int descriptor = socket(address->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (descriptor < 0) return -1;
  SetOption(descriptor, SOL_SOCKET, SO_REUSEADDR, 1);
  if (address->sa_family == AF_INET6) {
    // [::] takes IPv4 too, as gRPC's own listener does.
    const bool any = IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<sockaddr_in6*>(address)->sin6_addr);
    SetOption(descriptor, IPPROTO_IPV6, IPV6_V6ONLY, any ? 0 : 1);
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

// The number of a socket; 0 if the descriptor is not open.
uint64_t InodeOf(int descriptor) {
  struct stat status = {};
  if (fstat(descriptor, &status) != 0 || !S_ISSOCK(status.st_mode)) return 0;
  return status.st_ino;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ConnectionAcceptor>> ConnectionAcceptor::Listen(
    const std::string& host, int port, const ConnectionLimits& limits) {
  absl::string_view name = host;
  if (absl::ConsumePrefix(&name, "[")) absl::ConsumeSuffix(&name, "]");
  const addrinfo hints = {.ai_flags = AI_PASSIVE | AI_NUMERICSERV, .ai_socktype = SOCK_STREAM};
  addrinfo* found = nullptr;
  const int failed = getaddrinfo(std::string(name).c_str(), absl::StrCat(port).c_str(), &hints, &found);
  const std::unique_ptr<addrinfo, AddressListDeleter> addresses(found);
  if (failed != 0)
    return absl::UnavailableError(absl::StrCat("cannot resolve ", host, ": ", gai_strerror(failed)));
  std::vector<int> listeners;
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
    listeners.push_back(listener);
    bound = ntohs(PortOf(one->ai_addr));
    error.clear();
  }
  if (listeners.empty() || !error.empty()) {
    for (const int listener : listeners) close(listener);
    return absl::UnavailableError(absl::StrCat("cannot listen on ", host, ":", port, ": ", error));
  }
  return std::unique_ptr<ConnectionAcceptor>(new ConnectionAcceptor(std::move(listeners), bound, limits));
}

ConnectionAcceptor::ConnectionAcceptor(std::vector<int> listeners, int port, const ConnectionLimits& limits)
    : listeners_(std::move(listeners)),
      port_(port),
      limits_(limits),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

ConnectionAcceptor::~ConnectionAcceptor() {
  Stop();
  for (const int listener : listeners_) close(listener);
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
  for (const int listener : listeners_) ready.push_back({.fd = listener, .events = POLLIN});
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
  const std::string address = TextOf(from);
  const absl::string_view limit = Admit(descriptor, address);
  if (!limit.empty()) {
    limits_.on_refused(limit, address);
    close(descriptor);
    return;
  }
  SetOption(descriptor, IPPROTO_TCP, TCP_NODELAY, 1);
  SetOption(descriptor, IPPROTO_TCP, TCP_USER_TIMEOUT,
            static_cast<int>(absl::ToInt64Milliseconds(limits_.dead_peer_timeout)));
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
