// SPDX-License-Identifier: Apache-2.0
// What the gradient of a row with respect to its logits is at most, from the row's factors.
//
// The file is shorter than 60 lines because the guard and sampled gradients share this one formula.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_GRADIENT_FACTOR_CUH_
#define LOSSD_KERNELS_CUDA_KERNELS_GRADIENT_FACTOR_CUH_

#include <cstdint>

#include "kernels/cuda/kernels/row_loss_math.cuh"

namespace lossd::kernels::cuda {

// kappa of docs/math.md, over the gradient unit, of a row with this log-sum-exp.
__device__ __forceinline__ float GradientFactor(const LossTerms& terms, const RowInputs& in, int64_t row,
                                                float lse) {
  const float c = in.coef_loss[row];
  const int place = in.all_targets != nullptr ? in.all_targets[row] : in.targets[row];
  const float hard = ClassWeight(terms, place) * (1.0f - terms.smoothing);
  const float share = terms.smoothing / static_cast<float>(terms.vocab + terms.elsewhere);
  const float softmax =
      c * (hard + share * terms.class_weight_sum + 2.0f * terms.z_loss * lse) + in.coef_lse[row];
  return fabsf(softmax) + fabsf(in.coef_entropy[row]);
}

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_GRADIENT_FACTOR_CUH_
