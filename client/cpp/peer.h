// SPDX-License-Identifier: Apache-2.0
// The server that calls go to, and what their ends mean.
//
// Thread-safe.
#ifndef LOSSD_CLIENT_CPP_PEER_H_
#define LOSSD_CLIENT_CPP_PEER_H_

#include <grpcpp/grpcpp.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace lossd::client::internal {

struct Peer {
  std::string target;
  std::string version;  // of lossd, as the server says
};

// This library's version, "1.2.3".
absl::string_view ClientVersion();

// The status of a finished call, with the server's detail. UNAVAILABLE and DEADLINE_EXCEEDED name the server,
// UNIMPLEMENTED says which side is older.
absl::Status CallStatus(const grpc::Status& status, const Peer& peer);

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_PEER_H_
