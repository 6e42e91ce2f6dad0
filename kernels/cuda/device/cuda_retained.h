// SPDX-License-Identifier: Apache-2.0
// Retained hidden states of the CUDA backend: device memory. Thread-compatible; HostBytes is thread-safe.
#ifndef LOSSD_KERNELS_CUDA_DEVICE_CUDA_RETAINED_H_
#define LOSSD_KERNELS_CUDA_DEVICE_CUDA_RETAINED_H_

#include <cstdint>
#include <utility>

#include "kernels/backend.h"
#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/device/device_memory.h"
#include "kernels/host_bytes.h"

namespace lossd::kernels::cuda {

class CudaRetained final : public RetainedMemory, public HostBytes {
 public:
  // `bytes` of the buffer, which lies on GPU `device`, are used; it may be longer.
  CudaRetained(int device, DeviceBuffer buffer, int64_t bytes)
      : device_(device), buffer_(std::move(buffer)), bytes_(bytes) {}

  int64_t size() const override { return bytes_; }
  uint8_t* data() const { return buffer_.data(); }  // on the device
  absl::Status ReadBytes(int64_t offset, absl::Span<uint8_t> out) const override {
    LOSSD_RETURN_IF_CUDA_ERROR(cudaSetDevice(device_), "cudaSetDevice");
    return ToStatus(cudaMemcpy(out.data(), data() + offset, out.size(), cudaMemcpyDeviceToHost),
                    "cudaMemcpy");
  }
  absl::Status WriteBytes(int64_t offset, absl::Span<const uint8_t> in) override {
    LOSSD_RETURN_IF_CUDA_ERROR(cudaSetDevice(device_), "cudaSetDevice");
    LOSSD_RETURN_IF_CUDA_ERROR(
        cudaMemcpyAsync(data() + offset, in.data(), in.size(), cudaMemcpyHostToDevice, cudaStreamPerThread),
        "cudaMemcpyAsync");
    return ToStatus(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize");
  }

 private:
  const int device_;
  const DeviceBuffer buffer_;
  const int64_t bytes_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DEVICE_CUDA_RETAINED_H_
