// SPDX-License-Identifier: Apache-2.0
// Memory of a GPU that other processes can import by a file descriptor (the driver's virtual memory
// management).
#ifndef LOSSD_KERNELS_CUDA_DEVICE_SHARED_DEVICE_MEMORY_H_
#define LOSSD_KERNELS_CUDA_DEVICE_SHARED_DEVICE_MEMORY_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/cuda/device/device.h"

namespace lossd::kernels::cuda {

// Implements Backend::ShareDeviceMemory. `device` outlives the result. Thread-safe.
absl::StatusOr<std::unique_ptr<SharedDeviceMemory>> ShareDeviceMemory(Device* device, int64_t bytes);

// Implements Backend::ReachDeviceMemory, for memory that ShareDeviceMemory allocated on another device of
// this process. Thread-safe.
absl::Status ReachDeviceMemory(Device* device, absl::Span<uint8_t> memory);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DEVICE_SHARED_DEVICE_MEMORY_H_
