// SPDX-License-Identifier: Apache-2.0
#include "proto/tensorfile/safetensors_index.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/errors/bytes.h"
#include "proto/tensorfile/json_entries.h"

namespace lossd::formats {
namespace {

constexpr absl::string_view kWeightMap = "weight_map";
constexpr int kMaxDepth = 8;         // metadata may nest a little
constexpr size_t kMostOthers = 100;  // entries beside the weight map
constexpr size_t kMostShown = 200;   // characters of a value in an error message

absl::Status IndexInvalid(absl::string_view name, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(name, ": not an index of safetensors files: ", what));
}

// True for names of folders and of a file that lead from a folder to what is in it or below it.
bool IsPathBelow(absl::string_view path) {
  if (path.find('\0') != absl::string_view::npos) return false;
  const std::vector<absl::string_view> names = absl::StrSplit(path, '/');
  return std::none_of(names.begin(), names.end(),
                      [](absl::string_view name) { return name.empty() || name == "." || name == ".."; });
}

// A value for an error message, not long.
std::string Shortened(const nlohmann::json& value) {
  return absl::CHexEscape(value.dump(-1, ' ', true).substr(0, kMostShown));
}

}  // namespace

absl::StatusOr<SafetensorsIndex> SafetensorsIndex::Read(const InputFile& file,
                                                        absl::Span<const std::string> tensors) {
  if (file.size() > kMaxSafetensorsIndexBytes) {
    return IndexInvalid(file.name(),
                        absl::StrCat("its ", errors::ExactBytes(file.size()), " are more than the ",
                                     errors::ExactBytes(kMaxSafetensorsIndexBytes), " allowed"));
  }
  SafetensorsIndex index(file.name());
  const JsonEntryRules rules = {
      .max_depth = kMaxDepth,
      .spread = std::string(kWeightMap),
      .malformed = IndexInvalid(file.name(), "it is no JSON object with unique keys")};
  const std::set<std::string> wanted(tensors.begin(), tensors.end());
  const absl::Status no_map = IndexInvalid(file.name(), "it has no weight_map");
  std::set<std::string> others;  // the names in the outermost object
  absl::Status status = ReadJsonEntries(file, 0, file.size(), rules, [&](JsonEntry entry) -> absl::Status {
    if (!entry.spread) {
      if (entry.name == kWeightMap && !entry.value.is_object()) return no_map;
      const bool first = others.size() < kMostOthers && others.insert(std::move(entry.name)).second;
      return first ? absl::OkStatus() : rules.malformed;
    }
    if (!entry.value.is_string() || !IsPathBelow(entry.value.get_ref<const std::string&>())) {
      return IndexInvalid(file.name(),
                          absl::StrCat("tensor '", absl::CHexEscape(entry.name.substr(0, kMostShown)),
                                       "' is in ", Shortened(entry.value),
                                       ", which is no path of a file in the index's folder or below it"));
    }
    ++index.tensors_;
    if (!wanted.contains(entry.name)) return absl::OkStatus();
    const auto [it, first] = index.shards_.emplace(std::move(entry.name), entry.value.get<std::string>());
    return first ? absl::OkStatus() : rules.malformed;
  });
  if (!status.ok()) return status;
  if (!others.contains(std::string(kWeightMap))) return no_map;
  return index;
}

absl::StatusOr<absl::string_view> SafetensorsIndex::ShardOf(absl::string_view tensor) const {
  const auto it = shards_.find(tensor);
  if (it != shards_.end()) return it->second;
  return absl::NotFoundError(
      absl::StrCat(name_, ": no tensor '", absl::CHexEscape(tensor), "' among its ", tensors_));
}

}  // namespace lossd::formats
