// SPDX-License-Identifier: Apache-2.0
// Errors of messages that the protocol does not allow. client.h describes them to callers.
//
// Thread-safe.
#ifndef LOSSD_CLIENT_CPP_SERVER_SENT_H_
#define LOSSD_CLIENT_CPP_SERVER_SENT_H_

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace lossd::client::internal {

// INTERNAL "server sent <what>", where `what` are arguments of absl::StrCat:
// ServerSent("step ", 7, " in answer to step ", 8).
template <typename... What>
absl::Status ServerSent(const What&... what) {
  return absl::InternalError(absl::StrCat("server sent ", what...));
}

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_SERVER_SENT_H_
