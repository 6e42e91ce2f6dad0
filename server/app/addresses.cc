// SPDX-License-Identifier: Apache-2.0
#include "server/app/addresses.h"

#include <arpa/inet.h>
#include <sys/un.h>

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/errors/field_error.h"

namespace lossd::app {
namespace {

constexpr absl::string_view kUnix = "unix:";
constexpr size_t kMaxSocketPath = sizeof(sockaddr_un::sun_path) - 1;

absl::StatusOr<Address> ParseSocket(absl::string_view option, absl::string_view text) {
  Address address{.host = std::string(text), .port = Address::kUnixSocket};
  if (address.socket_path().size() > kMaxSocketPath) {
    return errors::FieldError(option, absl::StrCat("have a path of at most ", kMaxSocketPath, " bytes"),
                              text);
  }
  return address;
}

}  // namespace

std::string Address::text() const { return port == kUnixSocket ? host : absl::StrCat(host, ":", port); }

std::string Address::socket_path() const {
  if (port != kUnixSocket) return "";
  const std::string path = host.substr(kUnix.size());
  if (path.empty() || path.front() != '/') return path;
  return absl::StrCat("/", path.substr(std::min(path.find_first_not_of('/'), path.size())));
}

absl::StatusOr<Address> ParseAddress(absl::string_view option, absl::string_view text) {
  if (absl::StartsWith(text, kUnix) && text.size() > kUnix.size()) return ParseSocket(option, text);
  const size_t colon = text.rfind(':');
  Address address;
  const bool split = colon != absl::string_view::npos && colon > 0;
  if (!split || !absl::SimpleAtoi(text.substr(colon + 1), &address.port) || address.port < 0 ||
      address.port > 65535) {
    return errors::FieldError(option, "be host:port with a port in [0, 65535], or unix:PATH", text);
  }
  address.host = std::string(text.substr(0, colon));
  const bool bracketed = address.host.front() == '[' && address.host.back() == ']';
  if (!bracketed && address.host.find(':') != std::string::npos) {
    return errors::FieldError(option, "have an IPv6 address in brackets", text);
  }
  return address;
}

absl::StatusOr<std::vector<Address>> ParseAddresses(absl::string_view option, absl::string_view text) {
  std::vector<Address> addresses;
  for (const absl::string_view one : absl::StrSplit(text, ',')) {
    absl::StatusOr<Address> address = ParseAddress(option, one);
    if (!address.ok()) return address.status();
    const bool again = std::any_of(addresses.begin(), addresses.end(), [&](const Address& other) {
      return other.text() == address->text() && address->port != 0;
    });
    if (again) return errors::FieldError(option, "name an address once", text);
    addresses.push_back(*std::move(address));
  }
  return addresses;
}

bool IsLoopback(const Address& address) {
  if (address.port == Address::kUnixSocket) return true;
  if (address.host == "localhost" || address.host == "[::1]") return true;
  in_addr ipv4;
  if (inet_pton(AF_INET, address.host.c_str(), &ipv4) != 1) return false;
  return (ntohl(ipv4.s_addr) >> 24) == 127;
}

}  // namespace lossd::app
