// SPDX-License-Identifier: Apache-2.0
#include "client/cli/events_text.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/format.h"
#include "client/cli/json.h"

namespace lossd::cli {
namespace {

bool IsEvent(const Json& event) {
  const auto is = [&](const char* name, bool (Json::*of_type)() const noexcept) {
    return event.contains(name) && (event[name].*of_type)();
  };
  return event.is_object() && is("id", &Json::is_number_unsigned) && is("count", &Json::is_number_integer) &&
         is("time", &Json::is_string) && is("level", &Json::is_string) && is("kind", &Json::is_string) &&
         is("head", &Json::is_string) && is("text", &Json::is_string);
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
  const auto text = [&event](const char* field) {
    return Printable(event[field].get_ref<const std::string&>());
  };
  const std::string head = text("head");
  const int64_t count = event["count"];
  return absl::StrFormat("%s %-7s %s%s%s", text("time"), text("level"),
                         head.empty() ? "" : absl::StrCat(head, ": "), text("text"),
                         count > 1 ? absl::StrCat(" (", count, " times)") : "");
}

}  // namespace lossd::cli
