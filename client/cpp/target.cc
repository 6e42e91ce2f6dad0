// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/target.h"

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/cpp/credentials.h"

namespace lossd::client {
namespace internal {
namespace {

// Schemes of gRPC's target names.
constexpr std::array<absl::string_view, 3> kWithHost = {"dns", "ipv4", "ipv6"};
constexpr std::array<absl::string_view, 5> kWithoutHost = {"unix", "unix-abstract", "vsock", "xds",
                                                           "google-c2p"};

template <size_t kCount>
bool Has(const std::array<absl::string_view, kCount>& schemes, absl::string_view scheme) {
  return std::find(schemes.begin(), schemes.end(), scheme) != schemes.end();
}

struct Parts {
  absl::string_view scheme;  // empty if there is none that gRPC knows
  absl::string_view rest;
};

Parts SplitScheme(absl::string_view target) {
  const size_t colon = target.find(':');
  if (colon == absl::string_view::npos) return {"", target};
  const absl::string_view scheme = target.substr(0, colon);
  if (!Has(kWithHost, scheme) && !Has(kWithoutHost, scheme)) return {"", target};
  return {scheme, target.substr(colon + 1)};
}

bool IsNumber(absl::string_view text) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(), [](char c) { return absl::ascii_isdigit(c); });
}

// 0 if it is none.
uint16_t PortOf(absl::string_view text) {
  uint32_t number = 0;
  const bool is_port = IsNumber(text) && absl::SimpleAtoi(text, &number) && number <= 65535;
  return is_port ? static_cast<uint16_t>(number) : 0;
}

bool IsSchemeCharacter(char c) { return absl::ascii_isalnum(c) || c == '+' || c == '.' || c == '-'; }

// "http" of "http://host"; empty if `text` does not begin so.
absl::string_view UrlScheme(absl::string_view text) {
  const size_t end = text.find("://");
  if (end == absl::string_view::npos || end == 0 || !absl::ascii_isalpha(text[0])) return "";
  const absl::string_view scheme = text.substr(0, end);
  return std::all_of(scheme.begin(), scheme.end(), IsSchemeCharacter) ? scheme : "";
}

std::string UrlProblem(absl::string_view scheme, absl::string_view rest) {
  const absl::string_view host = rest.substr(0, rest.find('/'));
  const size_t colon = host.rfind(':');
  const bool has_port = colon != absl::string_view::npos && IsNumber(host.substr(colon + 1));
  const std::string address = has_port ? std::string(host) : absl::StrCat(host, ":", kDefaultPort);
  const bool tls = absl::EqualsIgnoreCase(scheme, "https") || absl::EqualsIgnoreCase(scheme, "grpcs");
  return absl::StrCat("write the address without '", scheme, "://': '", address, "'",
                      tls ? ". TLS is used if a certificate authority is given: LOSSD_CA" : "");
}

// `address`: "host:port" if it is right.
std::string AddressProblem(absl::string_view address) {
  if (const size_t slash = address.find('/'); slash != absl::string_view::npos) {
    return absl::StrCat("the address of a server has no path '", address.substr(slash), "': '",
                        address.substr(0, slash), "'");
  }
  if (std::count(address.begin(), address.end(), ':') > 1 && !absl::StartsWith(address, "[")) {
    return absl::StrCat("an IPv6 address stands in brackets: '[", address, "]:", kDefaultPort, "'");
  }
  const size_t colon = absl::EndsWith(address, "]") ? absl::string_view::npos : address.rfind(':');
  const absl::string_view port = colon == absl::string_view::npos ? "" : address.substr(colon + 1);
  if (port.empty()) {
    return absl::StrCat("it has no port; lossd's is ", kDefaultPort, " unless its --listen says otherwise: '",
                        absl::StripSuffix(address, ":"), ":", kDefaultPort, "'");
  }
  if (colon == 0) return absl::StrCat("it has no host: '127.0.0.1:", port, "' is this machine");
  if (PortOf(port) == 0) return absl::StrCat("its port '", port, "' is not a number from 1 to 65535");
  return "";
}

}  // namespace

std::string TargetProblem(absl::string_view target) {
  if (target.empty()) {
    return absl::StrCat("it must be not empty, but host:port, as in '127.0.0.1:", kDefaultPort, "'");
  }
  if (std::any_of(target.begin(), target.end(), [](char c) { return absl::ascii_isspace(c); })) {
    return "it has white space in it";
  }
  auto [scheme, rest] = SplitScheme(target);
  if (Has(kWithoutHost, scheme)) return "";
  if (scheme == "dns" && absl::ConsumePrefix(&rest, "//")) {  // without the name server
    const size_t slash = rest.find('/');
    rest = slash == absl::string_view::npos ? "" : rest.substr(slash + 1);
  }
  if (const absl::string_view url = UrlScheme(rest); !url.empty()) {
    return UrlProblem(url, rest.substr(url.size() + 3));
  }
  for (const absl::string_view address : absl::StrSplit(rest, ',')) {
    if (std::string problem = AddressProblem(address); !problem.empty()) return problem;
  }
  return "";
}

HostAndPort HostAndPortOf(absl::string_view target) {
  const auto [scheme, rest] = SplitScheme(target);
  const size_t slash = rest.rfind('/');
  const absl::string_view address = slash == absl::string_view::npos ? rest : rest.substr(slash + 1);
  const size_t colon = address.rfind(':');
  if (Has(kWithoutHost, scheme) || colon == absl::string_view::npos || absl::StrContains(rest, ','))
    return {};
  absl::string_view host = address.substr(0, colon);
  const uint16_t port = PortOf(address.substr(colon + 1));
  if (host.empty() || port == 0) return {};
  absl::ConsumePrefix(&host, "[");
  absl::ConsumeSuffix(&host, "]");
  return {std::string(host), port};
}

std::string SocketPathOf(absl::string_view target) {
  const auto [scheme, rest] = SplitScheme(target);
  if (scheme != "unix") return "";
  if (!absl::StartsWith(rest, "/")) return std::string(rest);
  return absl::StrCat("/", rest.substr(std::min(rest.find_first_not_of('/'), rest.size())));
}

}  // namespace internal

bool IsLocalTarget(absl::string_view target) {
  if (absl::StartsWith(target, "unix:") || absl::StartsWith(target, "unix-abstract:")) return true;
  const std::string host = internal::HostAndPortOf(target).host;
  if (absl::EqualsIgnoreCase(host, "localhost")) return true;
  in_addr ipv4;
  in6_addr ipv6;
  if (inet_pton(AF_INET, host.c_str(), &ipv4) == 1) return (ntohl(ipv4.s_addr) >> 24) == 127;
  return inet_pton(AF_INET6, host.c_str(), &ipv6) == 1 && IN6_IS_ADDR_LOOPBACK(&ipv6);
}

}  // namespace lossd::client
