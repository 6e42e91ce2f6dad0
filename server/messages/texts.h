// SPDX-License-Identifier: Apache-2.0
// Texts that clients choose and people read: names of runs, ids of calls.
//
// Thread-safe.
#ifndef LOSSD_SERVER_MESSAGES_TEXTS_H_
#define LOSSD_SERVER_MESSAGES_TEXTS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace lossd::messages {

// INVALID_ARGUMENT naming the field unless `text` has `least` to `most` printable characters: UTF-8 without
// control characters, line breaks, and what turns or hides the text around it.
absl::Status CheckText(absl::string_view field, absl::string_view text, int least, int most);

// A run: at most 128 characters, or nothing.
absl::Status CheckRun(absl::string_view field, absl::string_view run);
// An id of a call that is done once: 1 to 64 characters.
absl::Status CheckCallId(absl::string_view field, absl::string_view id);

// Statuses as the protocol wants them. This is the one place that turns what errors say to programs (the
// field at fault in kernels/errors/field_error.h, the rest in server/engine/errors.h) into
// lossd.v1.ErrorDetail.
//
// All functions are stateless and thread-safe.

// FAILED_PRECONDITION if a request is meant for another server process than this one.
absl::Status CheckIncarnation(absl::string_view field, uint64_t meant, uint64_t own);

// `status`, which is not OK, with its ErrorDetail: field, value, open step and missing rows, where the error
// names them, and the server's incarnation.
absl::Status WithDetail(absl::Status status, uint64_t incarnation);

}  // namespace lossd::messages

#endif  // LOSSD_SERVER_MESSAGES_TEXTS_H_
