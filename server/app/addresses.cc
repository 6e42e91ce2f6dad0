#include "server/app/addresses.h"

#include <arpa/inet.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"

namespace lossd::app {

std::string Address::text() const { return port == kUnixSocket ? host : absl::StrCat(host, ":", port); }

absl::StatusOr<Address> ParseAddress(absl::string_view option, absl::string_view text) {
  constexpr absl::string_view kUnix = "unix:";
  if (absl::StartsWith(text, kUnix) && text.size() > kUnix.size()) {
    return Address{.host = std::string(text), .port = Address::kUnixSocket};
  }
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

bool IsLoopback(const Address& address) {
  if (address.port == Address::kUnixSocket) return true;
  if (address.host == "localhost" || address.host == "[::1]") return true;
  in_addr ipv4;
  if (inet_pton(AF_INET, address.host.c_str(), &ipv4) != 1) return false;
  return (ntohl(ipv4.s_addr) >> 24) == 127;
}

}  // namespace lossd::app
