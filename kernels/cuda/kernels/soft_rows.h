// SPDX-License-Identifier: Apache-2.0
// Launchers of the kernels for rows with soft targets (kernels/soft_targets.h). A row names few classes.
// These are taken out of its logits before the sums over the other classes are computed, so that the
// probability of the other classes is precise however small it is. The gradient's elements of the named
// classes are written afterwards:
//
//   LaunchTakeTargets    for each block of classes, before its statistics: takes and masks the named logits
//   LaunchNameRows       after all blocks: computes NamedRow, which LaunchFinishRunning needs
//   LaunchWriteTargets   for each block of classes, over the elements that its gradient kernel has written
//
// All enqueue on `stream`. Pointers are device memory; those of SoftRowInputs, `named` and `target_dots` may
// also be pinned host memory. Stateless and thread-safe.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_SOFT_ROWS_H_
#define LOSSD_KERNELS_CUDA_KERNELS_SOFT_ROWS_H_

#include <cuda_runtime_api.h>

#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/cuda/kernels/recomputed_rows.h"

namespace lossd::kernels::cuda {

// Copies the logits of the named classes of the block into in.soft.logits. Other entries stay; with the first
// block they become 0. The dot products of these classes become kMaskedDot, except that of the target.
// target_dots, if not null, gets the dot products of the targets; the block must then have all classes.
cudaError_t LaunchTakeTargets(const ClassBlock& block, const LossTerms& terms, const RowInputs& in,
                              DType compute, float* target_dots, cudaStream_t stream);

// Computes named[r] from in.soft.logits of all classes. `in` has target_dots.
cudaError_t LaunchNameRows(const LossTerms& terms, const RowInputs& in, NamedRow* named, cudaStream_t stream);

// Writes the elements of named classes in the gradient of the block, dL/ds over (scale * gradient unit), for
// rows whose rule is valid.
cudaError_t LaunchWriteTargets(const ClassBlock& block, const LossTerms& terms, const RowInputs& in,
                               const RowResults& out, const GradientRule* rules, cudaStream_t stream);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_SOFT_ROWS_H_
