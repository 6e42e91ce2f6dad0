// SPDX-License-Identifier: Apache-2.0
#include "server/ranks/local_address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace lossd::ranks {
namespace {

std::string TextOf(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = {};
  const void* const bytes =
      address->sa_family == AF_INET6
          ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr)
          : &reinterpret_cast<const sockaddr_in*>(address)->sin_addr;
  return inet_ntop(address->sa_family, bytes, text, sizeof(text)) == nullptr ? "" : text;
}

bool IsLoopback(const std::string& text) { return absl::StartsWith(text, "127.") || text == "::1"; }

// The address that packets to `to` would have; nothing is sent.
std::string SourceFor(const addrinfo& to) {
  const int descriptor = socket(to.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (descriptor < 0) return "";
  sockaddr_storage from = {};
  socklen_t length = sizeof(from);
  auto* const address = reinterpret_cast<sockaddr*>(&from);
  const bool known =
      connect(descriptor, to.ai_addr, to.ai_addrlen) == 0 && getsockname(descriptor, address, &length) == 0;
  close(descriptor);
  return known ? TextOf(address) : "";
}

// The first address of this host that is not of the loopback; empty if there is none.
std::string AnyAddress() {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return "";
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(all, freeifaddrs);
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    const bool usable = one->ifa_addr != nullptr && one->ifa_addr->sa_family == AF_INET &&
                        (one->ifa_flags & IFF_UP) != 0 && (one->ifa_flags & IFF_LOOPBACK) == 0;
    if (usable) return TextOf(one->ifa_addr);
  }
  return "";
}

}  // namespace

absl::StatusOr<std::string> LocalAddressFor(const std::string& host) {
  const std::string name =
      absl::StartsWith(host, "[") && absl::EndsWith(host, "]") ? host.substr(1, host.size() - 2) : host;
  addrinfo hints = {};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(name.c_str(), "9", &hints, &found);
  if (error != 0) {
    return absl::UnavailableError(absl::StrCat("host ", host, " cannot be resolved: ", gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
  const bool meant = name == "localhost" || IsLoopback(name);
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    const std::string source = SourceFor(*one);
    if (source.empty()) continue;
    if (meant || !IsLoopback(source)) return source;
    // A host may know its own name as one of the loopback, which no other host does.
    const std::string other = AnyAddress();
    return other.empty() ? source : other;
  }
  return absl::UnavailableError(absl::StrCat("there is no route to host ", host));
}

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "unknown";
}

}  // namespace lossd::ranks
