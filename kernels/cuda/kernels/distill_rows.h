// SPDX-License-Identifier: Apache-2.0
// Launchers of the kernels that compare rows with a teacher (docs/math.md, "Distillation"). Input: fp32
// logits of student and teacher, for the same rows and classes. Output: the divergence of each row, and its
// gradient.
//
// The classes of a row may lie on several devices. Each device has, for each row, a record of its own classes
// (TaughtRecord). Between the kernels, the records of all devices are added up. The launchers are called in
// this order:
//
//   LaunchSoften, LaunchMergeSoftened          both softmaxes; for a KL divergence also the divergence
//   LaunchSumDivergence, LaunchAddDivergences  sums of the other divergences (if NeedsSums)
//   LaunchDivergenceGradient                   if the loss with targets counts (MixesTargets)
//   the row loss kernels                       they overwrite the logits if they write a gradient
//   LaunchFinishDivergence                     the row's loss and its gradient
//
// "The loss with targets" is the usual loss of a row, by its target. A head may add it, with a weight, to the
// divergence from the teacher. If its weight is 0, it does not count.
//
// If one device has all classes and the loss with targets does not count, one kernel does all of this:
// LaunchWholeDivergence, or LaunchKnownDivergence if the softmaxes are already known.
//
// All launchers enqueue on `stream`; all pointers are device memory. Stateless and thread-safe.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_DISTILL_ROWS_H_
#define LOSSD_KERNELS_CUDA_KERNELS_DISTILL_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/device/device_limits.h"
#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/distillation.h"

namespace lossd::kernels::cuda {

// Sums of a row over the classes of one device, or over all classes. z is a logit and T the temperature; f is
// the f of docs/math.md.
struct TaughtRecord {
  float student_top;  // about the largest z (distill_rows.cu); -infinity if all z are
  float student_sum;  // of exp((z - top) / T)
  float teacher_top;
  float teacher_sum;
  float value;  // of the divergence; for a KL divergence, C of distill_rows.cu, from which it follows
  float slope;  // the sum of f
};
static_assert(sizeof(TaughtRecord) <= sizeof(RowRecord), "records of rows have room for these");

// What the kernels keep of rows between launches, [rows] each.
struct DivergenceRows {
  TaughtRecord* records = nullptr;
  // RowInputs::weights and RowInputs::coef_loss, each times the weight of the loss with targets. They are
  // inputs of the row loss kernel.
  float* target_weights = nullptr;
  float* target_coefs = nullptr;
  float* factors = nullptr;  // kappa of docs/math.md, divided by the gradient unit; output

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

// NeedsSums: whether the divergence is a sum that can be computed only when both softmaxes are known
// (LaunchSumDivergence). MixesTargets: whether the loss with targets is part of the loss.
inline bool NeedsSums(const Distillation& distillation) {
  return distillation.divergence == Divergence::kJensenShannon ||
         distillation.divergence == Divergence::kTotalVariation;
}
inline bool MixesTargets(const Distillation& distillation) { return distillation.target_weight != 0.0f; }

// `student` and `teacher` are W x of each head, in fp32. Both terms have scale, bias and softcap;
// student_terms also has the other members that the loss with targets needs.
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
  LogitMatrix gradient;         // in the compute dtype; data null: not wanted
  // Only for LaunchKnownDivergence, else null: the softmaxes of both heads at the temperature, [rows, parts]
  // each.
  const SoftmaxPart* student_parts = nullptr;
  const SoftmaxPart* teacher_parts = nullptr;
  int parts = 0;
  // Whether the log p of some row's target is a result. If it is not, and the loss with targets does not
  // count either, an infinite log p becomes 0, so the row does not fail because of it.
  bool wants_logprob = true;
};
// Writes the records of the classes here, target_weights and target_coefs.
cudaError_t LaunchSoften(const DivergenceParams& params, cudaStream_t stream);
// Writes value and slope of the classes here to the records. The other members of the records must already
// have the sums over all classes.
cudaError_t LaunchSumDivergence(const DivergenceParams& params, cudaStream_t stream);
// If the divergence D of a row is finite, replaces the teacher's logits of the row by dD/ds of the student,
// without the student's logit scale.
cudaError_t LaunchDivergenceGradient(const DivergenceParams& params, cudaStream_t stream);
// Adds the divergence to the losses, and to the gradient if gradient.data is not null. With MixesTargets, the
// row loss kernel has already written the gradient of the loss with targets to `gradient`, with
// target_weights and target_coefs. Without MixesTargets, `gradient` has not been written, and the logits of
// both heads are unchanged. A row whose loss is not finite gets a gradient of 0. Also writes factors.
cudaError_t LaunchFinishDivergence(const DivergenceParams& params, cudaStream_t stream);

// Does all steps at once, if all classes are here and MixesTargets is false: computes row results,
// divergence, factors and gradient. Of `rows` it uses only factors. The student's logits do not change.
cudaError_t LaunchWholeDivergence(const DivergenceParams& params, cudaStream_t stream);

// The same for a forward KL divergence whose softmaxes are known in parts. It reads each logit once.
cudaError_t LaunchKnownDivergence(const DivergenceParams& params, cudaStream_t stream);

// Both functions add up the records `all` [parts, rows] of all devices, in the order of the devices.
// LaunchMergeSoftened writes complete records, LaunchAddDivergences only their value and slope.
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
