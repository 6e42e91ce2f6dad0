// SPDX-License-Identifier: Apache-2.0
// What the values of a new head are, as CreateHeadRequest and ResetHeadRequest say it: numbers around zero,
// zeros, or the tensors of a file.
//
// Thread-safe.
#ifndef LOSSD_SERVER_ADMIN_INITIAL_VALUES_H_
#define LOSSD_SERVER_ADMIN_INITIAL_VALUES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/dtype.h"
#include "kernels/head_config.h"
#include "lossd/v1/head.pb.h"
#include "server/admin/head_source.h"
#include "server/engine/stream.h"

namespace lossd::admin {

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

#endif  // LOSSD_SERVER_ADMIN_INITIAL_VALUES_H_
