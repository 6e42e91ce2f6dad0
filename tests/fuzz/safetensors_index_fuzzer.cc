// Indices of safetensors files. One that is taken has what its weight_map says, and only names of files
// beside it.
#include <nlohmann/json.hpp>
#include <string>

#include "proto/tensorfile/safetensors_index.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/heap_watch.h"
#include "tests/fuzz/nesting.h"

namespace lossd::fuzz {
namespace {

// An index may have 64 MiB, and so much memory for each byte is what the server may need to read it.
constexpr int64_t kMemoryPerByte = 16;

// The reader takes less.
constexpr int kDeep = 16;

void CheckShards(const formats::SafetensorsIndex& index, const nlohmann::json& json) {
  const nlohmann::json& map = json.at("weight_map");
  FUZZ_CHECK(index.tensors() == static_cast<int64_t>(map.size()), "another number of tensors");
  for (const auto& [tensor, file] : map.items()) {
    const absl::StatusOr<absl::string_view> shard = index.ShardOf(tensor);
    FUZZ_CHECK(shard.ok() && *shard == file.get<std::string>(), tensor);
    FUZZ_CHECK(shard->find('/') == absl::string_view::npos && *shard != ".." && *shard != ".", *shard);
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
    FUZZ_CHECK(!formats::SafetensorsIndex::Open(path).ok(), "an index that nests deep is taken");
  }
  file.Write(text);
  const fuzz::HeapWatch heap;
  const absl::StatusOr<formats::SafetensorsIndex> index = formats::SafetensorsIndex::Open(path);
  heap.Check(size, fuzz::kMemoryPerByte);
  if (!index.ok()) return 0;
  // It nests only a little, or it would have been refused.
  fuzz::CheckShards(*index, nlohmann::json::parse(text.begin(), text.end()));
  return 0;
}
