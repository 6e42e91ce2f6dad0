// SPDX-License-Identifier: Apache-2.0
// Memory for rows of a benchmark, of the host or of a GPU.
//
// Move-only; thread-compatible. Errors are those of client::internal::CudaDriver.
#ifndef LOSSD_CLIENT_CLI_ROW_BUFFER_H_
#define LOSSD_CLIENT_CLI_ROW_BUFFER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/client.h"

namespace lossd::cli {

class RowBuffer {
 public:
  // Uninitialised on a GPU (the driver's number), zeros on the host (nullopt). `bytes` may be 0.
  static absl::StatusOr<RowBuffer> Create(uint64_t bytes, std::optional<int> gpu);
  // With these bytes in it.
  static absl::StatusOr<RowBuffer> Copy(absl::Span<const uint8_t> bytes, std::optional<int> gpu);
  RowBuffer(RowBuffer&& other) noexcept;
  RowBuffer& operator=(RowBuffer&&) = delete;
  ~RowBuffer();

  // Null if it has no bytes.
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

#endif  // LOSSD_CLIENT_CLI_ROW_BUFFER_H_
