// SPDX-License-Identifier: Apache-2.0
#include "client/cli/row_buffer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/cuda_driver.h"
#include "kernels/errors/field_error.h"

namespace lossd::cli {

using client::internal::CudaDriver;

absl::StatusOr<RowBuffer> RowBuffer::Create(uint64_t bytes, std::optional<int> gpu) {
  RowBuffer buffer(gpu);
  if (bytes == 0) return buffer;
  if (!gpu.has_value()) {
    buffer.on_host_.resize(bytes);
    return buffer;
  }
  const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get();
  if (!driver.ok()) return driver.status();
  const absl::StatusOr<uint8_t*> memory = (*driver)->Allocate(bytes, *gpu);
  if (!memory.ok()) return memory.status();
  buffer.on_gpu_ = *memory;
  return buffer;
}

absl::StatusOr<RowBuffer> RowBuffer::Copy(absl::Span<const uint8_t> bytes, std::optional<int> gpu) {
  absl::StatusOr<RowBuffer> buffer = Create(bytes.size(), gpu);
  if (!buffer.ok()) return buffer.status();
  absl::Status copied = client::internal::CopyBytes(buffer->data(), bytes.data(), bytes.size(), gpu);
  if (!copied.ok()) return copied;
  return buffer;
}

RowBuffer::RowBuffer(RowBuffer&& other) noexcept
    : gpu_(other.gpu_), on_gpu_(std::exchange(other.on_gpu_, nullptr)), on_host_(std::move(other.on_host_)) {}

RowBuffer::~RowBuffer() {
  if (on_gpu_ == nullptr) return;
  if (const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get(); driver.ok())
    (*driver)->Free(on_gpu_, *gpu_);
}

absl::StatusOr<int> FindGpu(const std::string& uuid) {
  const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get();
  if (!driver.ok()) return driver.status();
  const absl::StatusOr<std::optional<int>> gpu = (*driver)->Find(uuid);
  if (!gpu.ok()) return gpu.status();
  if (!gpu->has_value())
    return absl::UnavailableError(absl::StrCat("this process does not see the server's GPU ", uuid));
  return **gpu;
}

absl::Status CheckGpu(const std::string& option, int gpu) {
  const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get();
  if (!driver.ok()) return driver.status();
  const absl::StatusOr<int> count = (*driver)->Count();
  if (!count.ok()) return count.status();
  if (gpu >= 0 && gpu < *count) return absl::OkStatus();
  return errors::FieldError(option, absl::StrCat("be below the number of GPUs that are visible, ", *count),
                            gpu);
}

}  // namespace lossd::cli
