// SPDX-License-Identifier: Apache-2.0
// Options of the CUDA backend (cuda_backend.h). Plain data. They have a header of their own because the plans
// of lossd_cuda_plan read them without CUDA.
#ifndef LOSSD_KERNELS_CUDA_CUDA_OPTIONS_H_
#define LOSSD_KERNELS_CUDA_CUDA_OPTIONS_H_

#include <cstdint>

#include "kernels/replica.h"

namespace lossd::kernels {

// When the loss is computed in the epilogue of the logits product, and the gradients by this library's own
// product kernels (docs/kernels/hopper.md).
enum class FusedLoss {
  kWhereFaster,
  kWherePossible,  // at any size: for tests
  kNever,
};

// Which work of a chunk takes precedence over work of other streams and, under MPS, of other programs on the
// GPU.
enum class StreamPriority {
  kHiddenGradients,  // the work that dL/dx needs; dL/dW takes turns with other work
  kAll,
  kNone,
};

struct CudaBackendOptions {
  int device = 0;   // index among the visible GPUs
  Replica replica;  // which replica of its heads the backend holds, in a group (kernels/group)
  // Workspace of each head. It bounds HeadKernels::chunk_rows(), which never goes below 8 rows. 0: 2220 MiB,
  // or a quarter of the device memory that is free when the backend is created, if that is less.
  int64_t workspace_bytes = 0;
  // Limit of the device memory in use; a head that would exceed it is refused. 0: only the device's memory
  // limits.
  int64_t memory_limit_bytes = 0;
  // Memory for the values of heads that live in host memory (kernels/teacher_pool.h). 0: as much as the
  // largest of these heads needs. The workspace that they share comes on top of it.
  int64_t teacher_pool_bytes = 0;
  // Host memory that must stay free for other programs. A head that lives in host memory is refused if its
  // values would take part of it.
  int64_t memory_reserve_bytes = int64_t{256} << 20;
  int64_t max_chunk_rows = 16384;  // upper bound of chunk_rows(), whatever the workspace allows
  // Whether a new head times the candidate GEMM algorithms (a second or so for a large head) instead of
  // taking cuBLAS's first choice. The choice, and with it the last bits of results, may then differ between
  // runs of the program. Ignored if `deterministic`.
  bool autotune = false;
  bool deterministic = true;
  FusedLoss fused_loss = FusedLoss::kWhereFaster;
  StreamPriority stream_priority = StreamPriority::kHiddenGradients;
  // Whether other code of the process uses the GPU too. If so, the backend leaves the way in which threads
  // wait for the GPU as that code has set it. The other code's work on the GPU may itself wait for a head. So
  // calls of this backend do not wait for work on the GPU, except those that
  // - free memory,
  // - make the backend (this loads the code of all kernels, kernel_code.h),
  // - make a head (this computes once each product that its chunks may consist of, Gemms::TakeSteps),
  // - compute a chunk with a teacher.
  bool shares_process = false;
  // Filtered chunks: the host waits for the device's decision and enqueues the work that was chosen, instead
  // of a graph that holds both choices. Slower; for checkers that do not follow conditional graphs.
  bool host_branches = false;
  // Logits::kRecomputed: blocks of 8 rows and 256 classes, even if larger ones would fit: for tests.
  bool smallest_blocks = false;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CUDA_CUDA_OPTIONS_H_
