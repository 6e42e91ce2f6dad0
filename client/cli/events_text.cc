// SPDX-License-Identifier: Apache-2.0
#include "client/cli/events_text.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace lossd::cli {
namespace {

using Json = nlohmann::ordered_json;

bool IsEvent(const Json& event) {
  const auto is = [&](const char* name, bool (Json::*of_type)() const noexcept) {
    return event.contains(name) && (event[name].*of_type)();
  };
  return event.is_object() && is("id", &Json::is_number_unsigned) && is("count", &Json::is_number_integer) &&
         is("time", &Json::is_string) && is("level", &Json::is_string) && is("kind", &Json::is_string) &&
         is("head", &Json::is_string) && is("text", &Json::is_string);
}

std::string Printable(std::string text) {
  for (char& c : text) {
    if (absl::ascii_iscntrl(static_cast<unsigned char>(c))) c = '?';
  }
  return text;
}

}  // namespace

absl::StatusOr<Events> ParseEvents(absl::string_view text) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  const absl::Status malformed = absl::InternalError("the server's answer is no list of events");
  if (!json.is_object() || !json.contains("incarnation") || !json["incarnation"].is_string() ||
      !json.contains("last_id") || !json["last_id"].is_number_unsigned() || !json.contains("missed") ||
      !json["missed"].is_boolean() || !json.contains("events") || !json["events"].is_array()) {
    return malformed;
  }
  Events events{.incarnation = json["incarnation"], .last_id = json["last_id"], .missed = json["missed"]};
  for (const Json& event : json["events"]) {
    if (!IsEvent(event)) return malformed;
    events.events.push_back(event);
  }
  return events;
}

std::string EventLine(const Json& event) {
  const std::string head = Printable(event["head"]);
  const int64_t count = event["count"];
  return absl::StrFormat("%s %-7s %s%s%s", Printable(event["time"]), Printable(event["level"]),
                         head.empty() ? "" : absl::StrCat(head, ": "), Printable(event["text"]),
                         count > 1 ? absl::StrCat(" (", count, " times)") : "");
}

}  // namespace lossd::cli
