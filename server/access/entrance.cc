// SPDX-License-Identifier: Apache-2.0
#include "server/access/entrance.h"

#include <arpa/inet.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"
#include "server/access/closer.h"

namespace lossd::access {
namespace {

struct Request {
  nlmsghdr header;
  inet_diag_req_v2 socket;
};

struct Answer {
  nlmsghdr header;
  inet_diag_msg socket;
  char attributes[512];
};

bool IsLoopback(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET)
    return (ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24) == IN_LOOPBACKNET;
  if (address.ss_family != AF_INET6) return false;
  const in6_addr& ipv6 = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&ipv6) || (IN6_IS_ADDR_V4MAPPED(&ipv6) && ipv6.s6_addr[12] == IN_LOOPBACKNET);
}

void SetEnd(const sockaddr_storage& address, __be32* words, __be16* port) {
  if (address.ss_family == AF_INET) {
    const auto& ipv4 = reinterpret_cast<const sockaddr_in&>(address);
    std::memcpy(words, &ipv4.sin_addr, sizeof(ipv4.sin_addr));
    *port = ipv4.sin_port;
    return;
  }
  const auto& ipv6 = reinterpret_cast<const sockaddr_in6&>(address);
  std::memcpy(words, &ipv6.sin6_addr, sizeof(ipv6.sin6_addr));
  *port = ipv6.sin6_port;
}

// Asks the kernel for the socket with one end at `near` and the other at `far`. The kernel answers
// immediately. A kernel without sock_diag refuses the netlink socket, or answers with an error.
std::optional<inet_diag_msg> Find(const sockaddr_storage& near, const sockaddr_storage& far) {
  const wire::OwnedDescriptor netlink(socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG));
  if (!netlink) return std::nullopt;
  Request request = {};
  request.header.nlmsg_len = sizeof(request);
  request.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  request.header.nlmsg_flags = NLM_F_REQUEST;
  request.socket.sdiag_family = static_cast<__u8>(near.ss_family);
  request.socket.sdiag_protocol = IPPROTO_TCP;
  request.socket.idiag_states = ~__u32{0};
  request.socket.id.idiag_cookie[0] = INET_DIAG_NOCOOKIE;
  request.socket.id.idiag_cookie[1] = INET_DIAG_NOCOOKIE;
  SetEnd(near, request.socket.id.idiag_src, &request.socket.id.idiag_sport);
  SetEnd(far, request.socket.id.idiag_dst, &request.socket.id.idiag_dport);
  if (send(netlink.get(), &request, sizeof(request), 0) < 0) return std::nullopt;
  Answer answer = {};
  const ssize_t received = recv(netlink.get(), &answer, sizeof(answer), MSG_DONTWAIT);
  if (received < static_cast<ssize_t>(offsetof(Answer, attributes)) ||
      answer.header.nlmsg_type != SOCK_DIAG_BY_FAMILY) {
    return std::nullopt;
  }
  return answer.socket;
}

// The user of the socket. A socket without an inode belongs to no program any more, and then the kernel does
// not know the user.
std::optional<uid_t> UserAt(const sockaddr_storage& near, const sockaddr_storage& far) {
  const std::optional<inet_diag_msg> found = Find(near, far);
  if (!found.has_value() || found->idiag_inode == 0) return std::nullopt;
  return found->idiag_uid;
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

// An address in gRPC's form. An IPv4-mapped IPv6 address is written as the IPv4 address.
std::string LoopbackText(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET)
    return absl::StrCat(TextOf(address), ":", ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port));
  const auto& ipv6 = reinterpret_cast<const sockaddr_in6&>(address);
  if (!IN6_IS_ADDR_V4MAPPED(&ipv6.sin6_addr))
    return absl::StrCat("[", TextOf(address), "]:", ntohs(ipv6.sin6_port));
  sockaddr_storage ipv4 = {.ss_family = AF_INET};
  auto& mapped = reinterpret_cast<sockaddr_in&>(ipv4);
  std::memcpy(&mapped.sin_addr, ipv6.sin6_addr.s6_addr + 12, sizeof(mapped.sin_addr));
  mapped.sin_port = ipv6.sin6_port;
  return LoopbackText(ipv4);
}

}  // namespace

Peer PeerOf(int connection, const sockaddr_storage& from) {
  if (from.ss_family == AF_UNIX) {
    const auto who = wire::PeerOf(connection);
    if (!who.ok()) return {.name = "unix", .user = std::nullopt};
    return {.name = absl::StrCat("uid ", who->user), .user = who->user, .process = who->process};
  }
  if (!IsLoopback(from)) return {.name = TextOf(from), .user = std::nullopt};
  // A program can choose any loopback address as its own, so the address does not identify it.
  Peer peer{
      .name = "loopback", .loopback_address = LoopbackText(from), .user = std::nullopt, .is_loopback = true};
  sockaddr_storage to = {};
  socklen_t size = sizeof(to);
  if (getsockname(connection, reinterpret_cast<sockaddr*>(&to), &size) != 0) return peer;
  peer.user = UserAt(from, to);
  if (peer.user.has_value()) peer.name = absl::StrCat("uid ", *peer.user);
  return peer;
}

bool IsOwnUser(const Peer& peer) {
  return peer.user.has_value() && (*peer.user == geteuid() || *peer.user == 0);
}

bool KnowsLoopbackUsers() {
  static const bool knows = [] {
    const wire::OwnedDescriptor listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const wire::OwnedDescriptor client(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_storage to = {};
    reinterpret_cast<sockaddr_in&>(to) = {.sin_family = AF_INET};
    reinterpret_cast<sockaddr_in&>(to).sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* const address = reinterpret_cast<sockaddr*>(&to);
    socklen_t size = sizeof(sockaddr_in);
    if (bind(listener.get(), address, size) != 0 || listen(listener.get(), 1) != 0 ||
        getsockname(listener.get(), address, &size) != 0 || connect(client.get(), address, size) != 0) {
      return false;
    }
    sockaddr_storage from = {};
    size = sizeof(from);
    if (getsockname(client.get(), reinterpret_cast<sockaddr*>(&from), &size) != 0) return false;
    return UserAt(from, to).has_value();
  }();
  return knows;
}

namespace {

// How many connections may be shut down and not closed yet. Beyond it no more are accepted.
constexpr int64_t kMostEnding = 32;

// The inode of a socket; 0 if the descriptor is not an open socket.
uint64_t InodeOf(int descriptor) {
  struct stat status = {};
  if (fstat(descriptor, &status) != 0 || !S_ISSOCK(status.st_mode)) return 0;
  return status.st_ino;
}

}  // namespace

Entrance::Entrance(std::vector<ListeningSocket> sockets, EntranceOptions options)
    : sockets_(std::move(sockets)), options_(std::move(options)) {}

bool Entrance::AddTo(std::vector<pollfd>* wait) {
  const bool has_room = HasRoom();
  const bool behind = ClosingIsBehind();
  for (const ListeningSocket& socket : sockets_) {
    const bool is_unix = socket.port() == 0;
    const bool waits = has_room && !(behind && is_unix);
    wait->push_back({.fd = waits ? socket.descriptor() : -1, .events = POLLIN});
  }
  return has_room && !behind;
}

std::optional<Connection> Entrance::Accept(int listener) {
  sockaddr_storage from = {};
  socklen_t size = sizeof(from);
  Connection connection;
  connection.socket = wire::OwnedDescriptor(
      accept4(listener, reinterpret_cast<sockaddr*>(&from), &size, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!connection.socket) {
    // No descriptors are left. Waiting connections stay in the backlog for a while.
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
      absl::SleepFor(absl::Milliseconds(50));
    return std::nullopt;
  }
  const int descriptor = connection.socket.get();
  connection.is_unix = from.ss_family == AF_UNIX;
  connection.peer = options_.peer_of(descriptor, from);
  const bool lets_in = LetsIn(connection.peer, listener);
  absl::string_view refusal = lets_in ? "" : kStranger;
  if (lets_in && options_.oldest_makes_room) {
    for (const Ended& ended : CountAndMakeRoom(descriptor, connection.peer))
      options_.on_refused(-1, ended.reason, {.name = ended.name, .user = std::nullopt});
  } else if (lets_in) {
    refusal = Count(descriptor, connection.peer);
  }
  if (!refusal.empty()) {
    options_.on_refused(descriptor, refusal, connection.peer);
    // A TCP connection contains no descriptors of a stranger. It is closed here, at once: on the other
    // threads it would wait behind Unix sockets of strangers.
    if (connection.is_unix) CloseElsewhere(std::move(connection.socket));
    return std::nullopt;
  }
  if (!connection.is_unix) {
    SetSocketOption(descriptor, IPPROTO_TCP, TCP_NODELAY, 1);
    SetSocketOption(descriptor, IPPROTO_TCP, TCP_USER_TIMEOUT,
                    static_cast<int>(absl::ToInt64Milliseconds(options_.dead_peer_timeout)));
  }
  return connection;
}

// If the kernel can tell users on the loopback but does not tell this one, the peer has closed its end
// already.
bool Entrance::LetsIn(const Peer& peer, int listener) const {
  if (IsOwnUser(peer)) return true;
  if (peer.is_loopback) return !options_.own_user_on_loopback || !KnowsLoopbackUsers();
  return std::none_of(sockets_.begin(), sockets_.end(), [listener](const ListeningSocket& socket) {
    return socket.descriptor() == listener && socket.is_abstract();
  });
}

absl::string_view Entrance::Count(int descriptor, const Peer& peer) {
  absl::MutexLock lock(&mutex_);
  connections_.erase(descriptor);  // an earlier connection with this descriptor is closed
  if (!LimitReached(peer.name).empty()) ForgetClosed();
  const absl::string_view limit = LimitReached(peer.name);
  if (limit.empty()) Add(descriptor, peer);
  return limit;
}

void Entrance::Add(int descriptor, const Peer& peer) {
  connections_[descriptor] = {.inode = InodeOf(descriptor),
                              .name = peer.name,
                              .loopback_address = peer.loopback_address,
                              .opened = clocks::SteadyNow()};
}

absl::string_view Entrance::LimitReached(const std::string& name) const {
  if (CountOf("") >= options_.in_all) return kMaxConnections;
  return CountOf(name) >= options_.per_peer ? kMaxPerPeer : "";
}

int64_t Entrance::CountOf(absl::string_view name) const {
  return std::count_if(connections_.begin(), connections_.end(), [name](const auto& entry) {
    return !entry.second.ended && (name.empty() || entry.second.name == name);
  });
}

bool Entrance::HasRoom() {
  if (!options_.oldest_makes_room) return true;
  absl::MutexLock lock(&mutex_);
  const auto most = static_cast<size_t>(options_.in_all + kMostEnding);
  if (connections_.size() >= most) ForgetClosed();
  return connections_.size() < most;
}

std::vector<Entrance::Ended> Entrance::CountAndMakeRoom(int descriptor, const Peer& peer) {
  const absl::Time now = clocks::SteadyNow();
  std::vector<Ended> made_room;
  absl::MutexLock lock(&mutex_);
  connections_.erase(descriptor);
  for (auto& [other, connection] : connections_) {
    if (!connection.ended && now - connection.opened > options_.age) End(other, &connection);
  }
  const auto end_oldest = [&](const std::string& of, absl::string_view limit) {
    mutex_.AssertHeld();
    const auto oldest = Oldest(of);
    End(oldest->first, &oldest->second);
    made_room.push_back({.name = oldest->second.name, .reason = limit});
  };
  // First the limit of the peer: after that there may be room in all.
  if (CountOf(peer.name) >= options_.per_peer) end_oldest(peer.name, kMaxPerPeer);
  if (CountOf("") >= options_.in_all) end_oldest("", kMaxConnections);
  Add(descriptor, peer);
  return made_room;
}

std::map<int, Entrance::Counted>::iterator Entrance::Oldest(const std::string& name) {
  auto oldest = connections_.end();
  for (auto one = connections_.begin(); one != connections_.end(); ++one) {
    if (one->second.ended || (!name.empty() && one->second.name != name)) continue;
    if (oldest == connections_.end() || one->second.opened < oldest->second.opened) oldest = one;
  }
  return oldest;
}

// Shuts a connection down, so that the reader sees its end and closes it. It stays in connections_ until
// then, so that HasRoom counts it.
void Entrance::End(int descriptor, Counted* connection) {
  connection->ended = true;
  if (InodeOf(descriptor) == connection->inode) shutdown(descriptor, SHUT_RDWR);
}

void Entrance::Closing(int descriptor) {
  absl::MutexLock lock(&mutex_);
  connections_.erase(descriptor);
}

void Entrance::ForgetClosed() {
  std::erase_if(connections_, [](const auto& entry) { return InodeOf(entry.first) != entry.second.inode; });
}

int64_t Entrance::connections() {
  absl::MutexLock lock(&mutex_);
  ForgetClosed();
  return static_cast<int64_t>(connections_.size());
}

std::string Entrance::NameAt(absl::string_view loopback_address) const {
  if (loopback_address.empty()) return "";
  absl::MutexLock lock(&mutex_);
  for (const auto& [descriptor, connection] : connections_) {
    // An older connection from the same address may be in the table, but closed already.
    if (connection.loopback_address == loopback_address && InodeOf(descriptor) == connection.inode)
      return connection.name;
  }
  return "";
}

std::string Entrance::NameOf(int descriptor) const {
  absl::MutexLock lock(&mutex_);
  const auto found = connections_.find(descriptor);
  return found == connections_.end() ? "" : found->second.name;
}

bool BringsDescriptors(const Connection& connection) {
  if (!connection.is_unix) return false;
  int passes = 1;
  socklen_t size = sizeof(passes);
  return getsockopt(connection.socket.get(), SOL_SOCKET, kPassRights, &passes, &size) != 0 || passes != 0;
}

}  // namespace lossd::access
