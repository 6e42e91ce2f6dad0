// SPDX-License-Identifier: Apache-2.0
// The initial values of a new head, or of a head that is reset. InitialValues yields the values that a
// CreateHeadRequest or ResetHeadRequest asks for. HeadSource reads them from files, and FirstRefused finds
// values in files that a head must not have.
//
// All classes and functions are thread-safe.
#ifndef LOSSD_SERVER_ADMIN_HEAD_SOURCE_H_
#define LOSSD_SERVER_ADMIN_HEAD_SOURCE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/head_config.h"
#include "lossd/v1/head.pb.h"
#include "proto/tensorfile/safetensors.h"
#include "server/engine/stream.h"
#include "server/head/checkpoint_store.h"

namespace lossd::admin {

// The kinds of values that a tensor from a file may hold.
struct ValueRules {
  bool non_finite = false;      // NaN and infinities are allowed
  bool minus_infinity = false;  // minus infinity is allowed, even if non_finite is false
  bool negative = true;         // numbers below 0 are allowed
};

struct RefusedValue {
  int64_t index = 0;  // index of the element
  float value = 0;
};

// The first element that breaks a rule; nullopt: no element does. `bytes` holds elements of this dtype.
std::optional<RefusedValue> FirstRefused(const ValueRules& rules, kernels::DType dtype,
                                         absl::Span<const uint8_t> bytes);

// Reads the tensors of a new head from files: one safetensors file, several safetensors files with an index,
// or the files of a checkpoint (TensorFile in head.proto). The model may come from any program.
class HeadSource {
 public:
  // Some or all rows of a tensor.
  struct Part {
    const formats::SafetensorsReader* file = nullptr;
    const formats::SafetensorsInfo* info = nullptr;
  };
  struct Tensor {
    kernels::Param param = kernels::Param::kWeight;
    kernels::DType dtype = kernels::DType::kFloat32;  // the type in the files
    std::vector<Part> parts;                          // in the order of their rows
    std::string name;                                 // the name in the files
    absl::string_view field;                          // the field of the request that names the tensor
    int64_t cols = 1;
    ValueRules rules;
  };

  // Opens the needed files below `directory`. Checks that they have every tensor that a head with this config
  // needs, with the right shape and a known element type. Errors name the field "tensor_file....", the file
  // as the client named it, and the tensor: INVALID_ARGUMENT, NOT_FOUND, or an error of reading.
  static absl::StatusOr<HeadSource> Open(const std::string& directory, const v1::TensorFile& file,
                                         const kernels::HeadConfig& config);

  const std::vector<Tensor>& tensors() const { return tensors_; }
  // Reads rows in the type of the file. `out` has exactly their size. INVALID_ARGUMENT, naming the first such
  // value, if the rows have values that the request does not allow.
  absl::Status ReadRows(const Tensor& tensor, engine::RowRange rows, absl::Span<uint8_t> out) const;

 private:
  static absl::Status CheckValues(const Tensor& tensor, int64_t first_row, absl::Span<const uint8_t> bytes);

  head::ReadLocks locks_;                                                     // of a checkpoint's files
  std::map<std::string, std::unique_ptr<formats::SafetensorsReader>> files_;  // by path below the directory
  std::vector<Tensor> tensors_;
};

// The values that a CreateHeadRequest or ResetHeadRequest asks for: random numbers around zero, zeros, or the
// tensors of a file.
class InitialValues {
 public:
  // Takes the next rows of a tensor, in `dtype`. An error ends the filling and is returned.
  using Sink = absl::FunctionRef<absl::Status(kernels::TensorId id, engine::RowRange rows,
                                              kernels::DType dtype, absl::Span<const uint8_t> bytes)>;

  // If the request names a file, opens it below `directory`. Errors as HeadSource::Open.
  static absl::StatusOr<InitialValues> Open(const std::string& directory,
                                            const v1::CreateHeadRequest& request,
                                            const kernels::HeadConfig& config);
  static absl::StatusOr<InitialValues> Open(const std::string& directory, const v1::ResetHeadRequest& request,
                                            const kernels::HeadConfig& config);

  // Reads the whole file, `slice_bytes` at once, and returns the error with which Fill would end.
  absl::Status CheckReadable(int64_t slice_bytes) const;
  // Passes the values to `sink`, at most `slice_bytes` at once, but at least one row. For a new head, it
  // passes only tensors that differ from the values of a created head. For a `used` head, it passes all
  // tensors.
  absl::Status Fill(bool used, int64_t slice_bytes, Sink sink) const;

 private:
  // Writes rows of a tensor to `out`, in the dtype of the tensor.
  using RowSource = absl::FunctionRef<absl::Status(engine::RowRange rows, absl::Span<uint8_t> out)>;

  explicit InitialValues(const kernels::HeadConfig& config) : config_(config) {}
  template <typename Request>
  static absl::StatusOr<InitialValues> OpenAny(const std::string& directory, const Request& request,
                                               const kernels::HeadConfig& config);
  // Whether these values of the parameter differ from those of a newly created head.
  bool Sets(kernels::Param param) const;
  absl::Status FillUniform(int64_t slice_bytes, Sink sink) const;
  absl::Status FillFromFile(int64_t slice_bytes, Sink sink) const;
  absl::Status FillTensor(kernels::Param param, kernels::DType dtype, int64_t slice_bytes, RowSource source,
                          Sink sink) const;

  kernels::HeadConfig config_;
  std::optional<uint64_t> seed_;      // the seed of random numbers around zero
  std::optional<HeadSource> source_;  // neither is set: zeros
};

}  // namespace lossd::admin

#endif  // LOSSD_SERVER_ADMIN_HEAD_SOURCE_H_
