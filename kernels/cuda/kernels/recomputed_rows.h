// SPDX-License-Identifier: Apache-2.0
// Launchers of the row kernels of heads that recompute logits. The logits of a row come one block of classes
// after the other. LaunchFoldBlock adds each block to the statistics of the rows (RunningRow). After the last
// block, LaunchFinishRunning computes the results and the rules of the gradient (GradientRule). Then the
// logits of each block are computed again, and LaunchGradientBlock turns them into the gradient.
// docs/kernels/recomputed.md describes the whole path.
//
// All launchers enqueue on `stream`; all pointers are device memory. Stateless and thread-safe.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_RECOMPUTED_ROWS_H_
#define LOSSD_KERNELS_CUDA_KERNELS_RECOMPUTED_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/cuda/kernels/rows.h"

namespace lossd::kernels::cuda {

// A block of classes, [first_class, first_class + logits.classes), of some rows.
struct ClassBlock {
  LogitMatrix logits;    // fp32
  LogitMatrix gradient;  // in the compute dtype; InPlaceOf(logits), or packed
  int64_t first_class = 0;
};

// Adds a block of classes to the statistics running[r] of earlier blocks; if the block is the first, sets
// running[r]. `terms` and `in` are those of the whole vocabulary; `in` has target_dots.
cudaError_t LaunchFoldBlock(const ClassBlock& block, const LossTerms& terms, const RowInputs& in,
                            RunningRow* running, cudaStream_t stream);

// Computes row results and rules from the statistics of all blocks. `in` has target_dots. with_uniform:
// whether the rules include the uniform part of label smoothing.
cudaError_t LaunchFinishRunning(const LossTerms& terms, const RowInputs& in, DType compute,
                                const RowResults& out, const RunningRow* running, GradientRule* rules,
                                bool with_uniform, cudaStream_t stream);

// Makes the rules final: changes the rules of rows that must not add to any sum. Such rows are
// - rows whose loss is not finite,
// - rows that are accumulated but not kept (LaunchGuard),
// - padding rows, [rows, padded_rows).
//
// All of these rows get a gradient of 0. Rows of the first two kinds also get hidden states of 0.
struct SettleParams {
  GradientRule* rules = nullptr;  // [padded_rows]
  DeviceMatrix hidden;            // [rows]
  int64_t rows = 0;
  int64_t padded_rows = 0;
  const int32_t* accumulate = nullptr;  // [rows]
  const int32_t* keep = nullptr;        // [rows]
};
cudaError_t LaunchSettleRules(const SettleParams& params, cudaStream_t stream);

// Computes the gradient of a block from its logits: dL/ds divided by (scale * gradient unit), 0 in padding
// rows and columns. `terms` and `in` are as in LaunchFoldBlock(). rules: [padded_rows].
cudaError_t LaunchGradientBlock(const ClassBlock& block, const LossTerms& terms, const RowInputs& in,
                                const GradientRule* rules, cudaStream_t stream);
// The same, but classes with a probability below epsilon get 0, except the target. No row may have a gradient
// of its entropy.
struct BlockFilter {
  float epsilon = 0.0f;
  bool with_uniform = true;                // the elements include the uniform part of label smoothing
  const int32_t* with_gradient = nullptr;  // [rows]; other rows drop nothing
  float* dropped_mass = nullptr;           // out: [rows], of this block
};
cudaError_t LaunchFilteredBlock(const ClassBlock& block, const LossTerms& terms, const RowInputs& in,
                                const GradientRule* rules, const BlockFilter& filter, cudaStream_t stream);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_RECOMPUTED_ROWS_H_
