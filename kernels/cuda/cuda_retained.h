// Retained hidden states of the CUDA backend: device memory. Thread-compatible.
#ifndef LOSSD_KERNELS_CUDA_CUDA_RETAINED_H_
#define LOSSD_KERNELS_CUDA_CUDA_RETAINED_H_

#include <cstdint>
#include <utility>

#include "kernels/backend.h"
#include "kernels/cuda/device_memory.h"

namespace lossd::kernels::cuda {

class CudaRetained final : public RetainedMemory {
 public:
  explicit CudaRetained(DeviceBuffer buffer) : buffer_(std::move(buffer)) {}

  int64_t size() const override { return buffer_.bytes(); }
  uint8_t* data() const { return buffer_.data(); }  // on the device

 private:
  const DeviceBuffer buffer_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_CUDA_RETAINED_H_
