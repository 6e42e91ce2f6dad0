// SPDX-License-Identifier: Apache-2.0
// A chunk while it is being enqueued, as the ways of computing it (chunk_path.h) see it. Pointers are device
// memory of the chunk's slot unless said otherwise. Plain data.
#ifndef LOSSD_KERNELS_CUDA_PATHS_CHUNK_JOB_H_
#define LOSSD_KERNELS_CUDA_PATHS_CHUNK_JOB_H_

#include <cstdint>

#include "kernels/backend.h"
#include "kernels/cuda/device/class_exchange.h"
#include "kernels/cuda/device/device_branch.h"
#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/cuda/paths/chunk_layout.h"
#include "kernels/cuda/paths/chunk_plan.h"
#include "kernels/dtype.h"

namespace lossd::kernels::cuda {

struct ChunkJob {
  Chunk* chunk = nullptr;  // host memory
  ChunkLayout layout;
  ChunkPlan plan;

  // The loss of the compact rows.
  LossTerms terms;
  RowInputs in;
  RowResults out;
  const int32_t* accumulate = nullptr;     // [rows], 0: keep this row out of the accumulators
  const int32_t* with_gradient = nullptr;  // [rows], as in RowInputBlock
  float* dropped_mass = nullptr;           // [rows], out, of a chunk whose plan is filtered
  // Of a chunk whose plan is sampled.
  const float* omega = nullptr;       // [rows]
  float* variance = nullptr;          // [rows], out, over the gradient unit squared
  float* square = nullptr;            // [rows], likewise
  float* sample_threshold = nullptr;  // [1], out
  Decision* decision = nullptr;       // [1], out, of a chunk whose plan is not exact

  void* hidden = nullptr;  // x: [padded_rows, padded_hidden] compute dtype, after the norm
  // dx is wanted, or needed for the gradients of the norm. It goes to Region::kHiddenGradient in this dtype:
  // scale times W^T ds, with ds over (logit scale * gradient unit).
  bool wants_hidden_gradient = false;
  DType hidden_gradient_dtype = DType::kFloat32;
  float hidden_gradient_scale = 1.0f;
  // Whose dx is complete here: all, or, of a head that is split by vocabulary, a part of them.
  RowRange rows_here;                  // compact
  RowRange raw_rows_here;              // with those between and beside them that have no target
  bool direct = false;                 // dx is then as the client gets it
  float weight_gradient_scale = 1.0f;  // of dW and db, likewise

  // For choices that the device makes, in the first phase of the gradients and in the last. Host memory.
  DeviceBranch* loss_branch = nullptr;
  DeviceBranch* weight_branch = nullptr;

  // What dx in Region::kHiddenGradient is still to be multiplied by.
  float hidden_gradient_factor() const { return weight_gradient_scale / hidden_gradient_scale; }
  const LossOptions& options() const { return chunk->options; }
  int64_t rows() const { return layout.compact_rows; }
  int64_t padded_rows() const { return layout.padded_rows; }
  bool wants_gradient() const { return wants_hidden_gradient || layout.accumulate; }
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_CHUNK_JOB_H_
