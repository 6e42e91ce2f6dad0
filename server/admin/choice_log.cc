// SPDX-License-Identifier: Apache-2.0
#include "server/admin/choice_log.h"

#include "server/log/log.h"

namespace lossd::admin {

void LogChoices(absl::string_view event, absl::string_view head, absl::Span<const kernels::Choice> choices) {
  for (const kernels::Choice& choice : choices) {
    log::Log(log::LogLevel::kDebug, event,
             {{"head", head},
              {"what", choice.what},
              {"choice", choice.choice},
              {"reason", choice.reason},
              {"workspace_bytes", choice.workspace_bytes}});
  }
}

}  // namespace lossd::admin
