// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/peer.h"

#include <cstdint>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/errors/payload.h"
#include "proto/wire/status_details.h"

namespace lossd::client::internal {
namespace {

// Empty if the version is not made of numbers.
std::vector<uint32_t> Numbers(absl::string_view version) {
  std::vector<uint32_t> numbers;
  for (const absl::string_view part : absl::StrSplit(version, '.')) {
    if (!absl::SimpleAtoi(part, &numbers.emplace_back())) return {};
  }
  return numbers;
}

// What a server's version is beside this client's, and what to do.
std::string Compared(absl::string_view server) {
  const std::vector<uint32_t> theirs = Numbers(server), ours = Numbers(ClientVersion());
  const std::string client = absl::StrCat("this client (lossd ", ClientVersion(), "); ");
  if (theirs.empty() || theirs == ours) {
    return absl::StrCat("of another version than ", client, "use the same version of both");
  }
  return theirs < ours ? absl::StrCat("older than ", client, "update the server")
                       : absl::StrCat("newer than ", client, "update the client");
}

}  // namespace

absl::string_view ClientVersion() { return LOSSD_VERSION; }

absl::Status CallStatus(const grpc::Status& status, const Peer& peer) {
  const absl::Status result = wire::FromGrpcStatus(status);
  switch (result.code()) {
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
      return errors::WithMessage(result, absl::StrCat(result.message(), " (server ", peer.target, ")"));
    case absl::StatusCode::kUnimplemented:
      return errors::WithMessage(result, absl::StrCat("lossd ", peer.version, " at ", peer.target,
                                                      " does not know this call: it is ",
                                                      Compared(peer.version), " (", result.message(), ")"));
    default:
      return result;
  }
}

}  // namespace lossd::client::internal
