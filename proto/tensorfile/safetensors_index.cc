#include "proto/tensorfile/safetensors_index.h"

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "proto/tensorfile/file.h"
#include "proto/tensorfile/strict_json.h"

namespace lossd::formats {
namespace {

constexpr int kMaxDepth = 8;  // metadata may nest a little

absl::Status Invalid(absl::string_view name, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(name, ": not an index of safetensors files: ", what));
}

// True for a name that stays in its folder.
bool IsFileName(absl::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == absl::string_view::npos &&
         name.find('\0') == absl::string_view::npos;
}

absl::StatusOr<std::string> ReadText(const InputFile& file) {
  if (file.size() > kMaxSafetensorsIndexBytes) {
    return Invalid(file.name(), absl::StrCat("its ", file.size(), " bytes are more than the ",
                                             kMaxSafetensorsIndexBytes, " allowed"));
  }
  std::string text(static_cast<size_t>(file.size()), '\0');
  const auto bytes = absl::MakeSpan(reinterpret_cast<uint8_t*>(text.data()), text.size());
  if (absl::Status status = file.ReadAt(0, bytes); !status.ok()) return status;
  return text;
}

}  // namespace

absl::StatusOr<SafetensorsIndex> SafetensorsIndex::Open(const std::string& path, std::string name) {
  const absl::StatusOr<std::unique_ptr<InputFile>> file = InputFile::Open(path, std::move(name));
  if (!file.ok()) return file.status();
  const absl::StatusOr<std::string> text = ReadText(**file);
  if (!text.ok()) return text.status();
  const std::optional<nlohmann::json> json = ParseStrictJson(*text, kMaxDepth);
  if (!json.has_value() || !json->is_object()) {
    return Invalid((*file)->name(), "it is no JSON object with unique keys");
  }
  const auto map = json->find("weight_map");
  if (map == json->end() || !map->is_object()) return Invalid((*file)->name(), "it has no weight_map");
  std::map<std::string, std::string, std::less<>> shards;
  for (const auto& [tensor, shard] : map->items()) {
    if (!shard.is_string() || !IsFileName(shard.get_ref<const std::string&>())) {
      return Invalid((*file)->name(),
                     absl::StrCat("tensor '", absl::CHexEscape(tensor), "' is in ",
                                  absl::CHexEscape(shard.dump(-1, ' ', true)), ", which is no file name"));
    }
    shards.emplace(tensor, shard.get<std::string>());
  }
  return SafetensorsIndex((*file)->name(), std::move(shards));
}

absl::StatusOr<absl::string_view> SafetensorsIndex::ShardOf(absl::string_view tensor) const {
  const auto it = shards_.find(tensor);
  if (it != shards_.end()) return it->second;
  return absl::NotFoundError(
      absl::StrCat(name_, ": no tensor '", absl::CHexEscape(tensor), "' among its ", shards_.size()));
}

}  // namespace lossd::formats
