// SPDX-License-Identifier: Apache-2.0
// Statuses as the protocol wants them. This is the one place that turns what errors say to programs (the
// field at fault in kernels/errors/field_error.h, the rest in server/engine/errors.h) into
// lossd.v1.ErrorDetail.
//
// All functions are stateless and thread-safe.
#ifndef LOSSD_SERVER_MESSAGES_ERRORS_H_
#define LOSSD_SERVER_MESSAGES_ERRORS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace lossd::messages {

// FAILED_PRECONDITION if a request is meant for another server process than this one.
absl::Status CheckIncarnation(absl::string_view field, uint64_t meant, uint64_t own);

// `status`, which is not OK, with its ErrorDetail: field, value, open step and missing rows, where the error
// names them, and the server's incarnation.
absl::Status WithDetail(absl::Status status, uint64_t incarnation);

}  // namespace lossd::messages

#endif  // LOSSD_SERVER_MESSAGES_ERRORS_H_
