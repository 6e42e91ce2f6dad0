// SPDX-License-Identifier: Apache-2.0
// Reading and writing safetensors files: a JSON header and then named tensors, row-major and little-endian.
//
//   8 bytes    N, the header's length, little-endian
//   N bytes    JSON object: name -> {"dtype", "shape", "data_offsets": [begin, end)}, and optionally
//              "__metadata__": {string -> string}; may end in spaces
//   the rest   tensor data; offsets count from its start; tensors neither overlap nor leave gaps
//
// Every file is treated as hostile: a header that is not consistent with itself and with the file's size is
// refused. It is read entry by entry, so that it takes little more memory than the list of its tensors.
// Errors name the file and, if there is one, the tensor.
//
// Also here: the index of a model that is stored in several safetensors files (SafetensorsIndex), and the
// functions that read untrusted JSON (IsStrictJson, ReadJsonEntries). Functions are stateless and
// thread-safe.
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

// Limits on short, untrusted JSON texts.
struct JsonLimits {
  int64_t bytes = int64_t{1} << 20;  // length of the text
  int depth = 4;                     // nesting of objects and arrays below the outermost one
  int64_t values = 10'000;           // number of names, values, objects and arrays
};

// True if the text is JSON within the limits and no object has a name twice. Stops at the first fault.
bool IsStrictJson(absl::string_view text, const JsonLimits& limits);

// Parses a text that IsStrictJson accepts; nullopt for other texts. The depth of the result is bounded, so it
// may be copied and printed.
template <typename Json = nlohmann::json>
std::optional<Json> ParseStrictJson(absl::string_view text, const JsonLimits& limits) {
  if (!IsStrictJson(text, limits)) return std::nullopt;
  return Json::parse(text.begin(), text.end());
}

// ReadJsonEntries reads JSON from files that are untrusted and may be long. It passes an object on entry by
// entry while it reads the file, so that memory does not grow with the file.

// Names, strings and numbers that are longer than this are malformed.
inline constexpr int64_t kMaxJsonTokenBytes = int64_t{1} << 20;

// What ReadJsonEntries accepts.
struct JsonEntryRules {
  int max_depth = 2;          // nesting of objects and arrays below the outermost object
  int64_t max_values = 1000;  // number of names, values, objects and arrays in one entry
  // Name of an object in the outermost object. It is passed on as an empty object, followed by its entries
  // one by one. Empty: no such object.
  std::string spread = {};
  absl::Status malformed = {};  // the error for a text that is no JSON object within these rules
};

// An entry of the outermost object or, if `spread` is true, of the object JsonEntryRules::spread.
struct JsonEntry {
  bool spread = false;
  std::string name;
  nlohmann::json value;  // its objects have no name twice
};

// Reads the JSON object in bytes [begin, begin + bytes) of the file and calls `take` for its entries, in
// order. The caller checks whether two entries have the same name. Ends with the first error of `take`, with
// an error as in file.h, or with rules.malformed.
absl::Status ReadJsonEntries(const InputFile& file, int64_t begin, int64_t bytes, const JsonEntryRules& rules,
                             absl::FunctionRef<absl::Status(JsonEntry entry)> take);

// Headers that are longer than this are refused, in reading and in writing.
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

// An open safetensors file. Thread-safe.
class SafetensorsReader {
 public:
  // INVALID_ARGUMENT if the content is not a safetensors file; other errors as in file.h. `name`: as in
  // InputFile::Open.
  static absl::StatusOr<std::unique_ptr<SafetensorsReader>> Open(const std::string& path,
                                                                 std::string name = "");
  static absl::StatusOr<std::unique_ptr<SafetensorsReader>> Open(std::unique_ptr<InputFile> file);

  const std::string& name() const { return file_->name(); }
  // All tensors, in the order of their data.
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

// Creates the file `path`, which must not exist, and writes the header. The caller then appends the data of
// all tensors to the result, in the order of `tensors`, in pieces of any size. The data begin at a multiple
// of `data_alignment` bytes. INVALID_ARGUMENT for a spec that cannot be stored; then no file is created.
// Other errors as in file.h; after these a part of the file may exist.
absl::StatusOr<std::unique_ptr<DataWriter>> CreateSafetensors(
    const std::string& path, absl::Span<const SafetensorsSpec> tensors,
    const std::map<std::string, std::string>& metadata = {},
    const OutputFileFactory& create_file = CreateOutputFile, int64_t data_alignment = 64);

// Indexes that are longer than this are refused. The index of a model with a trillion parameters has about 15
// MB.
inline constexpr int64_t kMaxSafetensorsIndexBytes = int64_t{64} << 20;

// The index of a model whose tensors are spread over several safetensors files (shards), as Hugging Face
// writes it, usually as model.safetensors.index.json:
//
//   {"metadata": {...}, "weight_map": {"<tensor>": "<path of its shard>", ...}}
//
// Shards are in the index's folder or below it; a path that could lead anywhere else is refused. Every index
// is treated as hostile. The whole index is checked, but only the tensors that were asked for are kept in
// memory. Errors name the file and, if there is one, the tensor. Thread-safe.
class SafetensorsIndex {
 public:
  // Reads in which shards `tensors` are. INVALID_ARGUMENT if the content is not an index, or names one of
  // `tensors` twice; other errors as in file.h.
  static absl::StatusOr<SafetensorsIndex> Read(const InputFile& file, absl::Span<const std::string> tensors);

  // The path of the shard with this tensor, relative to the index's folder. `tensor` is one of those given to
  // Read. NOT_FOUND if no shard has it. The result lives as long as the index.
  absl::StatusOr<absl::string_view> ShardOf(absl::string_view tensor) const;
  int64_t tensors() const { return tensors_; }  // the number of tensors that the index names

 private:
  explicit SafetensorsIndex(std::string name) : name_(std::move(name)) {}

  std::string name_;
  int64_t tensors_ = 0;
  std::map<std::string, std::string, std::less<>> shards_;  // by tensor
};

}  // namespace lossd::formats

#endif  // LOSSD_PROTO_TENSORFILE_SAFETENSORS_H_
