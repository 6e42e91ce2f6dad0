// SPDX-License-Identifier: Apache-2.0
// The functions of cuda_driver.h that do without a GPU where rows are the host's. It is shorter than 60 lines
// because cuda_driver.cc has all other functions, which need a GPU.
#include <cstring>

#include "client/cpp/cuda_driver.h"

namespace lossd::client::internal {

bool LetReach(uint8_t* address, uint64_t bytes, int owner, int other) {
  const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get();
  return driver.ok() && (*driver)->LetReach(address, bytes, owner, other);
}

absl::Status CopyBytes(void* to, const void* from, uint64_t bytes, std::optional<int> gpu,
                       const StreamPoint* after) {
  if (!gpu.has_value()) {
    if (bytes > 0) std::memcpy(to, from, bytes);
    return absl::OkStatus();
  }
  const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get();
  return driver.ok() ? (*driver)->Copy(to, from, bytes, *gpu, after) : driver.status();
}

absl::Status FillZeros(void* to, uint64_t bytes, std::optional<int> gpu, const StreamPoint* after) {
  if (!gpu.has_value()) {
    if (bytes > 0) std::memset(to, 0, bytes);
    return absl::OkStatus();
  }
  const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get();
  return driver.ok() ? (*driver)->FillZeros(to, bytes, *gpu, after) : driver.status();
}

}  // namespace lossd::client::internal
