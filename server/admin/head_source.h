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
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/dtype.h"
#include "kernels/head_config.h"
#include "lossd/v1/head.pb.h"
#include "proto/tensorfile/safetensors.h"
#include "server/admin/value_rules.h"
#include "server/engine/stream.h"
#include "server/head/checkpoint_removal.h"

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
    std::string name;                                 // in the files
    absl::string_view field;                          // of the request that names it
    int64_t cols = 1;
    ValueRules rules;
  };

  // Opens the files below `directory` that are needed and checks that they have every tensor such a head
  // needs, in the right shape and a known element type. Errors name the field "tensor_file....", the file as
  // the client knows it, and the tensor: INVALID_ARGUMENT, NOT_FOUND, or what reading ended with.
  static absl::StatusOr<HeadSource> Open(const std::string& directory, const v1::TensorFile& file,
                                         const kernels::HeadConfig& config);

  const std::vector<Tensor>& tensors() const { return tensors_; }
  // Rows as stored; `out` has exactly their bytes. INVALID_ARGUMENT, naming the first, if there are values
  // among them that the request does not allow.
  absl::Status ReadRows(const Tensor& tensor, engine::RowRange rows, absl::Span<uint8_t> out) const;

 private:
  static absl::Status CheckValues(const Tensor& tensor, int64_t first_row, absl::Span<const uint8_t> bytes);

  head::ReadLocks locks_;                                                     // of a checkpoint
  std::map<std::string, std::unique_ptr<formats::SafetensorsReader>> files_;  // by path below the directory
  std::vector<Tensor> tensors_;
};

}  // namespace lossd::admin

#endif  // LOSSD_SERVER_ADMIN_HEAD_SOURCE_H_
