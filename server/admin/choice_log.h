// SPDX-License-Identifier: Apache-2.0
// Logs what the backend chose, a debug event for each choice.
#ifndef LOSSD_SERVER_ADMIN_CHOICE_LOG_H_
#define LOSSD_SERVER_ADMIN_CHOICE_LOG_H_

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/choice.h"

namespace lossd::admin {

// Thread-safe.
void LogChoices(absl::string_view event, absl::string_view head, absl::Span<const kernels::Choice> choices);

}  // namespace lossd::admin

#endif  // LOSSD_SERVER_ADMIN_CHOICE_LOG_H_
