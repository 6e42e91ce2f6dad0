// SPDX-License-Identifier: Apache-2.0
// The formulas that the row kernels share: from a dot product to a logit, from the sums over a row to its
// loss, and from there to the factors of its gradient. row_loss.cu explains the formulas.
//
// A row passes through these types in this order: its dot products become logits (LogitMap), the logits
// become sums without the target (Stats), the target is added (Finish...: RowResult), and MakeRule computes
// the factors of the gradient (GradientRule).
//
// The template parameter kGeneral says whether the loss has a bias, softcap, class weights, smoothing or
// entropy (LossTerms::IsGeneral). If not, z f is not computed explicitly (row_loss.cu).
#ifndef LOSSD_KERNELS_CUDA_KERNELS_ROW_LOSS_MATH_CUH_
#define LOSSD_KERNELS_CUDA_KERNELS_ROW_LOSS_MATH_CUH_

#include <cstdint>

#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/loss_rows.h"

namespace lossd::kernels::cuda {

// Running statistics of a part of a row, without the target (row_loss.cu says why). u is the class weight.
struct Stats {
  float max;       // of z
  float sum;       // of 2^(z f - M), M = Reference(max, f)
  float spread;    // of 2^(z f - M) (z f - M)
  float weighted;  // of u (z - z_y)
  int32_t arg;     // the smallest class that has max
};

__device__ __forceinline__ Stats NoStats() { return {NegativeInfinity(), 0.0f, 0.0f, 0.0f, INT32_MAX}; }

// The reference of exponents when the largest z is `max`. A maximum of -inf means that no logit has been
// added yet (or only NaN, which stays in the sum).
__device__ __forceinline__ float Reference(float max, float f) {
  return max == NegativeInfinity() ? 0.0f : max * f;
}

// Makes the sums of `s` relative to `max`, which is at least s.max.
__device__ __forceinline__ void Rebase(Stats& s, float max, float f) {
  if (s.max == max) return;
  const float shift = Reference(s.max, f) - Reference(max, f);
  const float factor = Exp2(shift);
  const bool empty = s.sum == 0.0f;
  s.spread = empty ? 0.0f : factor * (s.spread + s.sum * shift);
  s.sum = empty ? 0.0f : s.sum * factor;
  s.max = max;
}

__device__ __forceinline__ float WarpSum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// A logit and its derivative by s, the logit before the softcap.
struct Logit {
  float z;
  float slope;  // dz/ds: 1 - (z/c)^2 with a softcap, else 1
};

// tanh(x) and its derivative. Without kPrecise: if |x| < 0.5, a polynomial with a relative error of 2e-8;
// else a form without cancellation, with a relative error of 2e-7. So the error of a capped logit of 100 is
// at most 5e-5 for any cap.
template <bool kPrecise>
__device__ __forceinline__ float2 TanhAndSlope(float x) {
  const float t = fabsf(x);
  const float e = kPrecise ? expf(-2.0f * t) : Exp2(-2.0f * kLog2E * t);
  const float denominator = 1.0f + e;
  const float inverse = kPrecise ? 1.0f / denominator : __fdividef(1.0f, denominator);
  const float square = t * t;
  float series = fmaf(square, 0.01725712f, -0.053053f);
  series = fmaf(square, series, 0.13325988f);
  series = fmaf(square, series, -0.33333148f);
  series = fmaf(t * square, series, t);
  const float value = kPrecise ? tanhf(t) : t < 0.5f ? series : (1.0f - e) * inverse;
  return make_float2(copysignf(value, x), 4.0f * e * inverse * inverse);
}

// Turns fp32 dot products into logits. T: the dtype that the product multiplied. Softcaps of fp32 are as
// precise as the product.
template <typename T, bool kGeneral>
struct LogitMap {
  float f;  // z f is the logit in units of log 2
  float scale;
  float softcap;
  float inverse_cap;
  const float* bias;
  bool masks;  // kMaskedDot marks a class that is left out

  __device__ __forceinline__ explicit LogitMap(const LossTerms& terms)
      : f(kGeneral ? kLog2E : terms.scale * kLog2E),
        scale(terms.scale),
        softcap(terms.softcap),
        inverse_cap(terms.softcap > 0.0f ? 1.0f / terms.softcap : 0.0f),
        bias(terms.bias),
        masks(terms.soft) {}

  __device__ __forceinline__ Logit operator()(float dot, int column) const {
    if constexpr (!kGeneral) return {dot, 1.0f};
    return OfSum(dot, dot + (bias != nullptr ? __ldg(bias + column) : 0.0f));
  }

  // `sum`: dot product + bias.
  __device__ __forceinline__ Logit OfSum(float dot, float sum) const {
    if constexpr (!kGeneral) return {dot, 1.0f};
    if (masks && __float_as_uint(dot) == kMaskedDot) return {NegativeInfinity(), 0.0f};
    const float s = scale * sum;
    if (softcap == 0.0f) return {s, 1.0f};
    const float2 t = TanhAndSlope<sizeof(T) == 4>(s * inverse_cap);
    // An infinite dot product must not be hidden by the cap.
    return {isinf(dot) ? NAN : softcap * t.x, t.y};
  }
};

__device__ __forceinline__ float ClassWeight(const LossTerms& terms, int column) {
  return terms.class_weights != nullptr ? __ldg(terms.class_weights + column) : 1.0f;
}

// Values of the row's target that all threads know before the sums are computed.
struct Target {
  int column;  // -1: the target is on another device
  int place;   // number of the class, counted like columns, even if the class is on another device
  Logit logit;
  float stored_z;  // z, computed like the stored logits, for comparisons with these logits
  float class_weight;
};

// The target of a row whose dot product is already known. Columns and the terms' arrays are counted from
// `first_class` on.
template <typename T, bool kGeneral>
__device__ __forceinline__ Target MakeTargetOf(const LossTerms& terms, const RowInputs& in,
                                               const LogitMap<T, kGeneral>& map, int64_t row,
                                               int first_class) {
  Target target;
  const int here = in.targets[row];
  target.column = here < 0 ? -1 : here - first_class;
  target.place = (in.all_targets != nullptr ? in.all_targets[row] : here) - first_class;
  const float dot = in.target_dots[row];
  // If `dot` includes a bias, it can be infinite because of the bias alone (row_loss.cu).
  target.logit =
      !terms.bias_in_targets ? map(dot, target.place) : map.OfSum(terms.bias != nullptr ? 0.0f : dot, dot);
  target.stored_z = target.logit.z;
  target.class_weight = kGeneral ? ClassWeight(terms, target.place) : 1.0f;
  return target;
}

// Results of a row that are known after the sums have been computed.
struct RowResult {
  float reference;    // M
  float inverse_sum;  // 1 / S
  float log2_sum;
  float lse;
  float nll;
  float p_target;
  float p_others;  // 1 - p_target
  float entropy;
  float loss;
  // Derivative of the loss with respect to nll, before weight and scale, without smoothing and z-loss.
  float slope;
  float z_loss_part;
  int32_t argmax;
};

// The objective's loss and slope of a row; only if there is an objective.
__device__ __forceinline__ ObjectiveTerm<float> ObjectiveOf(const LossTerms& terms, const RowInputs& in,
                                                            int64_t row, float nll) {
  return EvaluateObjective<float>(terms.objective, nll,
                                  {in.advantages[row], in.old_logprobs[row], in.ref_logprobs[row]});
}

// Computes the result of a row from `others`, the statistics of all classes but the target, which are rebased
// to the largest logit of the whole row. The caller sets argmax.
template <bool kGeneral>
__device__ __forceinline__ RowResult FinishSums(const LossTerms& terms, const RowInputs& in, int64_t row,
                                                const Target& target, const Stats& others, float f) {
  RowResult r;
  const float z = target.logit.z;
  r.reference = Reference(others.max, f);
  const float d_target = fmaf(z, f, -r.reference);
  const float e_target = Exp2(d_target);
  const float sum = others.sum + e_target;
  r.inverse_sum = 1.0f / sum;
  r.log2_sum = log2f(sum);
  r.lse = (r.reference + r.log2_sum) * kLn2;
  r.p_target = e_target / sum;
  r.p_others = others.sum / sum;
  r.nll = e_target > 0.5f * sum ? log1pf(others.sum / e_target) : (r.log2_sum - d_target) * kLn2;
  const float target_spread = e_target > 0.0f ? e_target * d_target : 0.0f;
  // With one class the entropy is exactly 0, without the rounding errors of log2. A sum that is not finite
  // gives NaN.
  r.entropy = others.sum > 0.0f ? kLn2 * (r.log2_sum - (others.spread + target_spread) / sum) : 0.0f * sum;
  const float weight = in.weights[row];
  float hard = (1.0f - terms.smoothing) * r.nll;
  r.slope = (kGeneral ? target.class_weight : 1.0f) * (1.0f - terms.smoothing);
  if (terms.objective.active()) {
    const ObjectiveTerm<float> objective = ObjectiveOf(terms, in, row, r.nll);
    hard = objective.loss;
    r.slope = objective.slope;
    if constexpr (kGeneral) {
      if (terms.objective.entropy_bonus != 0.0f) hard -= terms.objective.entropy_bonus * r.entropy;
    }
  } else if constexpr (kGeneral) {
    hard *= target.class_weight;
    if (terms.smoothing > 0.0f) {
      hard += terms.smoothing * ((terms.class_weight_sum * r.nll - others.weighted) /
                                 static_cast<float>(terms.vocab + terms.elsewhere));
    }
  }
  r.z_loss_part = weight * terms.z_loss * r.lse * r.lse;
  r.loss = weight * hard + r.z_loss_part;
  r.argmax = -1;
  return r;
}

// The result of row `row` with soft targets. soft_rows.cu has the formulas. `unnamed`: the statistics of all
// classes that the row does not name, without the target. The rule that MakeRule computes from the result is
// for classes that the row does not name; LaunchWriteTargets then overwrites the elements of the named
// classes.
__device__ __forceinline__ RowResult FinishSoft(const LossTerms& terms, const RowInputs& in, int64_t row,
                                                const Target& target, const Stats& unnamed, float f) {
  const NamedRow named = in.soft.named[row];
  Stats tail = unnamed;
  Stats all = {named.max, named.sum, named.spread, 0.0f, named.arg};
  const float max = fmaxf(fmaxf(tail.max, named.max), target.logit.z);
  const float others_max = fmaxf(tail.max, named.max);
  int32_t arg = INT32_MAX;
  if (tail.max == others_max) arg = tail.arg;
  if (named.max == others_max) arg = min(arg, named.arg);
  Rebase(tail, max, f);
  Rebase(all, max, f);
  all.sum += tail.sum;
  all.spread += tail.spread;
  RowResult r = FinishSums<true>(terms, in, row, target, all, f);
  // outside: T S, the sum over the classes that the row does not name. weights: the sum of q. dot: the sum of
  // q d, with d relative to M instead of named.dot_reference.
  const float e_target = Exp2(fmaf(target.logit.z, f, -r.reference));
  const float outside = tail.sum + (named.has_target != 0 ? 0.0f : e_target);
  const float total = in.soft.total[row], rest = in.soft.rest[row];
  const float weights = total - rest;
  const float dot = named.dot + weights * (named.dot_reference - r.reference);
  float hard = kLn2 * (weights * r.log2_sum - dot);
  r.slope = total;
  if (rest > 0.0f) {
    hard += rest * kLn2 * (r.log2_sum - log2f(outside));
    r.slope -= rest / (outside * r.inverse_sum);
  }
  r.loss = in.weights[row] * hard + r.z_loss_part;
  r.argmax = target.place;
  const float stored = target.stored_z;
  if (others_max > stored || (others_max == stored && arg < r.argmax)) r.argmax = arg;
  r.argmax += static_cast<int32_t>(terms.first_class);
  return r;
}

// As FinishSums, but rebases `others` itself, and sets argmax.
template <bool kGeneral>
__device__ __forceinline__ RowResult Finish(const LossTerms& terms, const RowInputs& in, int64_t row,
                                            const Target& target, const Stats& others, float f) {
  Stats rebased = others;
  Rebase(rebased, fmaxf(others.max, target.logit.z), f);
  RowResult r = FinishSums<kGeneral>(terms, in, row, target, rebased, f);
  r.argmax = target.place;
  const float stored = target.stored_z;
  if (others.max > stored || (others.max == stored && others.arg < r.argmax)) r.argmax = others.arg;
  r.argmax += static_cast<int32_t>(terms.first_class);
  return r;
}

__device__ __forceinline__ void WriteRow(const RowResults& out, int64_t row, const RowResult& r) {
  out.loss[row] = r.loss;
  out.z_loss_part[row] = r.z_loss_part;
  out.lse[row] = r.lse;
  out.entropy[row] = r.entropy;
  out.target_logprob[row] = -r.nll;
  out.argmax[row] = r.argmax;
}

// The rule of a row, in the symbols of row_loss.cu. `hard` is the factor of c in the terms of the target's
// nll. `soft` is the sum of the other terms that p_v is multiplied by: c alpha U / V + 2 c lambda lse +
// c_lse.
template <bool kGeneral>
__device__ __forceinline__ GradientRule MakeRule(const LossTerms& terms, const RowInputs& in, int64_t row,
                                                 const Target& target, const RowResult& r) {
  GradientRule rule;
  const float c = in.coef_loss[row];
  const float hard = r.slope;
  const float share = terms.smoothing / static_cast<float>(terms.vocab + terms.elsewhere);
  const float soft = c * (share * terms.class_weight_sum + 2.0f * terms.z_loss * r.lse) + in.coef_lse[row];
  const float entropy = kGeneral ? in.coef_entropy[row] : 0.0f;
  // dL/dz of a class is 2^d (rule.softmax - rule.entropy ((d - log2 S) ln 2 + H)) - rule.uniform u.
  rule.softmax = (c * hard + soft) * r.inverse_sum;
  rule.entropy = entropy * r.inverse_sum;
  rule.uniform = c * share;
  rule.reference = r.reference;
  rule.log2_sum = r.log2_sum;
  rule.row_entropy = r.entropy;
  // dL/dz of the target is p_y (c hard + soft) - c hard, computed with 1 - p_y. With soft targets, nothing is
  // subtracted: the target counts like any class that the row does not name.
  float target_grad = (terms.soft ? c * hard * r.p_target : -c * hard * r.p_others) + r.p_target * soft;
  if constexpr (kGeneral) {
    if (r.p_target > 0.0f) target_grad -= r.p_target * entropy * (r.entropy - r.nll);
  }
  rule.target = target_grad * target.logit.slope;
  rule.target_slope = target.logit.slope;
  rule.valid = isfinite(r.lse) && isfinite(r.loss);
  return rule;
}

// An upper bound of the row's gradient with respect to its logits: kappa of docs/math.md, divided by the
// gradient unit, for a row with this log-sum-exp and this log-probability of its target.
__device__ __forceinline__ float GradientFactor(const LossTerms& terms, const RowInputs& in, int64_t row,
                                                float lse, float target_logprob) {
  const float c = in.coef_loss[row];
  const int place = in.all_targets != nullptr ? in.all_targets[row] : in.targets[row];
  const float hard = terms.soft                 ? in.soft.total[row]
                     : terms.objective.active() ? ObjectiveOf(terms, in, row, -target_logprob).slope
                                                : ClassWeight(terms, place) * (1.0f - terms.smoothing);
  const float share = terms.smoothing / static_cast<float>(terms.vocab + terms.elsewhere);
  const float softmax =
      c * (hard + share * terms.class_weight_sum + 2.0f * terms.z_loss * lse) + in.coef_lse[row];
  return fabsf(softmax) + fabsf(in.coef_entropy[row]);
}

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_ROW_LOSS_MATH_CUH_
