// SPDX-License-Identifier: Apache-2.0
// Reading and writing NumPy's .npy format, versions 1.0 and 2.0: a header, which is a Python dictionary, and
// then one array. Supported: little-endian, C order, element types '<f2', '<f4', '<f8', '<i4', '<i8'.
//
// A header must be consistent with itself and with the file's size. Errors name the file.
#ifndef LOSSD_PROTO_TENSORFILE_NPY_H_
#define LOSSD_PROTO_TENSORFILE_NPY_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/tensorfile/dtype.h"
#include "proto/tensorfile/file.h"

namespace lossd::formats {

// An open .npy file. Thread-safe.
class NpyReader {
 public:
  // INVALID_ARGUMENT if the file is not a .npy file or its array is not supported; other errors as in file.h.
  static absl::StatusOr<std::unique_ptr<NpyReader>> Open(const std::string& path);

  DType dtype() const { return dtype_; }
  const std::vector<int64_t>& shape() const { return shape_; }  // empty: a scalar
  int64_t elements() const { return elements_; }
  // Reads elements [begin, begin + count) as stored; `out` must have exactly their size. OUT_OF_RANGE
  // outside the array, INVALID_ARGUMENT for another size.
  absl::Status Read(int64_t begin, int64_t count, absl::Span<uint8_t> out) const;

 private:
  NpyReader() = default;

  std::unique_ptr<InputFile> file_;
  DType dtype_ = DType::kFloat32;
  std::vector<int64_t> shape_;
  int64_t elements_ = 0;
  int64_t data_begin_ = 0;
};

// Creates the file `path`, which must not exist, and writes the header. The caller then appends the data to
// the result, in pieces of any size. INVALID_ARGUMENT for an element type or shape that cannot be stored.
// Other errors as in file.h; after these a part of the file may exist.
absl::StatusOr<std::unique_ptr<DataWriter>> CreateNpy(
    const std::string& path, DType dtype, absl::Span<const int64_t> shape,
    const OutputFileFactory& create_file = CreateOutputFile);

}  // namespace lossd::formats

#endif  // LOSSD_PROTO_TENSORFILE_NPY_H_
