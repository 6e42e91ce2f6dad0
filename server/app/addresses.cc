// SPDX-License-Identifier: Apache-2.0
#include "server/app/addresses.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
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

namespace {

// Listens on one address, and adds the sockets to `sockets`.
absl::Status Open(Address* address, uint32_t unix_mode, std::vector<connections::ListeningSocket>* sockets) {
  if (address->port == Address::kUnixSocket) {
    absl::StatusOr<connections::ListeningSocket> socket =
        connections::ListeningSocket::OpenUnix(address->socket_path(), unix_mode, SOCK_STREAM);
    if (!socket.ok()) return absl::UnavailableError(absl::StrCat("listen: ", socket.status().message()));
    sockets->push_back(*std::move(socket));
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<connections::ListeningSocket>> opened =
      connections::ListeningSocket::OpenTcp(address->host, address->port);
  if (!opened.ok()) {
    return absl::UnavailableError(
        absl::StrCat("listen: ", opened.status().message(), " (is the port taken?)"));
  }
  address->port = opened->front().port();
  for (connections::ListeningSocket& socket : *opened) sockets->push_back(std::move(socket));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<connections::ListeningSocket>> OpenSockets(std::vector<Address>* addresses,
                                                                      uint32_t unix_mode) {
  std::vector<connections::ListeningSocket> sockets;
  for (Address& address : *addresses) {
    if (absl::Status status = Open(&address, unix_mode, &sockets); !status.ok()) return status;
  }
  return sockets;
}

std::string TextOf(const std::vector<Address>& addresses) {
  return absl::StrJoin(
      addresses, ",", [](std::string* out, const Address& address) { absl::StrAppend(out, address.text()); });
}

absl::Status WritePortFile(const std::string& path, const std::string& grpc, const std::string& http) {
  const std::string temporary = absl::StrCat(path, ".", getpid(), ".tmp");
  const nlohmann::json addresses = {{"grpc", grpc}, {"http", http}};
  const std::string text = addresses.dump() + "\n";
  FILE* const file = std::fopen(temporary.c_str(), "w");
  if (file == nullptr)
    return absl::ErrnoToStatus(errno, absl::StrCat("port_file: cannot create ", temporary));
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const bool closed = std::fclose(file) == 0;
  if (written && closed && std::rename(temporary.c_str(), path.c_str()) == 0) return absl::OkStatus();
  absl::Status status = absl::ErrnoToStatus(errno, absl::StrCat("port_file: cannot write ", path));
  std::remove(temporary.c_str());
  return status;
}

}  // namespace lossd::app
