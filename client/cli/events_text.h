// SPDX-License-Identifier: Apache-2.0
// Reads what a server answers at /events.json (docs/operations.md#events), and shows events as lines.
//
// Pure functions, thread-safe.
#ifndef LOSSD_CLIENT_CLI_EVENTS_TEXT_H_
#define LOSSD_CLIENT_CLI_EVENTS_TEXT_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lossd::cli {

struct Events {
  std::string incarnation;  // of the server
  uint64_t last_id = 0;
  bool missed = false;                         // the server has dropped some that were asked for
  std::vector<nlohmann::ordered_json> events;  // as the server wrote them, the oldest change first
};

// INTERNAL if the text is none.
absl::StatusOr<Events> ParseEvents(absl::string_view json);

// "2026-01-02T03:04:05.678Z warning  ApplyStep ended with NOT_FOUND (12 times)", with the head if it is of
// one. Control characters in texts are shown as "?".
std::string EventLine(const nlohmann::ordered_json& event);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_EVENTS_TEXT_H_
