// SPDX-License-Identifier: Apache-2.0
// The tensors that commands send and receive. A command line names a tensor in a file as "x.npy",
// "x.safetensors" (for its only tensor) or "x.safetensors:name". This header also makes the rows that
// `lossctl bench` and `lossctl loss` send.
//
// Functions are thread-safe. RowBuffer is thread-compatible. Errors name the file.
#ifndef LOSSD_CLIENT_CLI_TENSORS_H_
#define LOSSD_CLIENT_CLI_TENSORS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cpp/client.h"
#include "kernels/data/real_rows.h"
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

// The protocol's type for elements of a file; DTYPE_UNSPECIFIED for types that the protocol does not have.
v1::DType WireDType(formats::DType dtype);
formats::DType FileDType(v1::DType dtype);

// Converts the elements to `dtype`. INVALID_ARGUMENT if they are not floating point.
absl::StatusOr<std::vector<uint8_t>> ConvertTo(v1::DType dtype, const TensorData& tensor);
// Converts the elements to 32-bit integers. INVALID_ARGUMENT if they are not integers, OUT_OF_RANGE if one
// does not fit.
absl::StatusOr<std::vector<int32_t>> ToInt32(const TensorData& tensor);

struct NamedTensor {
  std::string name;
  TensorData data;
};

// Checks before the work is done that SaveTensors can write `path`. An error if its ending is neither `.npy`
// (for one tensor only) nor `.safetensors`, or if the file exists.
absl::Status CheckOutputPath(const std::string& path, size_t tensors);
// An .npy file stores bf16 as fp32.
absl::Status SaveTensors(const std::string& path, const std::vector<NamedTensor>& tensors);

// Makes the rows that `lossctl bench` and `lossctl loss` send: random hidden states and targets, which depend
// on the seed alone and not on the machine, or rows with the softmax of a real model. RowBuffer is the memory
// of the host or of a GPU in which rows lie.
//
// The functions are thread-safe; RowBuffer is thread-compatible.

struct HiddenRows {
  uint64_t rows = 0;         // N
  uint64_t hidden_size = 0;  // D
  v1::DType dtype = v1::DTYPE_BF16;
  std::vector<uint8_t> hidden;   // [N, D] of dtype
  std::vector<int32_t> targets;  // [N]
};

// Hidden states uniform with mean 0 and variance 1, targets uniform in [0, vocab_size). Thread-safe.
absl::StatusOr<HiddenRows> RandomRows(uint64_t rows, uint64_t hidden_size, uint64_t vocab_size,
                                      v1::DType dtype, uint64_t seed);

// RESOURCE_EXHAUSTED, naming `option`, if this machine has not enough memory to make the hidden states of
// `rows` rows and then to hold them `copies` times (for example once more for their gradients).
absl::Status CheckRoom(absl::string_view option, uint64_t rows, uint64_t hidden_size, v1::DType dtype,
                       int copies);

// FAILED_PRECONDITION if the head has a norm or a bias, because rows of real data mean nothing to such a
// head. Benchmarks use real rows because the cost of gradients depends on how peaked the softmax of the rows
// is (kernels/data).
absl::Status CheckTakesRealRows(const v1::HeadSpec& spec);

// Converts all of `rows` to `dtype`. Thread-safe.
absl::StatusOr<HiddenRows> MakeRealRows(const data::RealRows& rows, v1::DType dtype);

// Replaces the weight of `head` [V, D] by the weight that belongs to the rows, some thousand classes at a
// time.
absl::Status WriteRealWeight(const data::RealRows& rows, const std::string& head, client::Client& client);

// Memory of the host or of a GPU for the rows of a benchmark.
//
// Move-only; thread-compatible. Errors are those of client::internal::CudaDriver.
class RowBuffer {
 public:
  // Allocates on GPU `gpu` (the driver's number), uninitialized, or on the host (nullopt), zeroed. `bytes`
  // may be 0.
  static absl::StatusOr<RowBuffer> Create(uint64_t bytes, std::optional<int> gpu);
  // Allocates and copies the bytes into it.
  static absl::StatusOr<RowBuffer> Copy(absl::Span<const uint8_t> bytes, std::optional<int> gpu);
  RowBuffer(RowBuffer&& other) noexcept;
  RowBuffer& operator=(RowBuffer&&) = delete;
  ~RowBuffer();

  // Null if the size is 0.
  uint8_t* data() { return on_gpu_ != nullptr ? on_gpu_ : on_host_.empty() ? nullptr : on_host_.data(); }
  client::Memory memory() const { return gpu_.has_value() ? client::Memory::kDevice : client::Memory::kHost; }

 private:
  explicit RowBuffer(std::optional<int> gpu) : gpu_(gpu) {}

  std::optional<int> gpu_;
  uint8_t* on_gpu_ = nullptr;  // owned
  std::vector<uint8_t> on_host_;
};

// The GPU with this UUID ("GPU-..."). UNAVAILABLE if this process does not see it.
absl::StatusOr<int> FindGpu(const std::string& uuid);
// INVALID_ARGUMENT, naming `option`, unless this process sees a GPU with this number.
absl::Status CheckGpu(const std::string& option, int gpu);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_TENSORS_H_
