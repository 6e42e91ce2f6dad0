// SPDX-License-Identifier: Apache-2.0
// Options of the CUDA backend (cuda_backend.h). Plain data. The file is shorter than 60 lines because the
// plans of lossd_cuda_plan read these options without CUDA.
#ifndef LOSSD_KERNELS_CUDA_CUDA_OPTIONS_H_
#define LOSSD_KERNELS_CUDA_CUDA_OPTIONS_H_

#include <cstdint>

#include "kernels/replica.h"

namespace lossd::kernels {

// When the loss is computed in the epilogue of the first product, and the gradients by products of our own
// (docs/kernels/hopper.md).
enum class FusedLoss {
  kWhereFaster,
  kWherePossible,  // whatever the size: for tests
  kNever,
};

// Which work of a chunk goes before that of other streams and, under MPS, of other programs on the GPU.
enum class StreamPriority {
  kHiddenGradients,  // what dL/dx needs; dL/dW takes turns with the others' work
  kAll,
  kNone,
};

struct CudaBackendOptions {
  int device = 0;   // index among the visible GPUs
  Replica replica;  // of the heads of a group (kernels/group)
  // Per head; bounds HeadKernels::chunk_rows() (never below 8 rows). 0: 2220 MiB, or a quarter of the
  // device memory that is free when the backend is created if that is less.
  int64_t workspace_bytes = 0;
  int64_t memory_limit_bytes = 0;  // refuse heads beyond it; 0: what the device has
  // For the values of heads that live in host memory (kernels/teacher_pool.h); 0: as the largest of them.
  // What their chunks work in comes on top of it, once.
  int64_t teacher_pool_bytes = 0;
  // Of the memory that the system can give, so much is left to others: values of heads that would take it are
  // refused.
  int64_t memory_reserve_bytes = int64_t{256} << 20;
  int64_t max_chunk_rows = 16384;  // upper bound of chunk_rows(), whatever the workspace
  // Time the candidate GEMM algorithms when a head is created instead of taking cuBLAS's first choice
  // (a second or so for a large head). The choice, and with it the last bits of results, may then
  // differ between runs of the program; ignored if `deterministic`.
  bool autotune = false;
  bool deterministic = true;
  FusedLoss fused_loss = FusedLoss::kWhereFaster;
  StreamPriority stream_priority = StreamPriority::kHiddenGradients;
  // Other code of the process works on the GPU too. How threads wait for the GPU stays as that code has it.
  // And since its work may wait for a head, no call of this backend waits for its work, but those that free
  // memory, make the backend (which loads the code of all kernels, kernel_code.h), or make a head (which
  // computes once what its chunks may consist of, Gemms::TakeSteps), or compute a chunk with a teacher.
  bool shares_process = false;
  // Filtered chunks: the host waits for the device's decision and enqueues what it asks for, instead of a
  // graph that holds both ways. Slower; for checkers that do not follow conditional graphs.
  bool host_branches = false;
  // Logits::kRecomputed: blocks of 8 rows and 256 classes, however many would fit: for tests.
  bool smallest_blocks = false;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CUDA_CUDA_OPTIONS_H_
