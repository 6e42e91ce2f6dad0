// SPDX-License-Identifier: Apache-2.0
// A head as data. Head is a named head on the device. FillUniform draws the initial values of its tensors.
// History says where its values come from. The open step and its ledger belong to the engine.
#ifndef LOSSD_SERVER_HEAD_HEAD_H_
#define LOSSD_SERVER_HEAD_HEAD_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/head_config.h"

namespace lossd::head {

// The name of a tensor: "weight" for a parameter's value, else "weight.gradient", "norm.gain.moment1", ...
std::string TensorName(kernels::TensorId id);

// A named head on the device. Its tensors are read and written some rows at a time.
//
// Only the engine's device thread calls it, except name() and config(), which are thread-safe.
class Head {
 public:
  Head(std::string name, std::unique_ptr<kernels::HeadKernels> kernels);

  const std::string& name() const { return name_; }
  const kernels::HeadConfig& config() const { return config_; }
  kernels::HeadKernels& kernels() { return *kernels_; }

  // Copy rows of a tensor as HeadKernels::ReadTensor and WriteTensor do. Errors name the head and the tensor:
  // NOT_FOUND if the head has no such tensor, OUT_OF_RANGE for rows outside it, INVALID_ARGUMENT for a span
  // of the wrong size, or the backend's error.
  absl::Status ReadRows(kernels::TensorId id, int64_t row_begin, int64_t rows, kernels::DType dtype,
                        absl::Span<uint8_t> out);
  absl::Status WriteRows(kernels::TensorId id, int64_t row_begin, int64_t rows, kernels::DType dtype,
                         absl::Span<const uint8_t> in);

  // Which kinds of tensors WriteRows was asked to write since the last call of TakeWritten.
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

// ---- Initial values ----
// Any part of the initial values can be generated alone and in any order, with the same bits on every
// machine.
//
// Element i of a parameter is a function of (seed, parameter, i) alone: SplitMix64's output function
// (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014) over a counter, whose stream
// is chosen by seed and parameter. Thread-safe.

// The bound 1 / sqrt(D) of torch.nn.Linear's weights and bias: Kaiming's uniform initialization with a =
// sqrt(5), sqrt(6 / ((1 + 5) D)).
float KaimingBound(int64_t hidden_size);

// Fills `out` with elements [first_element, first_element + out.size()) of `param`, uniform in
// [-bound, bound] in 2^24 equal steps, symmetric around 0.
void FillUniform(uint64_t seed, kernels::Param param, int64_t first_element, float bound,
                 absl::Span<float> out);

// Where the values of a head come from: which run applied its last step, and to or from which checkpoint they
// were last saved or loaded. As lossd.v1.HeadHistory without the open step. Plain data.
struct History {
  std::string run;                      // the run that applied the last step; "": no step, or no run named
  int64_t applied_unix_seconds = 0;     // when that was; 0: not known
  std::string checkpoint;               // "<head>/<name>", saved or loaded last; "": none
  uint64_t checkpoint_step = 0;         // the step that is open in the checkpoint
  int64_t checkpoint_unix_seconds = 0;  // when the checkpoint was saved; 0: not known
  bool loaded = false;                  // the values were loaded from `checkpoint`; false: saved to it

  friend bool operator==(const History&, const History&) = default;
};

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_HEAD_H_
