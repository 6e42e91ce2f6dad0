// SPDX-License-Identifier: Apache-2.0
// CheckText, CheckRun and CheckCallId check texts that clients choose and people read: names of runs, ids of
// calls. WithDetail adds an ErrorDetail of the protocol to an error.
//
// All functions are stateless and thread-safe.
#ifndef LOSSD_SERVER_MESSAGES_TEXTS_H_
#define LOSSD_SERVER_MESSAGES_TEXTS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace lossd::messages {

// INVALID_ARGUMENT naming the field unless `text` has `least` to `most` printable characters: UTF-8 without
// control characters, line breaks, and characters that turn or hide the text around them.
absl::Status CheckText(absl::string_view field, absl::string_view text, int least, int most);

// A run: at most 128 characters, or nothing.
absl::Status CheckRun(absl::string_view field, absl::string_view run);
// An id of a call that is done once: 1 to 64 characters.
absl::Status CheckCallId(absl::string_view field, absl::string_view id);

// FAILED_PRECONDITION if a request is meant for another server process than this one.
absl::Status CheckIncarnation(absl::string_view field, uint64_t meant, uint64_t own);

// `status`, which is not OK, with its ErrorDetail: field, value, open step and missing rows, where the error
// names them, and the server's incarnation. This is the one place that makes a lossd.v1.ErrorDetail out of
// what errors say to programs: the field at fault (kernels/errors/field_error.h) and the rest
// (server/engine/errors.h).
absl::Status WithDetail(absl::Status status, uint64_t incarnation);

}  // namespace lossd::messages

#endif  // LOSSD_SERVER_MESSAGES_TEXTS_H_
