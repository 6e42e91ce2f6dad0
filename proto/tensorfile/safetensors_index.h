// SPDX-License-Identifier: Apache-2.0
// The index of a model whose tensors are spread over several safetensors files (shards), as Hugging Face
// writes it, usually as model.safetensors.index.json:
//
//   {"metadata": {...}, "weight_map": {"<tensor>": "<path of its shard>", ...}}
//
// Shards lie in the index's folder or below it: a path that could lead anywhere else is refused. Every index
// is treated as hostile; errors name the file and, where there is one, the tensor. All of it is checked, and
// only what was asked for is kept in memory. Thread-safe.
#ifndef LOSSD_PROTO_TENSORFILE_SAFETENSORS_INDEX_H_
#define LOSSD_PROTO_TENSORFILE_SAFETENSORS_INDEX_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "proto/tensorfile/file.h"

namespace lossd::formats {

// Longer indexes are refused. Models of a trillion parameters have about 15 MB.
inline constexpr int64_t kMaxSafetensorsIndexBytes = int64_t{64} << 20;

class SafetensorsIndex {
 public:
  // Reads where `tensors` are. INVALID_ARGUMENT if the content is no such index, or names one of them twice;
  // file.h's errors.
  static absl::StatusOr<SafetensorsIndex> Read(const InputFile& file, absl::Span<const std::string> tensors);

  // The path, from the index's folder on, of the shard with this tensor, one of those that Read was asked
  // for; NOT_FOUND if no shard has it. The result lives as long as the index.
  absl::StatusOr<absl::string_view> ShardOf(absl::string_view tensor) const;
  int64_t tensors() const { return tensors_; }  // that the index names

 private:
  explicit SafetensorsIndex(std::string name) : name_(std::move(name)) {}

  std::string name_;
  int64_t tensors_ = 0;
  std::map<std::string, std::string, std::less<>> shards_;  // by tensor
};

}  // namespace lossd::formats

#endif  // LOSSD_PROTO_TENSORFILE_SAFETENSORS_INDEX_H_
