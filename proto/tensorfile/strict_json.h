// SPDX-License-Identifier: Apache-2.0
// Short JSON texts that are not trusted. Stateless and thread-safe.
#ifndef LOSSD_PROTO_TENSORFILE_STRICT_JSON_H_
#define LOSSD_PROTO_TENSORFILE_STRICT_JSON_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/string_view.h"

namespace lossd::formats {

struct JsonLimits {
  int64_t bytes = int64_t{1} << 20;  // of the text
  int depth = 4;                     // of objects and arrays below the outermost one
  int64_t values = 10'000;           // names, values, objects and arrays
};

// True for JSON within the limits whose objects name nothing twice. Reads no further than to the first fault.
bool IsStrictJson(absl::string_view text, const JsonLimits& limits);

// The value of such a text, else nullopt. The depth of the result is bounded, so it may be copied and
// printed.
template <typename Json = nlohmann::json>
std::optional<Json> ParseStrictJson(absl::string_view text, const JsonLimits& limits) {
  if (!IsStrictJson(text, limits)) return std::nullopt;
  return Json::parse(text.begin(), text.end());
}

}  // namespace lossd::formats

#endif  // LOSSD_PROTO_TENSORFILE_STRICT_JSON_H_
