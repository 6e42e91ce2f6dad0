// SPDX-License-Identifier: Apache-2.0
// HostTensors: the tensors of a head that lives in host memory. They are in pinned memory, with the same
// layout as on the device, so that one copy brings them to the device. The weight is rounded to the compute
// dtype when it is written (to nearest even, as on the device); bias, norm and class weights are fp32.
//
// Called by the backend's driving thread while no copy to the device is under way.
#ifndef LOSSD_KERNELS_CUDA_HEADS_HOST_TENSORS_H_
#define LOSSD_KERNELS_CUDA_HEADS_HOST_TENSORS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/heads/head_memory.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

class HostTensors {
 public:
  HostTensors(const HeadConfig& config, const HeadSizes& sizes) : config_(config), sizes_(sizes) {}

  // Allocates zeros, except norm gain and class weights, which are 1. RESOURCE_EXHAUSTED if the host has too
  // little memory.
  absl::Status Allocate(MemoryLedger* ledger);

  // As ReadTensor and WriteTensor of HeadKernels, for values. The caller has checked the arguments.
  void Read(Param param, int64_t row_begin, int64_t rows, DType dtype, absl::Span<uint8_t> out) const;
  void Write(Param param, int64_t row_begin, int64_t rows, DType dtype, absl::Span<const uint8_t> in);

  const uint8_t* data() const { return buffer_.data(); }
  const float* class_weights() const { return values_.class_weights; }  // [vocab_size] or null

 private:
  // Where a tensor lies from row `row_begin` on.
  struct Place {
    uint8_t* data = nullptr;
    DType dtype = DType::kFloat32;
    int64_t row_bytes = 0;  // from one row to the next
  };
  Place Find(Param param, int64_t row_begin) const;

  const HeadConfig config_;
  const HeadSizes sizes_;
  PinnedBuffer buffer_;
  ValueBuffer values_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_HEADS_HOST_TENSORS_H_
