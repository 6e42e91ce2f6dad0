// SPDX-License-Identifier: Apache-2.0
// The values that a new head begins with. InitialValues yields them as CreateHeadRequest and ResetHeadRequest
// ask for them. HeadSource reads them from files, and FirstRefused finds values in files that a head must not
// have.
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

// Which values a tensor from a file may hold.
struct ValueRules {
  bool non_finite = false;      // NaN and infinities may be there
  bool minus_infinity = false;  // this one may be there all the same
  bool negative = true;         // numbers below 0 may be there
};

struct RefusedValue {
  int64_t index = 0;  // among the elements
  float value = 0;
};

// The first element of `bytes`, which hold elements of this dtype, that breaks a rule; nullopt: none does.
std::optional<RefusedValue> FirstRefused(const ValueRules& rules, kernels::DType dtype,
                                         absl::Span<const uint8_t> bytes);

// The tensors of a new head from a model of any origin: a safetensors file, several safetensors files with an
// index, or the files of a checkpoint (TensorFile in head.proto).
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

// The values of a new head, as CreateHeadRequest and ResetHeadRequest ask for them: numbers around zero,
// zeros, or the tensors of a file.
class InitialValues {
 public:
  // Takes the next rows of a tensor, in `dtype`. An error ends the filling and is returned.
  using Sink = absl::FunctionRef<absl::Status(kernels::TensorId id, engine::RowRange rows,
                                              kernels::DType dtype, absl::Span<const uint8_t> bytes)>;

  // Opens the file that the request names, if it names one, below `directory`. Errors as HeadSource::Open.
  static absl::StatusOr<InitialValues> Open(const std::string& directory,
                                            const v1::CreateHeadRequest& request,
                                            const kernels::HeadConfig& config);
  static absl::StatusOr<InitialValues> Open(const std::string& directory, const v1::ResetHeadRequest& request,
                                            const kernels::HeadConfig& config);

  // Reads all of a file, `slice_bytes` at once: the error that filling would end with.
  absl::Status CheckReadable(int64_t slice_bytes) const;
  // Hands values to `sink`, at most `slice_bytes` (at least one row) at once: what differs from the tensors
  // of a head that was made just now, or, for a `used` head, all of them.
  absl::Status Fill(bool used, int64_t slice_bytes, Sink sink) const;

 private:
  // Yields rows of a tensor in the given buffer, in the dtype of the tensor.
  using RowSource = absl::FunctionRef<absl::Status(engine::RowRange rows, absl::Span<uint8_t> out)>;

  explicit InitialValues(const kernels::HeadConfig& config) : config_(config) {}
  template <typename Request>
  static absl::StatusOr<InitialValues> OpenAny(const std::string& directory, const Request& request,
                                               const kernels::HeadConfig& config);
  // Whether a new head has other values of this parameter than these.
  bool Sets(kernels::Param param) const;
  absl::Status FillUniform(int64_t slice_bytes, Sink sink) const;
  absl::Status FillFromFile(int64_t slice_bytes, Sink sink) const;
  absl::Status FillTensor(kernels::Param param, kernels::DType dtype, int64_t slice_bytes, RowSource source,
                          Sink sink) const;

  kernels::HeadConfig config_;
  std::optional<uint64_t> seed_;      // of numbers around zero
  std::optional<HeadSource> source_;  // neither: zeros
};

}  // namespace lossd::admin

#endif  // LOSSD_SERVER_ADMIN_HEAD_SOURCE_H_
