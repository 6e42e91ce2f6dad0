// Retained hidden states of the CUDA backend: device memory. Thread-compatible.
#ifndef LOSSD_KERNELS_CUDA_DEVICE_CUDA_RETAINED_H_
#define LOSSD_KERNELS_CUDA_DEVICE_CUDA_RETAINED_H_

#include <cstdint>
#include <utility>

#include "kernels/backend.h"
#include "kernels/cuda/device/device_memory.h"

namespace lossd::kernels::cuda {

class CudaRetained final : public RetainedMemory {
 public:
  // `bytes` of the buffer are used; it may be longer.
  CudaRetained(DeviceBuffer buffer, int64_t bytes) : buffer_(std::move(buffer)), bytes_(bytes) {}

  int64_t size() const override { return bytes_; }
  uint8_t* data() const { return buffer_.data(); }  // on the device

 private:
  const DeviceBuffer buffer_;
  const int64_t bytes_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DEVICE_CUDA_RETAINED_H_
