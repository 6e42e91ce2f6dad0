// The index of a model whose tensors are spread over several safetensors files (shards), as Hugging Face
// writes it, usually as model.safetensors.index.json:
//
//   {"metadata": {...}, "weight_map": {"<tensor>": "<file name of its shard>", ...}}
//
// Shards lie beside the index: a file name that could lead anywhere else is refused. Every index is treated
// as hostile; errors name the file and, where there is one, the tensor. Thread-safe.
#ifndef LOSSD_PROTO_TENSORFILE_SAFETENSORS_INDEX_H_
#define LOSSD_PROTO_TENSORFILE_SAFETENSORS_INDEX_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lossd::formats {

// Longer indexes are refused. Models of a trillion parameters have about 15 MB.
inline constexpr int64_t kMaxSafetensorsIndexBytes = int64_t{64} << 20;

class SafetensorsIndex {
 public:
  // INVALID_ARGUMENT if the content is no such index; file.h's errors. `name`: as in InputFile::Open.
  static absl::StatusOr<SafetensorsIndex> Open(const std::string& path, std::string name = "");

  // The file name of the shard with this tensor; NOT_FOUND if no shard has it. The result lives as long as
  // the index.
  absl::StatusOr<absl::string_view> ShardOf(absl::string_view tensor) const;
  int64_t tensors() const { return static_cast<int64_t>(shards_.size()); }

 private:
  SafetensorsIndex(std::string name, std::map<std::string, std::string, std::less<>> shards)
      : name_(std::move(name)), shards_(std::move(shards)) {}

  std::string name_;
  std::map<std::string, std::string, std::less<>> shards_;  // by tensor
};

}  // namespace lossd::formats

#endif  // LOSSD_PROTO_TENSORFILE_SAFETENSORS_INDEX_H_
