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
#ifndef LOSSD_PROTO_TENSORFILE_SAFETENSORS_H_
#define LOSSD_PROTO_TENSORFILE_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "proto/tensorfile/dtype.h"
#include "proto/tensorfile/file.h"

namespace lossd::formats {

// Longer headers are refused, when reading and when writing.
inline constexpr int64_t kMaxSafetensorsHeaderBytes = int64_t{32} << 20;

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

}  // namespace lossd::formats

#endif  // LOSSD_PROTO_TENSORFILE_SAFETENSORS_H_
