// SPDX-License-Identifier: Apache-2.0
// The tensors of a new head from a model of any origin: a safetensors file, several with an index, or the
// files of a checkpoint (TensorFile in head.proto).
//
// Thread-safe.
#ifndef LOSSD_SERVER_ADMIN_HEAD_SOURCE_H_
#define LOSSD_SERVER_ADMIN_HEAD_SOURCE_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/dtype.h"
#include "kernels/head_config.h"
#include "lossd/v1/head.pb.h"
#include "proto/tensorfile/safetensors.h"
#include "server/engine/stream.h"

namespace lossd::admin {

class HeadSource {
 public:
  // Some or all rows of a tensor.
  struct Part {
    const formats::SafetensorsReader* file = nullptr;
    const formats::SafetensorsInfo* info = nullptr;
  };
  struct Tensor {
    kernels::Param param = kernels::Param::kWeight;
    kernels::DType dtype = kernels::DType::kFloat32;  // in the files
    std::vector<Part> parts;                          // in the order of their rows
  };

  // Opens the files below `directory` that are needed and checks that they have every tensor such a head
  // needs, in the right shape and a known element type. Errors name the field "tensor_file....", the file as
  // the client knows it, and the tensor: INVALID_ARGUMENT, NOT_FOUND, or what reading ended with.
  static absl::StatusOr<HeadSource> Open(const std::string& directory, const v1::TensorFile& file,
                                         const kernels::HeadConfig& config);

  const std::vector<Tensor>& tensors() const { return tensors_; }
  // Rows as stored; `out` has exactly their bytes.
  absl::Status ReadRows(const Tensor& tensor, engine::RowRange rows, absl::Span<uint8_t> out) const;

 private:
  std::map<std::string, std::unique_ptr<formats::SafetensorsReader>> files_;  // by path below the directory
  std::vector<Tensor> tensors_;
};

}  // namespace lossd::admin

#endif  // LOSSD_SERVER_ADMIN_HEAD_SOURCE_H_
