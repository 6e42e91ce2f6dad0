// SPDX-License-Identifier: Apache-2.0
// Errors of arguments that the client refuses itself, before anything is sent.
//
// Thread-safe.
#ifndef LOSSD_CLIENT_CPP_ARGUMENT_ERROR_H_
#define LOSSD_CLIENT_CPP_ARGUMENT_ERROR_H_

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

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_ARGUMENT_ERROR_H_
