// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/http_listener.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/errors/field_error.h"

namespace lossd::metrics {
namespace {

constexpr int kBacklog = 1024;

// An IPv4 or IPv6 address as the socket functions take it.
struct SocketAddress {
  sockaddr_storage storage = {};
  socklen_t size = 0;

  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  sockaddr_in& ipv4() { return reinterpret_cast<sockaddr_in&>(storage); }
  sockaddr_in6& ipv6() { return reinterpret_cast<sockaddr_in6&>(storage); }

  int port() { return ntohs(storage.ss_family == AF_INET ? ipv4().sin_port : ipv6().sin6_port); }
  bool loopback() {
    if (storage.ss_family == AF_INET) return (ntohl(ipv4().sin_addr.s_addr) >> 24) == 127;
    return IN6_IS_ADDR_LOOPBACK(&ipv6().sin6_addr);
  }
};

bool ParsePort(absl::string_view text, uint16_t* port) {
  int value = 0;
  if (text.empty() || !std::all_of(text.begin(), text.end(), absl::ascii_isdigit)) return false;
  if (!absl::SimpleAtoi(text, &value) || value > 65535) return false;
  *port = htons(static_cast<uint16_t>(value));
  return true;
}

bool ParseAddress(absl::string_view host, absl::string_view port, SocketAddress* address) {
  if (absl::ConsumePrefix(&host, "[")) {
    address->storage.ss_family = AF_INET6;
    address->size = sizeof(sockaddr_in6);
    return absl::ConsumeSuffix(&host, "]") &&
           inet_pton(AF_INET6, std::string(host).c_str(), &address->ipv6().sin6_addr) == 1 &&
           ParsePort(port, &address->ipv6().sin6_port);
  }
  address->storage.ss_family = AF_INET;
  address->size = sizeof(sockaddr_in);
  return inet_pton(AF_INET, std::string(host).c_str(), &address->ipv4().sin_addr) == 1 &&
         ParsePort(port, &address->ipv4().sin_port);
}

// Binds, listens, and sets `address` to what was bound; the error is in errno.
bool Listen(int descriptor, SocketAddress* address) {
  const int one = 1;
  if (setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)) != 0) return false;
  if (address->storage.ss_family == AF_INET6 &&
      setsockopt(descriptor, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof(one)) != 0) {
    return false;
  }
  return bind(descriptor, address->get(), address->size) == 0 && listen(descriptor, kBacklog) == 0 &&
         getsockname(descriptor, address->get(), &address->size) == 0;
}

}  // namespace

absl::StatusOr<HttpListener> ListenForHttp(absl::string_view address) {
  const size_t colon = std::min(address.rfind(':'), address.size());
  const absl::string_view host = address.substr(0, colon);
  SocketAddress socket_address;
  if (colon == address.size() || !ParseAddress(host, address.substr(colon + 1), &socket_address)) {
    return errors::FieldError("http address", "be <IP address>:<port>", address);
  }
  const int descriptor =
      socket(socket_address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (descriptor < 0 || !Listen(descriptor, &socket_address)) {
    const std::string error = std::strerror(errno);
    if (descriptor >= 0) close(descriptor);
    return absl::UnavailableError(absl::StrCat("cannot listen for HTTP on ", address, ": ", error));
  }
  return HttpListener{.descriptor = descriptor,
                      .address = absl::StrCat(host, ":", socket_address.port()),
                      .loopback = socket_address.loopback()};
}

}  // namespace lossd::metrics
