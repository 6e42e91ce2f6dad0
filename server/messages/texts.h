// SPDX-License-Identifier: Apache-2.0
// Texts that clients choose and people read: names of runs, ids of calls.
//
// Thread-safe.
#ifndef LOSSD_SERVER_MESSAGES_TEXTS_H_
#define LOSSD_SERVER_MESSAGES_TEXTS_H_

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

}  // namespace lossd::messages

#endif  // LOSSD_SERVER_MESSAGES_TEXTS_H_
