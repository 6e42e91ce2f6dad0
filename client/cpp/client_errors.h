// SPDX-License-Identifier: Apache-2.0
// What the errors of a Client say to programs. A part of client.h.
//
// Functions are stateless and thread-safe.
#ifndef LOSSD_CLIENT_CPP_CLIENT_ERRORS_H_
#define LOSSD_CLIENT_CPP_CLIENT_ERRORS_H_

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "lossd/v1/types.pb.h"

namespace lossd::client {

// That the server is another process than it was, so gradients of the open step are gone.
struct Restart {
  uint64_t before = 0;  // incarnations
  uint64_t now = 0;
};
// What an ABORTED error says about a restart; nullopt if it is about something else.
std::optional<Restart> RestartOf(const absl::Status& status);
// Whether an ABORTED error says that the gradients of the open step were zeroed, or a checkpoint was loaded,
// after this client had added rows to them.
bool IsStepDiscarded(const absl::Status& status);

// The field of the UNAVAILABLE error that says that there is no server at ClientOptions::target.
inline constexpr absl::string_view kTargetField = "options.target";

// The structured detail of an error: the server's, if it sent one; else field and value of what the client
// itself refused, with incarnation 0.
std::optional<v1::ErrorDetail> ErrorDetailOf(const absl::Status& status);

}  // namespace lossd::client

#endif  // LOSSD_CLIENT_CPP_CLIENT_ERRORS_H_
