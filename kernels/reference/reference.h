// SPDX-License-Identifier: Apache-2.0
// What the numbers have to be: the loss head in double precision, row by row, with plain loops.
// Tests compare every backend with it; nothing else uses it. The formulas are those of docs/math.md,
// and tests/kernels/reference proves the gradients by finite differences of the loss.
//
// Compute is where a reader begins. Around it are the parts that tests also use alone: the optimizer
// (ApplyUpdate), the classes that sampling takes (TakenClasses) and the formulas for one row.
//
// All functions are pure and thread-safe. Arguments are assumed valid. Matrices are row-major.
#ifndef LOSSD_KERNELS_REFERENCE_REFERENCE_H_
#define LOSSD_KERNELS_REFERENCE_REFERENCE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/backend.h"
#include "kernels/head_config.h"

namespace lossd::kernels::reference {

// One parameter's optimizer state; `moment1` doubles as SGD's momentum buffer. Empty means zero.
struct OptimizerMoments {
  std::vector<double> moment1;
  std::vector<double> moment2;
};

// Update number `update` (1-based) of `values` with `gradient`, as torch.optim defines it. `is_vector`: bias
// or norm parameter, which decays only with options.decay_vectors.
// With options.lazy_rows, values that are not a vector are rows of `cols` values each, and rows whose
// gradient is 0 stay as they are; else `cols` has no meaning.
void ApplyUpdate(const OptimizerOptions& options, int64_t update, bool is_vector,
                 const std::vector<double>& gradient, std::vector<double>& values, OptimizerMoments& moments,
                 size_t cols = 1);

// Systematic sampling of one row (docs/math.md, "Sampled gradients"): the classes that it takes, and the
// classes of which rounding decides whether it takes them.

// Classes [begin, end) of a row, which are sampled with a number of their own.
struct SampledPart {
  size_t begin = 0;
  size_t end = 0;
  double omega = 0.0;
};

// The parts of a row whose classes lie on `parts` devices, divided by `shares` unless that is empty
// (ClassShardOf). row: its number in the microbatch.
std::vector<SampledPart> SampledPartsOf(size_t classes, int parts, absl::Span<const int32_t> shares,
                                        uint64_t seed, uint64_t row);

// [V]. sizes: a / tau of each class, 0 of the target. 1: taken.
std::vector<uint8_t> TakenClasses(const std::vector<double>& sizes, double omega);

// [V]. How much a computation whose sizes are off by up to `errors` [V] may differ in whether it takes a
// class, as the square of the difference: 0 where the decision is certain. Errors add up along the row: a
// class may be taken in another's place where a point is closer to the border between them than the errors of
// all classes before it. The squares of the two then are 1. From where the errors reach half the distance of
// the points on, nothing is known but the probabilities; squares are then what two independent draws differ
// by, and at least 1/4, so that a sum of them allows for a rare class.
std::vector<double> UndecidedClasses(const std::vector<double>& sizes, const std::vector<double>& errors,
                                     double omega);

// The same of a row in parts.
std::vector<uint8_t> TakenClasses(const std::vector<double>& sizes, const std::vector<SampledPart>& parts);
std::vector<double> UndecidedClasses(const std::vector<double>& sizes, const std::vector<double>& errors,
                                     const std::vector<SampledPart>& parts);

// The parameters of a head; those that config does not have are ignored and may be empty.
struct Head {
  HeadConfig config;
  std::vector<double> weight;         // [V, D]
  std::vector<double> bias;           // [V]
  std::vector<double> norm_gain;      // [D]
  std::vector<double> norm_shift;     // [D]
  std::vector<double> class_weights;  // [V]
  std::vector<Head> teacher;          // one with options.distillation, else none
};

// Rows of one microbatch. An optional vector that is empty takes its default for every row.
struct Rows {
  std::vector<double> hidden;        // [N, D]
  std::vector<int32_t> targets;      // [N]; kIgnoredTarget: none
  std::vector<double> row_weights;   // [N], default 1; 0: the row is absent (kernels/backend.h)
  std::vector<uint8_t> accumulate;   // [N], default 1; 0: not into the parameter gradients
  double grad_scale = 1.0;           // dL/d(row loss)
  std::vector<double> grad_loss;     // [N], default 1; multiplies grad_scale
  std::vector<double> grad_lse;      // [N], default 0
  std::vector<double> grad_entropy;  // [N], default 0
  std::vector<double>
      advantages;  // [N], of LossOptions::objective, as in kernels::Slice; likewise the two below
  std::vector<double> old_logprobs;
  std::vector<double> ref_logprobs;
  // [N]: log p_y in terms of the objective that have no gradient; default: the row's own.
  std::vector<double> stopped_logprobs;
  uint64_t sample_seed = 0;  // as in kernels::Slice
  int64_t first_row = 0;
  // Whether the uniform part of label smoothing is sampled without a softcap too.
  bool sample_uniform = false;
  int class_parts = 1;                // on so many devices the classes lie, which sample them by themselves
  std::vector<int32_t> class_shares;  // of these devices (HeadConfig::shares); empty: they have the same
  // The error of logits over 1 + max |z| of the row, which decides what is undecided of sampled gradients.
  double logit_error = 0.0;
  std::vector<double> teacher_hidden;  // [N, D of the teacher], with options.distillation
  // [N, target_count], with options.rest, as in kernels::Slice.
  std::vector<int32_t> target_classes;
  std::vector<double> target_weights;
  int64_t target_count = 0;
};

// A gradient and, element by element, the sum of the absolute values of the terms it is made of: rounding
// errors of a computation in floating point are proportional to it. Of sampled gradients (else 0) also the
// variance that sampling would give each element if classes were taken independently, or, through a norm, a
// bound on that: of elements that one class of each row adds to (weight and bias) it is the variance. And the
// square of the difference that undecided classes make (UndecidedClasses).
struct Gradient {
  std::vector<double> value;
  std::vector<double> magnitude;
  std::vector<double> variance;
  std::vector<double> undecided;
};

// Gradients of the parameters, [shape of the parameter]; empty for those the head does not have.
struct ParamGradients {
  Gradient weight;
  Gradient bias;
  Gradient norm_gain;
  Gradient norm_shift;
};

struct Result {
  // [N] each; ignored rows have 0 (argmax: -1). Losses carry the row weight, the rest does not.
  std::vector<double> loss;
  std::vector<double> z_loss;
  std::vector<double> lse;
  std::vector<double> entropy;
  std::vector<double> target_logprob;
  std::vector<int32_t> argmax;
  // The largest |z| of the row, and the gap between its two largest logits (infinite if V = 1):
  // what a tolerance for lse and a comparison of argmax have to allow for.
  std::vector<double> max_abs_logit;
  std::vector<double> top_gap;
  // The change of the row's loss, before its weight, per change of log p_y: of the objective, else 1.
  std::vector<double> loss_sensitivity;
  Gradient grad_hidden;  // [N, D]
  // [N]: the probability left out of the row's gradient; 0 unless filtered.
  std::vector<double> dropped_mass;
  // [N] each, of sampled gradients: kappa, the variance and the square of the row's gradient (docs/math.md).
  std::vector<double> sample_scale;
  std::vector<double> sampling_variance;
  std::vector<double> squared_gradient;
  // [N], with a teacher: the sum of the absolute slopes of the divergence, before its weight, with respect to
  // all logits of both heads over the temperature. max_abs_logit is the largest of the logits of both heads,
  // over the temperature too.
  std::vector<double> divergence_slope;

  LossSums sums;  // over all rows
};

ParamGradients ZeroGradients(const HeadConfig& config);

// Losses and gradients of `rows`; adds the parameter gradients to *gradients unless it is null. What a chunk
// as a whole decides (kAuto, WhyExact) is the caller's: kAuto is computed as kSampled.
Result Compute(const Head& head, const LossOptions& options, const Rows& rows, ParamGradients* gradients);

// What sampling goes through, [N, V] each; 0 of targets and in ignored rows.
struct SampledClasses {
  std::vector<double> size;   // size_v / tau of docs/math.md
  std::vector<double> error;  // of `size`, from rows.logit_error
};
SampledClasses ComputeSampledClasses(const Head& head, const LossOptions& options, const Rows& rows);

// log p [N, V] of the rows; of ignored rows too.
std::vector<double> LogProbabilities(const Head& head, const LossOptions& options, const Rows& rows);
// p [N, V], likewise.
std::vector<double> Probabilities(const Head& head, const LossOptions& options, const Rows& rows);

// The formulas of docs/math.md for one row: its logits, its loss, and the gradient with respect to its dot
// products.

// The logits of one row and everything that follows from them alone.
struct Softmax {
  std::vector<double> z;
  std::vector<double> cap_slope;  // dz/ds
  std::vector<double> log_p;
  double lse = 0.0;
  double entropy = 0.0;
};
// y: the row after the norm.
Softmax ComputeSoftmax(const Head& head, const LossOptions& options, const std::vector<double>& y);

// The divergence of one row before its weight, with the gradient with respect to the student's logits z, and
// the absolute terms that it is made of.
struct RowDivergence {
  double value = 0.0;
  std::vector<double> gradient;
  std::vector<double> magnitude;
  double slope = 0.0;          // Result::divergence_slope
  double max_abs_logit = 0.0;  // Result::max_abs_logit
};
RowDivergence ComputeDivergence(const Distillation& distillation, const Softmax& student,
                                const Softmax& teacher);

// Class weights as the loss sees them.
struct ClassWeights {
  const Head& head;
  bool used;
  double operator[](size_t v) const { return used ? head.class_weights[v] : 1.0; }
};

// What the objective says of one row.
struct ObjectiveRow {
  double loss = 0.0;
  // The derivative of `loss` by the log-probability of the target, in its two parts.
  double policy_slope = 0.0;
  double kl_slope = 0.0;
  double slope_magnitude =
      0.0;                   // of the absolute terms that the two are made of, log-probabilities among them
  double sensitivity = 1.0;  // of `loss` to the log-probability, terms without a gradient included
  double ratio = 0.0, old_kl = 0.0, ref_kl = 0.0;  // as in kernels::ObjectiveTerm
  bool clipped = false;
};
// l: log p_y; stopped: what stands for it where it has no gradient.
ObjectiveRow ComputeObjective(const Objective& objective, double l, double stopped, double advantage,
                              double old_logprob, double ref_logprob);
// Of row n, with the log-probability that `soft` gives its target.
ObjectiveRow ObjectiveOf(const LossOptions& options, const Softmax& soft, size_t target, const Rows& rows,
                         size_t n);

// The soft targets of one row; docs/math.md has the formulas.
struct SoftTargets {
  std::vector<double> weight;  // [V]: q; empty: the row has no soft targets
  std::vector<uint8_t> named;  // [V]: the row names the class
  double total = 0.0;          // sum q + R
  double rest = 0.0;           // R
  double tail = 1.0;           // p_rest, the probability of all classes that are not named

  bool used() const { return !weight.empty(); }
  double Loss(const Softmax& soft) const;
  // The derivative of the loss by z_v, and the sum of the absolute terms that it is made of.
  double Slope(const Softmax& soft, size_t v) const;
  double Magnitude(const Softmax& soft, size_t v) const;
};
SoftTargets SoftTargetsOf(const LossOptions& options, const Softmax& soft, const Rows& rows, size_t n);

// The loss of one row before its weight, and the part of it that is the z-loss.
struct RowLoss {
  double loss = 0.0;
  double z_loss = 0.0;
};
// `objective`: of the row, ObjectiveOf(); likewise `targets`, SoftTargetsOf().
RowLoss ComputeRowLoss(const LossOptions& options, const ClassWeights& u, const Softmax& soft, size_t target,
                       const ObjectiveRow& objective, const SoftTargets& targets);

// What a row's loss is multiplied with on its way into the gradients.
struct Upstream {
  double loss;  // grad_scale * row weight * grad_loss
  double lse;
  double entropy;  // the objective's bonus included
  ObjectiveRow objective;
  SoftTargets targets;
  // Of a row with a teacher, whose `loss` then has the factor target_weight: the divergence, and `loss` with
  // the factor `weight` of the divergence instead.
  RowDivergence divergence = {};
  double by_divergence = 0.0;
};
Upstream UpstreamOf(const LossOptions& options, const Softmax& soft, size_t target, const Rows& rows,
                    size_t n);

// The largest absolute value of those that are finite; 0 if none is.
double MaxAbs(const std::vector<double>& values);
// values[i], or `missing` if there are none.
double At(const std::vector<double>& values, size_t i, double missing);
Gradient Zeros(size_t n);

// What filtered gradients leave out.
double DroppedMass(const LossOptions& options, const Softmax& soft, size_t target,
                   const SoftTargets& targets);

// A class's part of dL/ds in pieces, without the logit scale.
struct ClassGradient {
  double value = 0.0;      // but for `uniform`
  double magnitude = 0.0;  // of the terms of `value`
  double uncapped = 0.0;   // of the terms of `value`, without the factor dz/ds
  double uniform = 0.0;    // of label smoothing: the same for all rows but for a factor
};

// The classes of a row, and what decides about those that are sampled.
struct RowClasses {
  std::vector<ClassGradient> gradient;
  double sample_scale = 0.0;     // kappa
  std::vector<double> size;      // a / tau; 0 of the target
  std::vector<double> error;     // of `size`
  std::vector<double> variance;  // that sampling adds
};
RowClasses ComputeRowClasses(const LossOptions& options, const ClassWeights& u, const Softmax& soft,
                             size_t target, const Upstream& upstream, const Rows& rows);

// dL/d(dot product) of one row, and what sampling made of it.
struct LogitGradient {
  Gradient gradient;  // [V]
  double sample_scale = 0.0;
  double sampling_variance = 0.0;  // of dL/d(logit scale * dot product), like the two below
  double squared_gradient = 0.0;
};
// The gradient of row n of `rows`.
LogitGradient ComputeLogitGradient(const LossOptions& options, const ClassWeights& u, const Softmax& soft,
                                   size_t target, const Upstream& upstream, const Rows& rows, size_t n);

}  // namespace lossd::kernels::reference

#endif  // LOSSD_KERNELS_REFERENCE_REFERENCE_H_
