// SPDX-License-Identifier: Apache-2.0
// JSON of files that are not trusted and may be long: an object is handed out entry by entry while the file
// is read, so that memory does not grow with the file. Stateless and thread-safe.
#ifndef LOSSD_PROTO_TENSORFILE_JSON_ENTRIES_H_
#define LOSSD_PROTO_TENSORFILE_JSON_ENTRIES_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "proto/tensorfile/file.h"

namespace lossd::formats {

// Longer names, strings and numbers are malformed.
inline constexpr int64_t kMaxJsonTokenBytes = int64_t{1} << 20;

struct JsonEntryRules {
  int max_depth = 2;          // of objects and arrays below the outermost object
  int64_t max_values = 1000;  // in one entry: names, values, objects and arrays
  // The object with this name is handed out as an empty one, and then its entries one by one.
  std::string spread = {};
  absl::Status malformed = {};  // what a text gets that is no JSON object within these rules
};

// One entry of the outermost object; or, with `spread` true, of the object that the rules name.
struct JsonEntry {
  bool spread = false;
  std::string name;
  nlohmann::json value;  // names nothing twice
};

// Hands out the entries of the object that bytes [begin, begin + bytes) of the file hold, in their order.
// Whether two entries have one name is left to the caller. Ends with the first error of `take`, which is
// returned; with file.h's errors; or with rules.malformed.
absl::Status ReadJsonEntries(const InputFile& file, int64_t begin, int64_t bytes, const JsonEntryRules& rules,
                             absl::FunctionRef<absl::Status(JsonEntry entry)> take);

}  // namespace lossd::formats

#endif  // LOSSD_PROTO_TENSORFILE_JSON_ENTRIES_H_
