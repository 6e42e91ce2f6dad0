// SPDX-License-Identifier: Apache-2.0
// Indices of safetensors files. One that is taken has what its weight_map says, and only names of files
// beside it.
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "proto/tensorfile/safetensors.h"
#include "tests/fuzz/fuzz.h"

namespace lossd::fuzz {
namespace {

// An index may have 64 MiB, and so much memory for each byte is what the server may need to read it.
constexpr int64_t kMemoryPerByte = 16;

// The reader takes less.
constexpr int kDeep = 16;

absl::StatusOr<formats::SafetensorsIndex> Read(const std::string& path,
                                               const std::vector<std::string>& tensors) {
  const auto file = formats::InputFile::Open(path);
  if (!file.ok()) return file.status();
  return formats::SafetensorsIndex::Read(**file, tensors);
}

// All tensors of a map of shards, unless the text is none.
std::vector<std::string> TensorsOf(const nlohmann::json& json) {
  std::vector<std::string> tensors;
  const auto map = json.is_object() ? json.find("weight_map") : json.end();
  if (map == json.end() || !map->is_object()) return tensors;
  for (const auto& [tensor, file] : map->items()) tensors.push_back(tensor);
  return tensors;
}

void CheckShards(const formats::SafetensorsIndex& index, const nlohmann::json& json) {
  const nlohmann::json& map = json.at("weight_map");
  FUZZ_CHECK(index.tensors() == static_cast<int64_t>(map.size()), "another number of tensors");
  for (const auto& [tensor, file] : map.items()) {
    const absl::StatusOr<absl::string_view> shard = index.ShardOf(tensor);
    FUZZ_CHECK(shard.ok() && *shard == file.get<std::string>(), tensor);
    const std::filesystem::path path(std::string(*shard).c_str());
    FUZZ_CHECK(path.is_relative() && path.has_filename() && path.native() == *shard, *shard);
    for (const std::filesystem::path& part : path)
      FUZZ_CHECK(part != ".." && part != "." && !part.empty(), *shard);
  }
}

}  // namespace
}  // namespace lossd::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lossd;
  static fuzz::MemoryFile file;
  const absl::string_view text = fuzz::AsText(data, size);
  const std::string path = file.path();
  const fuzz::Nesting nesting = fuzz::DeepestArray(text);
  if (nesting.depth > fuzz::kDeep) {
    file.Write(fuzz::Deepened(text, nesting));
    FUZZ_CHECK(!fuzz::Read(path, {}).ok(), "an index that nests deep is taken");
  }
  file.Write(text);
  {
    const fuzz::HeapWatch heap;
    const auto index = fuzz::Read(path, {"a"});
    heap.Check(size, fuzz::kMemoryPerByte);
    if (!index.ok()) return 0;
  }
  // It nests only a little, or it would have been refused.
  const nlohmann::json json = nlohmann::json::parse(text.begin(), text.end());
  const auto index = fuzz::Read(path, fuzz::TensorsOf(json));
  if (index.ok()) fuzz::CheckShards(*index, json);  // else it names a tensor twice
  return 0;
}
