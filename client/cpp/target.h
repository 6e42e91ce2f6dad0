// SPDX-License-Identifier: Apache-2.0
// The address of a server, a gRPC target name: what is wrong with it, and what is in it. No I/O.
// client/python/src/lossd/_target.py has the same rules, and tests/client/golden/targets.json has cases of
// both.
//
// Stateless and thread-safe.
#ifndef LOSSD_CLIENT_CPP_TARGET_H_
#define LOSSD_CLIENT_CPP_TARGET_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace lossd::client::internal {

inline constexpr uint16_t kDefaultPort = 7070;  // of lossd's --listen

// What to write instead if this cannot be the address of a server; empty if it can. Addresses are
// "host:port", or a target name of gRPC's with a scheme of its own ("dns:///host:port", "unix:/run/lossd").
std::string TargetProblem(absl::string_view target);

struct HostAndPort {
  std::string host;  // "::1" of "[::1]:7070"; empty for targets that are not one host and its port
  uint16_t port = 0;
};
HostAndPort HostAndPortOf(absl::string_view target);

// The path of a Unix socket; empty for other targets.
std::string SocketPathOf(absl::string_view target);

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_TARGET_H_
