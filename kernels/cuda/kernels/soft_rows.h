// SPDX-License-Identifier: Apache-2.0
// Launchers of the kernels for rows with soft targets (kernels/soft_targets.h). Each row names few classes,
// its named classes. It also has a target, like other rows: the loss does not depend on it, but log p of the
// target is a result. The target may be one of the named classes. The kernels take the named classes out of
// the row's logits before the sums over the other classes are computed, so that the probability of the other
// classes is precise, however small it is. Afterwards they write the gradient's elements of the named
// classes:
//
//   LaunchTakeTargets    for each block of classes, before its statistics: takes and masks the named logits
//   LaunchNameRows       after all blocks: computes NamedRow, which LaunchFinishRunning needs
//   LaunchWriteTargets   for each block of classes, over the elements that its gradient kernel has written
//
// All launchers enqueue on `stream`. Pointers are to device memory; `named`, `target_dots` and the pointers
// in SoftRowInputs may also be to pinned host memory. Stateless and thread-safe.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_SOFT_ROWS_H_
#define LOSSD_KERNELS_CUDA_KERNELS_SOFT_ROWS_H_

#include <cuda_runtime_api.h>

#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/cuda/kernels/recomputed_rows.h"

namespace lossd::kernels::cuda {

// Copies the logits of the block's named classes into in.soft.logits. The other entries of in.soft.logits do
// not change; the first block sets them to 0. Replaces the dot products of the named classes by kMaskedDot,
// but not the dot product of the target. If target_dots is not null, writes the dot products of the targets
// there; the block must then have all classes.
cudaError_t LaunchTakeTargets(const ClassBlock& block, const LossTerms& terms, const RowInputs& in,
                              DType compute, float* target_dots, cudaStream_t stream);

// Computes named[r] from in.soft.logits of all classes. `in` has target_dots.
cudaError_t LaunchNameRows(const LossTerms& terms, const RowInputs& in, NamedRow* named, cudaStream_t stream);

// Writes the elements of named classes in the gradient of the block, dL/ds divided by (scale * gradient
// unit), for rows whose rule is valid.
cudaError_t LaunchWriteTargets(const ClassBlock& block, const LossTerms& terms, const RowInputs& in,
                               const RowResults& out, const GradientRule* rules, cudaStream_t stream);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_SOFT_ROWS_H_
