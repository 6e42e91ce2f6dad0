// The tensors of a new head from a safetensors file of any origin.
//
// Thread-safe.
#ifndef LOSSD_SERVER_RPC_HEAD_SOURCE_H_
#define LOSSD_SERVER_RPC_HEAD_SOURCE_H_

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

namespace lossd::rpc {

class HeadSource {
 public:
  struct Tensor {
    kernels::Param param = kernels::Param::kWeight;
    kernels::DType dtype = kernels::DType::kFloat32;  // in the file
    const formats::SafetensorsInfo* info = nullptr;
  };

  // Opens the file below `directory` and checks that it has every tensor such a head needs, in the right
  // shape and a known element type. INVALID_ARGUMENT and NOT_FOUND name the field "tensor_file....".
  static absl::StatusOr<HeadSource> Open(const std::string& directory, const v1::TensorFile& file,
                                         const kernels::HeadConfig& config);

  const std::vector<Tensor>& tensors() const { return tensors_; }
  // Rows as stored; `out` has exactly their bytes.
  absl::Status ReadRows(const Tensor& tensor, engine::RowRange rows, absl::Span<uint8_t> out) const {
    return reader_->ReadRows(*tensor.info, rows.begin, rows.size(), out);
  }

 private:
  std::unique_ptr<formats::SafetensorsReader> reader_;
  std::vector<Tensor> tensors_;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_HEAD_SOURCE_H_
