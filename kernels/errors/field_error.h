// SPDX-License-Identifier: Apache-2.0
// Errors that name the field at fault: an absl::Status whose message is for people and whose payload, a
// FieldViolation, says the same to programs. No program reads the message.
//
//   return errors::FieldError("softcap", "be 0 or > 0", options.softcap);   // "softcap must be 0 or > 0, got
//   -1"
//
// A layer names fields as it knows them. A layer that knows where they came from adds the path:
//
//   return errors::Within("open.options.", kernels::Validate(options));     // "open.options.softcap must be
//   ..."
//
// Fields and values may hold any bytes. They are shortened to kMaxFieldBytes and kMaxValueBytes, in the
// payload and in the message, and never within a UTF-8 character.
//
// All functions are stateless and thread-safe.
#ifndef LOSSD_KERNELS_ERRORS_FIELD_ERROR_H_
#define LOSSD_KERNELS_ERRORS_FIELD_ERROR_H_

#include <cstddef>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace lossd::errors {

inline constexpr size_t kMaxFieldBytes = 300;
inline constexpr size_t kMaxValueBytes = 300;

struct FieldViolation {
  std::string field;  // path of the field, e.g. "open.targets[17]"
  std::string rule;   // what the message says of the field, e.g. "must be finite" or "repeats row 3"
  std::string value;  // what was found there, as text
  friend bool operator==(const FieldViolation&, const FieldViolation&) = default;
};

// "<field> must <rule>, got <value>"; an empty value is shown as "".
absl::Status FieldError(absl::string_view field, absl::string_view rule, const absl::AlphaNum& value,
                        absl::StatusCode code = absl::StatusCode::kInvalidArgument);

// "<field> <problem>, got <value>", for what is not said with "must": "slice.rows repeats row 3, got [3, 6)".
absl::Status FieldProblem(absl::string_view field, absl::string_view problem, const absl::AlphaNum& value,
                          absl::StatusCode code = absl::StatusCode::kInvalidArgument);

// `status` with its own message and this violation, replacing an earlier one. For errors whose message has
// another form, e.g. those of files, which name the file first. An OK status stays OK.
absl::Status WithViolation(absl::Status status, const FieldViolation& violation);

// The field at fault; nullopt if the status names none.
std::optional<FieldViolation> GetFieldViolation(const absl::Status& status);

// Puts `prefix`, e.g. "open.options.", before the field, in the payload and where the message begins with the
// field. Code and other payloads stay. A status without a violation stays as it is.
absl::Status Within(absl::string_view prefix, absl::Status status);

}  // namespace lossd::errors

#endif  // LOSSD_KERNELS_ERRORS_FIELD_ERROR_H_
