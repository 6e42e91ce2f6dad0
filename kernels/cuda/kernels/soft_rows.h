// SPDX-License-Identifier: Apache-2.0
// Launchers of the kernels for rows with soft targets (kernels/soft_targets.h). The named classes of a row
// are few, so they are taken out of its logits before the sums over the other classes are formed, which keeps
// the probability of those precise however small it is; and their elements of the gradient are written
// afterwards:
//
//   LaunchTakeTargets    for each block of classes, before its statistics: logits of named classes, masked
//   LaunchNameRows       when all blocks have been seen: NamedRow, which LaunchFinishRunning needs
//   LaunchWriteTargets   for each block of classes, over the elements that its gradient kernel has written
//
// All enqueue on `stream`; pointers are device memory, but those of SoftRowInputs, `named` and `target_dots`
// may also be pinned memory of the host. Stateless and thread-safe.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_SOFT_ROWS_H_
#define LOSSD_KERNELS_CUDA_KERNELS_SOFT_ROWS_H_

#include <cuda_runtime_api.h>

#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/cuda/kernels/recomputed_rows.h"

namespace lossd::kernels::cuda {

// Reads the logits of named classes of the block into in.soft.logits; other entries stay, but those of the
// first block become 0. The dot products that are read become kMaskedDot, but for that of the target. With
// target_dots: the dot products of the targets, of a block that has all classes.
cudaError_t LaunchTakeTargets(const ClassBlock& block, const LossTerms& terms, const RowInputs& in,
                              DType compute, float* target_dots, cudaStream_t stream);

// named[r] from in.soft.logits of all classes. `in` has target_dots.
cudaError_t LaunchNameRows(const LossTerms& terms, const RowInputs& in, NamedRow* named, cudaStream_t stream);

// The elements of named classes in the gradient of the block, dL/ds over (scale * gradient unit), of rows
// whose rule is valid.
cudaError_t LaunchWriteTargets(const ClassBlock& block, const LossTerms& terms, const RowInputs& in,
                               const RowResults& out, const GradientRule* rules, cudaStream_t stream);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_SOFT_ROWS_H_
