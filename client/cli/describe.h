// SPDX-License-Identifier: Apache-2.0
// Functions that describe the protocol's messages, the history of a head and the server's events: as text for
// people, and as JSON for scripts. JSON keys are stable: keys may be added, not changed. Incarnations are
// strings of sixteen hexadecimal digits; other 64-bit numbers are JSON numbers.
//
// Pure functions, thread-safe.
#ifndef LOSSD_CLIENT_CLI_DESCRIBE_H_
#define LOSSD_CLIENT_CLI_DESCRIBE_H_

#include <google/protobuf/message.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cli/format.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/server.pb.h"
#include "lossd/v1/types.pb.h"

namespace lossd::cli {

// "2026-11-26 22:30:01Z"; empty for 0.
std::string UtcText(int64_t unix_seconds);

// One line: "run trainer-1, last step 2026-11-26 22:30:01Z; saved as lm/best (step 7) 2026-11-26 22:31:00Z".
// Empty if nothing is known.
std::string HistoryText(const v1::HeadHistory& history);

// Steps that were closed since the head was saved, or loaded; nullopt if no checkpoint is known, or if the
// checkpoint is of a later step than the head.
std::optional<uint64_t> StepsSinceSave(const v1::HeadDescription& head);

// `head "lm" is at step 180: 12 steps since checkpoint lm/best`, or `..., no checkpoint known`; with rows of
// the open step if there are any.
std::string WhatIsLost(const v1::HeadDescription& head);

// What a server answers at /events.json (docs/watching.md#events).
struct Events {
  std::string incarnation;  // of the server
  uint64_t last_id = 0;
  bool missed = false;                         // the server has dropped some that were asked for
  std::vector<nlohmann::ordered_json> events;  // as the server wrote them, the oldest change first
};

// INTERNAL if the text is no such answer.
absl::StatusOr<Events> ParseEvents(absl::string_view json);
// The answer again.
nlohmann::ordered_json ToJson(const Events& events);

// "2026-01-02T03:04:05.678Z warning  ApplyStep ended with NOT_FOUND (12 times)", with the head if it is of
// one. Control characters in texts are shown as "?".
std::string EventLine(const nlohmann::ordered_json& event);

uint64_t TotalBytes(const v1::MemoryUsage& memory);

// A JSON object with the fields of a message by their names, also fields that are lists, messages or
// enumerations (in the words of options.h). Numbers of type fixed64 are incarnations. Memory has its total.
nlohmann::ordered_json FieldsJson(const google::protobuf::Message& message);
nlohmann::ordered_json ToJson(const v1::HeadDescription& head);
nlohmann::ordered_json ToJson(const v1::ServerDescription& server);

// "512 x 50,257 + bias, rmsnorm"
std::string Shape(const v1::HeadSpec& spec);

std::string HeadsTable(absl::Span<const v1::HeadDescription> heads, const Style& style = {});
std::string HeadText(const v1::HeadDescription& head, const Style& style = {});
// A row for each device of a head whose classes are divided: which part of the head it has, and how long it
// computed. Empty for other heads.
std::string DevicesTable(const v1::HeadDescription& head, const Style& style = {});
std::string ServerText(const v1::ServerDescription& server, const std::string& address,
                       const Style& style = {});

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_DESCRIBE_H_
