// JSON of files that are not trusted. Stateless and thread-safe.
#ifndef LOSSD_PROTO_TENSORFILE_STRICT_JSON_H_
#define LOSSD_PROTO_TENSORFILE_STRICT_JSON_H_

#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/string_view.h"

namespace lossd::formats {

// nullopt unless the text is JSON whose objects name nothing twice and that nests objects and arrays at most
// `max_depth` deep below the outermost one.
std::optional<nlohmann::json> ParseStrictJson(absl::string_view text, int max_depth);

}  // namespace lossd::formats

#endif  // LOSSD_PROTO_TENSORFILE_STRICT_JSON_H_
