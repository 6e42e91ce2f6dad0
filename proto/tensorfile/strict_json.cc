#include "proto/tensorfile/strict_json.h"

#include <set>
#include <string>
#include <vector>

namespace lossd::formats {

using nlohmann::json;

std::optional<json> ParseStrictJson(absl::string_view text, int max_depth) {
  std::vector<std::set<std::string>> open_objects;
  bool refused = false;
  const json::parser_callback_t check = [&](int depth, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) open_objects.emplace_back();
    if (event == json::parse_event_t::object_end) open_objects.pop_back();
    if (event == json::parse_event_t::key) {
      refused |= !open_objects.back().insert(parsed.get<std::string>()).second;
    }
    const bool starts =
        event == json::parse_event_t::object_start || event == json::parse_event_t::array_start;
    refused |= starts && depth > max_depth;
    return !refused;
  };
  json parsed = json::parse(text.begin(), text.end(), check, /*allow_exceptions=*/false);
  if (parsed.is_discarded() || refused) return std::nullopt;
  return parsed;
}

}  // namespace lossd::formats
