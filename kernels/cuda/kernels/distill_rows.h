// SPDX-License-Identifier: Apache-2.0
// Launchers of the kernels that compare rows with a teacher (docs/math.md, "Distillation"): fp32 logits of
// the same rows and classes of student and teacher in; the divergence of each row out, and its gradient.
//
// The classes of a row may lie on several devices. Each has a record of the classes here, and between the
// kernels the records of all devices are added up. In this order:
//
//   LaunchSoften, LaunchMergeSoftened       either softmax, of a KL divergence the divergence too
//   LaunchSumDivergence, LaunchAddDivergences   the sums of the other divergences (NeedsSums)
//   LaunchDivergenceGradient                if the loss with targets counts (MixesTargets)
//   the row loss kernels, which overwrite the logits if they write a gradient
//   LaunchFinishDivergence                  the row's loss and its gradient
//
// Where one device has all classes and the loss with targets does not count, LaunchWholeDivergence does all
// of that in one kernel, or LaunchKnownDivergence where the softmaxes are known already.
//
// All enqueue on `stream`; all pointers are device memory. Stateless and thread-safe.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_DISTILL_ROWS_H_
#define LOSSD_KERNELS_CUDA_KERNELS_DISTILL_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/device/device_limits.h"
#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/distillation.h"

namespace lossd::kernels::cuda {

// What the classes of one device, or of all, say of a row.
struct TaughtRecord {
  float student_top;  // about the largest z (distill_rows.cu); -infinity if all are
  float student_sum;  // of exp((z - top) / T)
  float teacher_top;
  float teacher_sum;
  float value;  // of the divergence; of a KL divergence before it is finished: distill_rows.cu
  float slope;  // the sum of f
};
static_assert(sizeof(TaughtRecord) <= sizeof(RowRecord), "records of rows have room for these");

// What is kept of rows between the kernels, [rows] each.
struct DivergenceRows {
  TaughtRecord* records = nullptr;
  // RowInputs::weights and coef_loss times the weight of the loss with targets: what the row loss kernel
  // takes.
  float* target_weights = nullptr;
  float* target_coefs = nullptr;
  float* factors = nullptr;  // kappa of docs/math.md, over the gradient unit

  static DivergenceRows Carve(Carver& carver, int64_t rows) {
    DivergenceRows of;
    of.records = carver.Take<TaughtRecord>(rows);
    of.target_weights = carver.Take<float>(rows);
    of.target_coefs = carver.Take<float>(rows);
    of.factors = carver.Take<float>(rows);
    return of;
  }
  DivergenceRows From(int64_t begin) const {
    return {records + begin, target_weights + begin, target_coefs + begin, factors + begin};
  }
};

// Whether a divergence has sums that need both softmaxes, LaunchSumDivergence; whether the loss with targets
// is a part of the loss.
inline bool NeedsSums(const Distillation& distillation) {
  return distillation.divergence == Divergence::kJensenShannon ||
         distillation.divergence == Divergence::kTotalVariation;
}
inline bool MixesTargets(const Distillation& distillation) { return distillation.target_weight != 0.0f; }

// `student` and `teacher`: W x of each, fp32; scale, bias and softcap are in the terms, and of the student
// what the loss with targets needs.
struct DivergenceParams {
  LogitMatrix student;
  LogitMatrix teacher;
  LossTerms student_terms;
  LossTerms teacher_terms;
  Distillation distillation;
  RowInputs in;
  RowResults out;
  DivergenceRows rows;
  float* divergence = nullptr;  // [rows], out, before its weight
  LogitMatrix gradient;         // in the compute dtype; data null: none is wanted
  // [rows, parts] of both heads at the temperature, or null: LaunchKnownDivergence takes them.
  const SoftmaxPart* student_parts = nullptr;
  const SoftmaxPart* teacher_parts = nullptr;
  int parts = 0;
  // Some row's log p of the target is a result. Else, where the loss with targets does not count, one that is
  // infinite becomes 0, and is no reason to refuse the row.
  bool wants_logprob = true;
};
// Records of the classes here; and target_weights, target_coefs.
cudaError_t LaunchSoften(const DivergenceParams& params, cudaStream_t stream);
// Adds the value and the slope of the classes here to the records, which are of all classes.
cudaError_t LaunchSumDivergence(const DivergenceParams& params, cudaStream_t stream);
// The teacher's logits of a row become dD/ds of the student without its logit scale, where D is finite.
cudaError_t LaunchDivergenceGradient(const DivergenceParams& params, cudaStream_t stream);
// Adds to the losses and, where gradient.data is not null, to the gradient that the row loss kernel has
// written with target_weights and target_coefs. Without MixesTargets that has written none, and the logits of
// both heads are as they were. A row whose loss is not finite then has a gradient of 0. Also factors.
cudaError_t LaunchFinishDivergence(const DivergenceParams& params, cudaStream_t stream);

// Row results, divergence, factors and gradient of rows of which all classes are here, without MixesTargets.
// Nothing is taken from `rows` but factors. The student's logits are left as they are.
cudaError_t LaunchWholeDivergence(const DivergenceParams& params, cudaStream_t stream);

// The same of a forward KL divergence whose softmaxes are known from parts of them: each logit is read once.
cudaError_t LaunchKnownDivergence(const DivergenceParams& params, cudaStream_t stream);

// From the records `all` [parts, rows] of as many devices, added up in their order: those of all classes, and
// their value and slope alone.
struct MergeTaughtParams {
  Distillation distillation;
  const TaughtRecord* all = nullptr;
  int parts = 1;
  int64_t rows = 0;
  TaughtRecord* records = nullptr;  // [rows], out
};
cudaError_t LaunchMergeSoftened(const MergeTaughtParams& params, cudaStream_t stream);
cudaError_t LaunchAddDivergences(const MergeTaughtParams& params, cudaStream_t stream);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_DISTILL_ROWS_H_
