// SPDX-License-Identifier: Apache-2.0
// Tensors in files, as commands name them: "x.npy", "x.safetensors" (its only tensor) or
// "x.safetensors:name". Functions are thread-safe. Errors name the file.
#ifndef LOSSD_CLIENT_CLI_TENSOR_IO_H_
#define LOSSD_CLIENT_CLI_TENSOR_IO_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "lossd/v1/types.pb.h"
#include "proto/tensorfile/dtype.h"

namespace lossd::cli {

struct TensorData {
  formats::DType dtype = formats::DType::kFloat32;
  std::vector<int64_t> shape;  // empty: a scalar
  std::vector<uint8_t> bytes;  // row-major, dense

  int64_t elements() const;
};

absl::StatusOr<TensorData> LoadTensor(const std::string& spec);

// The wire's type of the file's elements; DTYPE_UNSPECIFIED for others.
v1::DType WireDType(formats::DType dtype);
formats::DType FileDType(v1::DType dtype);

// The elements as `dtype`. INVALID_ARGUMENT if they are not floating point.
absl::StatusOr<std::vector<uint8_t>> ConvertTo(v1::DType dtype, const TensorData& tensor);
// The elements as 32-bit integers. INVALID_ARGUMENT if they are not integers, OUT_OF_RANGE if one does not
// fit.
absl::StatusOr<std::vector<int32_t>> ToInt32(const TensorData& tensor);

struct NamedTensor {
  std::string name;
  TensorData data;
};

// Refuses a path that SaveTensors cannot write, before the work is done: another ending than `.npy` (for one
// tensor only) or `.safetensors`, or a file that exists.
absl::Status CheckOutputPath(const std::string& path, size_t tensors);
// bf16 becomes fp32 in an .npy file.
absl::Status SaveTensors(const std::string& path, const std::vector<NamedTensor>& tensors);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_TENSOR_IO_H_
