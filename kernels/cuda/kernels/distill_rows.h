// SPDX-License-Identifier: Apache-2.0
// Launchers of the kernels that compare rows with a teacher (docs/math.md, "Distillation"): fp32 logits of
// the same rows of student and teacher in, the divergence of each row out, with its gradient in the place of
// the teacher's logits; and the kernel that adds it to what the row loss kernel has made of the student's
// logits.
//
// All enqueue on `stream`; all pointers are device memory. Stateless and thread-safe.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_DISTILL_ROWS_H_
#define LOSSD_KERNELS_CUDA_KERNELS_DISTILL_ROWS_H_

#include <cuda_runtime_api.h>

#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/distillation.h"

namespace lossd::kernels::cuda {

// What is kept of rows between the two kernels, [rows] each.
struct DivergenceRows {
  float* divergence = nullptr;  // before its weight
  // RowInputs::weights and coef_loss times the weight of the loss with targets: what the row loss kernel
  // takes.
  float* target_weights = nullptr;
  float* target_coefs = nullptr;

  DivergenceRows From(int64_t begin) const {
    return {divergence + begin, target_weights + begin, target_coefs + begin};
  }
};

// The first kernel. `student` and `teacher`: W x of each, fp32; scale, bias and softcap are in the terms, of
// which nothing else is used. With want_gradient the teacher's logits of a row become dD/ds of the student
// without its logit scale, where D is finite.
struct DivergenceParams {
  LogitMatrix student;
  LogitMatrix teacher;
  LossTerms student_terms;
  LossTerms teacher_terms;
  Distillation distillation;
  RowInputs in;
  DivergenceRows rows;
  bool want_gradient = false;
};
cudaError_t LaunchDivergence(const DivergenceParams& params, cudaStream_t stream);

// The second. Adds to the losses and, where gradient.data is not null, to the gradient that LaunchRowLoss has
// written with target_weights and target_coefs; a row whose loss is not finite then has a gradient of 0.
struct MixDivergenceParams {
  LogitMatrix gradient;  // in the compute dtype
  LogitMatrix teacher;   // as the first kernel left it
  Distillation distillation;
  RowInputs in;  // as the first kernel had it
  RowResults out;
  DivergenceRows rows;
  // Some row's log p of the target is a result. Else, where the loss with targets does not count, one that is
  // infinite becomes 0, and is no reason to refuse the row.
  bool wants_logprob = true;
};
cudaError_t LaunchMixDivergence(const MixDivergenceParams& params, cudaStream_t stream);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_DISTILL_ROWS_H_
