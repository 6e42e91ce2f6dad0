// SPDX-License-Identifier: Apache-2.0
// Functions that turn the protocol's messages, a head's history and the server's events into text for people
// and into JSON for scripts. JSON keys are stable: keys may be added, not changed. Incarnations are strings
// of sixteen hexadecimal digits; other 64-bit numbers are JSON numbers.
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

// The number of steps that were closed since the head was saved or loaded. Nullopt if no checkpoint is known,
// or if the checkpoint is of a later step than the head.
std::optional<uint64_t> StepsSinceSave(const v1::HeadDescription& head);

// What would be lost if the head were replaced: `head "lm" is at step 180: 12 steps since checkpoint
// lm/best`, or `..., no checkpoint known`. If the open step has rows, the text says how many.
std::string WhatIsLost(const v1::HeadDescription& head);

// What a server answers at /events.json (docs/watching.md#events).
struct Events {
  std::string incarnation;  // the incarnation of the server
  uint64_t last_id = 0;
  bool missed = false;  // the server has already dropped some events that were asked for
  std::vector<nlohmann::ordered_json> events;  // as the server wrote them, the oldest change first
};

// INTERNAL if the text is not such an answer.
absl::StatusOr<Events> ParseEvents(absl::string_view json);
// The inverse of ParseEvents.
nlohmann::ordered_json ToJson(const Events& events);

// "2026-01-02T03:04:05.678Z warning  ApplyStep ended with NOT_FOUND (12 times)", with the head if the event
// belongs to one. Control characters in texts are shown as "?".
std::string EventLine(const nlohmann::ordered_json& event);

uint64_t TotalBytes(const v1::MemoryUsage& memory);

// A JSON object with all fields of a message by their names, also fields that are lists, messages or
// enumerations (with the words of options.h). Fields of type fixed64 are incarnations. A MemoryUsage gets a
// field with its total, too.
nlohmann::ordered_json FieldsJson(const google::protobuf::Message& message);
nlohmann::ordered_json ToJson(const v1::HeadDescription& head);
nlohmann::ordered_json ToJson(const v1::ServerDescription& server);

// "512 x 50,257 + bias, rmsnorm"
std::string Shape(const v1::HeadSpec& spec);

std::string HeadsTable(absl::Span<const v1::HeadDescription> heads, const Style& style = {});
std::string HeadText(const v1::HeadDescription& head, const Style& style = {});
// A table with one row for each device of a head that is split by vocabulary: which part of the classes the
// device has, and how long it computed. Empty for other heads.
std::string DevicesTable(const v1::HeadDescription& head, const Style& style = {});
std::string ServerText(const v1::ServerDescription& server, const std::string& address,
                       const Style& style = {});

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_DESCRIBE_H_
