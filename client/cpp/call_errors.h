// SPDX-License-Identifier: Apache-2.0
// The errors that the client makes itself: arguments that it refuses before anything is sent, messages of the
// server that the protocol does not allow, and steps whose gradients are gone. client.h describes these
// errors to callers; client/python/src/lossd/errors.py has the same messages.
//
// Functions are stateless and thread-safe.
#ifndef LOSSD_CLIENT_CPP_CALL_ERRORS_H_
#define LOSSD_CLIENT_CPP_CALL_ERRORS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/errors/field_error.h"

namespace lossd::client::internal {

// INVALID_ARGUMENT "<field> <problem>" for programs, too (ErrorDetailOf in client.h):
// ArgumentError("options.streams", 0, "is 0; it must be positive").
inline absl::Status ArgumentError(absl::string_view field, const absl::AlphaNum& value,
                                  absl::string_view problem) {
  return errors::WithViolation(absl::InvalidArgumentError(absl::StrCat(field, " ", problem)),
                               {std::string(field), std::string(problem), std::string(value.Piece())});
}

// INTERNAL "server sent <what>", for a message that the protocol does not allow, where `what` are arguments
// of absl::StrCat: ServerSent("step ", 7, " in answer to step ", 8).
template <typename... What>
absl::Status ServerSent(const What&... what) {
  return absl::InternalError(absl::StrCat("server sent ", what...));
}

// The errors of a trainer's step whose gradients are gone are ABORTED, with a payload by which RestartOf and
// IsStepDiscarded (client_options.h) know them.

// With a Restart: the server was another process before, and what it had accumulated for `step` is gone.
absl::Status RestartedError(absl::string_view head, uint64_t before, uint64_t now,
                            std::optional<uint64_t> step);
// The same where no head is known.
absl::Status RestartedError(uint64_t before, uint64_t now);

// The head has gradients of another generation than the rows of the step were added to.
absl::Status DiscardedError(absl::string_view head, uint64_t step, uint64_t before, uint64_t now);
// The server says so: `refusal` is one that RefusesGeneration.
absl::Status DiscardedError(absl::string_view head, uint64_t step, const absl::Status& refusal);
// This client has started the step over while a call of it was under way.
absl::Status DiscardedByThisClientError(absl::string_view head, uint64_t step);

// Whether the server has refused a call because the head has other gradients than the call names.
bool RefusesGeneration(const absl::Status& status);

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_CALL_ERRORS_H_
