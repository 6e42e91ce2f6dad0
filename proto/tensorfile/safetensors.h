// SPDX-License-Identifier: Apache-2.0
// The safetensors format: named tensors, row-major and little-endian, behind a JSON header.
//
//   8 bytes    N, the header's length, little-endian
//   N bytes    JSON object: name -> {"dtype", "shape", "data_offsets": [begin, end)}, and optionally
//              "__metadata__": {string -> string}; may end in spaces
//   the rest   tensor data; offsets count from its start; tensors neither overlap nor leave gaps
//
// Every file that is opened is treated as hostile: a header is either consistent with itself and with
// the file's size, or refused. It is read entry by entry, so that it takes little more memory than the list
// of its tensors. Errors name the file and, where there is one, the tensor.
//
// The file also holds the index of a model in several such files (SafetensorsIndex), and the readers of
// untrusted JSON below both (IsStrictJson, ReadJsonEntries). Functions are stateless and thread-safe.
#ifndef LOSSD_PROTO_TENSORFILE_SAFETENSORS_H_
#define LOSSD_PROTO_TENSORFILE_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "proto/tensorfile/dtype.h"
#include "proto/tensorfile/file.h"

namespace lossd::formats {

// Limits on short JSON texts that are not trusted.
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

// ReadJsonEntries reads JSON of files that are not trusted and may be long. It hands out an object entry by
// entry while the file is read, so that memory does not grow with the file.

// Longer names, strings and numbers are malformed there.
inline constexpr int64_t kMaxJsonTokenBytes = int64_t{1} << 20;

// What ReadJsonEntries accepts.
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

// Longer headers are refused, when reading and when writing.
inline constexpr int64_t kMaxSafetensorsHeaderBytes = int64_t{32} << 20;

// A tensor in a file.
struct SafetensorsInfo {
  std::string name;
  DType dtype = DType::kFloat32;
  std::string dtype_name;      // as in the file, e.g. "BF16"
  std::vector<int64_t> shape;  // empty: a scalar
  int64_t begin = 0;           // byte offset in the file
  int64_t bytes = 0;

  // The first dimension; 1 for a scalar.
  int64_t rows() const { return shape.empty() ? 1 : shape[0]; }
};

// An open file. Thread-safe.
class SafetensorsReader {
 public:
  // INVALID_ARGUMENT if the content is not a safetensors file; file.h's errors.
  // `name`: as in InputFile::Open.
  static absl::StatusOr<std::unique_ptr<SafetensorsReader>> Open(const std::string& path,
                                                                 std::string name = "");
  static absl::StatusOr<std::unique_ptr<SafetensorsReader>> Open(std::unique_ptr<InputFile> file);

  const std::string& name() const { return file_->name(); }
  // In the order of their data.
  const std::vector<SafetensorsInfo>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  // NOT_FOUND if there is no such tensor. The result lives as long as the reader.
  absl::StatusOr<const SafetensorsInfo*> Find(absl::string_view tensor_name) const;

  // Reads a tensor's bytes [offset, offset + out.size()). OUT_OF_RANGE outside the tensor.
  absl::Status ReadBytes(const SafetensorsInfo& tensor, int64_t offset, absl::Span<uint8_t> out) const;
  // Reads rows [row_begin, row_begin + rows) as stored; `out` must have exactly their size. OUT_OF_RANGE
  // outside the tensor, INVALID_ARGUMENT for another size or an unknown element type.
  absl::Status ReadRows(const SafetensorsInfo& tensor, int64_t row_begin, int64_t rows,
                        absl::Span<uint8_t> out) const;

 private:
  explicit SafetensorsReader(std::unique_ptr<InputFile> file) : file_(std::move(file)) {}
  absl::Status ReadHeader();

  const std::unique_ptr<InputFile> file_;
  std::vector<SafetensorsInfo> tensors_;
  std::map<std::string, std::string> metadata_;
};

// A tensor to be written.
struct SafetensorsSpec {
  std::string name;  // not "__metadata__"; unique; UTF-8
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
};

// Creates the file `path`, which must not exist, and writes the header. The data of all tensors follow
// through the result, in the order of `tensors`, in pieces of any size.
// `data_alignment`: the data begin at a multiple of so many bytes.
// INVALID_ARGUMENT for a spec that cannot be stored (then there is no file); file.h's errors, after which
// the file may exist in part.
absl::StatusOr<std::unique_ptr<DataWriter>> CreateSafetensors(
    const std::string& path, absl::Span<const SafetensorsSpec> tensors,
    const std::map<std::string, std::string>& metadata = {},
    const OutputFileFactory& create_file = CreateOutputFile, int64_t data_alignment = 64);

// Longer indexes are refused. Models of a trillion parameters have about 15 MB.
inline constexpr int64_t kMaxSafetensorsIndexBytes = int64_t{64} << 20;

// The index of a model whose tensors are spread over several safetensors files (shards), as Hugging Face
// writes it, usually as model.safetensors.index.json:
//
//   {"metadata": {...}, "weight_map": {"<tensor>": "<path of its shard>", ...}}
//
// Shards lie in the index's folder or below it: a path that could lead anywhere else is refused. Every index
// is treated as hostile; errors name the file and, where there is one, the tensor. All of it is checked, and
// only what was asked for is kept in memory. Thread-safe.
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

#endif  // LOSSD_PROTO_TENSORFILE_SAFETENSORS_H_
