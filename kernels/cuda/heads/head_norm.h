// SPDX-License-Identifier: Apache-2.0
// The norm of a head's hidden states, before the loss of a chunk and after its hidden gradients; for heads
// that have one. Enqueues on the device's compute stream. Driven by the backend's thread.
#ifndef LOSSD_KERNELS_CUDA_HEADS_HEAD_NORM_H_
#define LOSSD_KERNELS_CUDA_HEADS_HEAD_NORM_H_

#include "absl/status/status.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/heads/head_memory.h"
#include "kernels/cuda/heads/head_tensors.h"
#include "kernels/cuda/heads/row_transfers.h"
#include "kernels/cuda/kernels/norm/norm.h"
#include "kernels/cuda/paths/chunk_path.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

class HeadNorm {
 public:
  // `device`, `tensors` and `link` outlive it; `workspace` is of the head.
  HeadNorm(Device* device, const HeadConfig& config, const HeadSizes& sizes, const Workspace& workspace,
           HeadTensors* tensors, const ClassLink* link)
      : device_(device),
        config_(config),
        sizes_(sizes),
        workspace_(workspace),
        tensors_(tensors),
        link_(link) {}

  bool exists() const { return config_.norm != Norm::kNone; }
  // The kernels of a chunk's norm, as the launches will choose them.
  void Plan(const ChunkFacts& chunk, DType hidden_dtype, ChunkPlan& plan) const;
  // job.hidden from the raw rows of the slot; padding rows become 0.
  absl::Status Forward(const ChunkJob& job, const ChunkSlot& slot) const;
  // dL/dx in place of the raw rows, where it is wanted, and the gradients of the norm's parameters, from
  // Region::kHiddenGradient, of job.rows_here.
  absl::Status Backward(const ChunkJob& job, const ChunkSlot& slot) const;

 private:
  // y: the compact matrix that is written (forward), or the gradient that is read.
  NormParams ParamsOf(const ChunkJob& job, const ChunkSlot& slot, const DeviceMatrix& y) const;
  DeviceMatrix RawRows(const ChunkJob& job, const ChunkSlot& slot) const;

  Device* const device_;
  const HeadConfig config_;
  const HeadSizes sizes_;
  const Workspace workspace_;
  HeadTensors* const tensors_;
  const ClassLink* const link_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_HEADS_HEAD_NORM_H_
