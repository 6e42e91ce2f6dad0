// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/http_listener.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/errors/field_error.h"

namespace lossd::metrics {
namespace {

std::optional<int> ParsePort(absl::string_view text) {
  int value = 0;
  if (text.empty() || !std::all_of(text.begin(), text.end(), absl::ascii_isdigit)) return std::nullopt;
  if (!absl::SimpleAtoi(text, &value) || value > 65535) return std::nullopt;
  return value;
}

// Whether the address is on the loopback; nothing if it is none.
std::optional<bool> ParseHost(absl::string_view host) {
  if (absl::ConsumePrefix(&host, "[")) {
    in6_addr ipv6 = {};
    if (!absl::ConsumeSuffix(&host, "]") || inet_pton(AF_INET6, std::string(host).c_str(), &ipv6) != 1)
      return std::nullopt;
    return IN6_IS_ADDR_LOOPBACK(&ipv6);
  }
  in_addr ipv4 = {};
  if (inet_pton(AF_INET, std::string(host).c_str(), &ipv4) != 1) return std::nullopt;
  return (ntohl(ipv4.s_addr) >> 24) == IN_LOOPBACKNET;
}

}  // namespace

absl::StatusOr<HttpListener> ListenForHttp(absl::string_view address) {
  const size_t colon = std::min(address.rfind(':'), address.size());
  const absl::string_view host = address.substr(0, colon);
  const std::optional<bool> loopback = ParseHost(host);
  const std::optional<int> port =
      colon == address.size() ? std::nullopt : ParsePort(address.substr(colon + 1));
  if (!loopback.has_value() || !port.has_value())
    return errors::FieldError("http address", "be <IP address>:<port>", address);
  absl::StatusOr<std::vector<connections::ListeningSocket>> sockets =
      connections::ListeningSocket::OpenTcp(std::string(host), *port);
  if (!sockets.ok()) {
    return absl::UnavailableError(
        absl::StrCat("http: ", sockets.status().message(), " (is the port taken?)"));
  }
  const int chosen = sockets->front().port();
  return HttpListener{
      .sockets = *std::move(sockets), .address = absl::StrCat(host, ":", chosen), .loopback = *loopback};
}

}  // namespace lossd::metrics
