// SPDX-License-Identifier: Apache-2.0
#include "server/connections/peer.h"

#include <arpa/inet.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <unistd.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "proto/wire/region_packets.h"

namespace lossd::connections {
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

// The socket that has one end at `near` and the other at `far`. The kernel's answer is immediate; one that
// has no such question known leaves the socket for it unconnected or answers with an error.
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

// Without an inode it belongs to no program any more, and then the kernel has forgotten whose it was.
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

}  // namespace

Peer PeerOf(int connection, const sockaddr_storage& from) {
  if (from.ss_family == AF_UNIX) {
    const auto who = wire::PeerOf(connection);
    if (!who.ok()) return {.name = "unix", .user = std::nullopt};
    return {.name = absl::StrCat("uid ", who->user), .user = who->user, .process = who->process};
  }
  Peer peer{.name = TextOf(from), .user = std::nullopt, .is_loopback = IsLoopback(from)};
  sockaddr_storage to = {};
  socklen_t size = sizeof(to);
  if (!peer.is_loopback || getsockname(connection, reinterpret_cast<sockaddr*>(&to), &size) != 0) return peer;
  peer.user = UserAt(from, to);
  if (peer.user.has_value()) absl::StrAppend(&peer.name, " uid ", *peer.user);
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

}  // namespace lossd::connections
