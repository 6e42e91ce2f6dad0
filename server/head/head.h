// SPDX-License-Identifier: Apache-2.0
// A named head on the device. The open step, its ledger and stored results belong to the engine.
//
// Driven by the engine's device thread alone, except name() and config(), which are thread-safe.
#ifndef LOSSD_SERVER_HEAD_HEAD_H_
#define LOSSD_SERVER_HEAD_HEAD_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/backend.h"

namespace lossd::head {

// "weight" for a value, else "weight.gradient", "norm.gain.moment1", ...
std::string TensorName(kernels::TensorId id);

class Head {
 public:
  Head(std::string name, std::unique_ptr<kernels::HeadKernels> kernels);

  const std::string& name() const { return name_; }
  const kernels::HeadConfig& config() const { return config_; }
  kernels::HeadKernels& kernels() { return *kernels_; }

  // Copies rows of a tensor as HeadKernels::ReadTensor and WriteTensor do. Errors name the head and the
  // tensor: NOT_FOUND if it has no such tensor, OUT_OF_RANGE for rows outside it, INVALID_ARGUMENT for a
  // span of the wrong size, or the backend's.
  absl::Status ReadRows(kernels::TensorId id, int64_t row_begin, int64_t rows, kernels::DType dtype,
                        absl::Span<uint8_t> out);
  absl::Status WriteRows(kernels::TensorId id, int64_t row_begin, int64_t rows, kernels::DType dtype,
                         absl::Span<const uint8_t> in);

  // Which tensors WriteRows has been asked to write since the last call of this.
  struct Written {
    bool values = false;
    bool moments = false;
  };
  Written TakeWritten() { return std::exchange(written_, {}); }

 private:
  absl::Status CheckRows(kernels::TensorId id, int64_t row_begin, int64_t rows, kernels::DType dtype,
                         size_t bytes) const;
  absl::Status Named(kernels::TensorId id, const absl::Status& status) const;

  const std::string name_;
  const kernels::HeadConfig config_;
  const std::unique_ptr<kernels::HeadKernels> kernels_;
  Written written_;
};

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_HEAD_H_
