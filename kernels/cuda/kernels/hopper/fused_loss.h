// SPDX-License-Identifier: Apache-2.0
// The fused loss on Hopper: the logits product of a chunk, with the loss in its epilogue
// (docs/kernels/hopper.md).
//
// `clusters` is the number of clusters that a launch uses, at most LogitPassClusters(). Enqueues on `stream`;
// all pointers are device memory unless said otherwise. Stateless and thread-safe.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_FUSED_LOSS_H_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_FUSED_LOSS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/kernels/hopper/fused_rows.h"
#include "kernels/cuda/kernels/hopper/plan.h"
#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda::hopper {

// The operands of the logits product: hidden states and classes.
struct FusedOperands {
  const void* hidden = nullptr;  // [padded_rows, inner]
  const void* weight = nullptr;  // [padded_classes, inner]
  DType dtype = DType::kBFloat16;
  int64_t inner = 0;           // a multiple of 8
  int64_t padded_classes = 0;  // a multiple of 8
};

struct FusedLossParams {
  FusedOperands operands;  // of all classes
  LossTerms terms;
  RowInputs in;  // with target_dots
  RowResults out;
  FusedRows rows;
  const ClusterOrder* order = nullptr;  // the device's order; host memory, or null
};

// Computes row results.
cudaError_t LaunchFusedResults(const FusedLossParams& params, int clusters, cudaStream_t stream);
// Computes row results and exponentials [padded_rows, padded_classes] bf16: row r times rows.factor[r] is
// dL/ds divided by (scale * gradient unit). They are 0 in padding columns and in rows whose loss is not
// finite.
cudaError_t LaunchFusedExponentials(const FusedLossParams& params, void* exponentials, int clusters,
                                    cudaStream_t stream);
// Computes row results, and the gradient rules of the rows, [rows], for LaunchFusedGradient().
cudaError_t LaunchFusedRules(const FusedLossParams& params, GradientRule* rules, int clusters,
                             cudaStream_t stream);
// The same computations in two steps, for a head that is split by vocabulary. LaunchFusedSums computes the
// sums of the rows and, unless `exponentials` is null, the exponentials. Then the caller adds the sums over
// classes on other devices (split_rows.h). LaunchFusedFinish computes row results and, if it is not null,
// `rules` or `exponentials`; at least one of the two must be null.
cudaError_t LaunchFusedSums(const FusedLossParams& params, void* exponentials, int clusters,
                            cudaStream_t stream);
cudaError_t LaunchFusedFinish(const FusedLossParams& params, void* exponentials, GradientRule* rules,
                              cudaStream_t stream);
// Computes row results, and lists of candidates. The lists of all rows are complete, except those of rows
// with too many candidates.
cudaError_t LaunchFusedCandidates(const FusedLossParams& params, const CandidateLists& lists, int clusters,
                                  cudaStream_t stream);

// The gradient of a block of classes, for rows whose rules are known.
struct FusedGradientParams {
  FusedOperands operands;  // for the classes [first_class, first_class + classes)
  LossTerms terms;         // of all classes
  RowInputs in;
  const GradientRule* rules = nullptr;  // [padded_rows]
  int64_t first_class = 0;
  int64_t classes = 0;
  // [padded_rows, padded_classes] of the operands' dtype, out: dL/ds divided by (scale * gradient unit), 0 in
  // padding columns.
  void* gradient = nullptr;
};
cudaError_t LaunchFusedGradient(const FusedGradientParams& params, int clusters, cudaStream_t stream);

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_FUSED_LOSS_H_
