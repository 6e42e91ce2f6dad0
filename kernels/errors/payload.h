// SPDX-License-Identifier: Apache-2.0
// Payloads of an absl::Status that hold a list of texts.
//
// Each text is stored as its length and its bytes, so a text may hold any bytes. Payloads never leave the
// process: lengths are in the byte order of the machine.
//
// All functions are stateless and thread-safe.
#ifndef LOSSD_KERNELS_ERRORS_PAYLOAD_H_
#define LOSSD_KERNELS_ERRORS_PAYLOAD_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace lossd::errors {

// Attaches the texts under the type URL `type`, replacing earlier ones. No effect on an OK status.
void SetTexts(absl::string_view type, absl::Span<const std::string> texts, absl::Status* status);

// What SetTexts attached; nullopt if `status` has no such payload or its bytes are not such a list.
std::optional<std::vector<std::string>> GetTexts(absl::string_view type, const absl::Status& status);

// `status` with another message and the same code and payloads.
absl::Status WithMessage(const absl::Status& status, absl::string_view message);

}  // namespace lossd::errors

#endif  // LOSSD_KERNELS_ERRORS_PAYLOAD_H_
