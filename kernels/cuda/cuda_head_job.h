// A chunk of a CudaHead while it is being enqueued; shared by the files that implement the head.
#ifndef LOSSD_KERNELS_CUDA_CUDA_HEAD_JOB_H_
#define LOSSD_KERNELS_CUDA_CUDA_HEAD_JOB_H_

#include "kernels/cuda/chunk_plan.h"
#include "kernels/cuda/cuda_head.h"

namespace lossd::kernels::cuda {

struct CudaHead::Job {
  Chunk* chunk = nullptr;
  int slot_index = 0;
  Slot* slot = nullptr;  // null: nothing to do on the device
  SlotMemory memory;
  ChunkLayout layout;
  bool hidden_gemm = false;  // dx is wanted, or needed for the norm's parameters
  bool direct = false;       // dx leaves the GEMM as the client gets it, but for row factors
  // If the loss is fused, logits are left as exponentials that lack their row's factor, but for
  // Algorithm::kCut.
  ChunkPlan plan;
  CutBlocks blocks;  // Algorithm::kCut, likewise below: of the exact gradients
  FilterBlock filter_block;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_CUDA_HEAD_JOB_H_
