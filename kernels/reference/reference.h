// SPDX-License-Identifier: Apache-2.0
// The reference implementation of the loss head: double precision, row by row, with plain loops. Tests
// compare every backend with it; no other code uses it. The formulas are those of docs/math.md.
// tests/kernels/reference checks the gradients against finite differences of the loss.
//
// Begin to read at Compute. Around it are parts that tests also use alone: the optimizer (ApplyUpdate), the
// classes that sampling takes (TakenClasses) and the formulas for one row.
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

// The optimizer state of one parameter. `moment1` is also SGD's momentum buffer. An empty vector means zeros.
struct OptimizerMoments {
  std::vector<double> moment1;
  std::vector<double> moment2;
};

// Makes update number `update` (1-based) of `values` with `gradient`, as torch.optim defines it. `is_vector`:
// the parameter is a bias or belongs to the norm, and decays only with options.decay_vectors. `cols` is used
// only with options.lazy_rows and without is_vector: then `values` are rows of `cols` values each, and rows
// whose gradient is 0 do not change.
void ApplyUpdate(const OptimizerOptions& options, int64_t update, bool is_vector,
                 const std::vector<double>& gradient, std::vector<double>& values, OptimizerMoments& moments,
                 size_t cols = 1);

// Systematic sampling of one row (docs/math.md, "Sampled gradients"). TakenClasses gives the classes that it
// takes, and UndecidedClasses the classes for which rounding errors decide whether they are taken.

// Classes [begin, end) of a row, which are sampled with their own random number omega.
struct SampledPart {
  size_t begin = 0;
  size_t end = 0;
  double omega = 0.0;
};

// The parts of a row whose classes are divided over `parts` devices: by `shares`, or evenly if `shares` is
// empty (ClassShardOf). row: the row's number in the microbatch.
std::vector<SampledPart> SampledPartsOf(size_t classes, int parts, absl::Span<const int32_t> shares,
                                        uint64_t seed, uint64_t row);

// [V]: 1 if the class is taken. sizes: size_v / tau of each class, 0 for the target.
std::vector<uint8_t> TakenClasses(const std::vector<double>& sizes, double omega);

// [V]: the squared difference that a computation may have in taking each class (1 taken, 0 not), if its sizes
// are wrong by up to `errors` [V].
// - 0: the decision is certain.
// - 1: the class and its neighbor may be exchanged. Errors add up along the row. A point may fall on the
//   other class if it is closer to the border of the two classes than the sum of the errors up to there.
// - Once this sum reaches half the distance of two points, only the probabilities are known. The value is
//   then the expected squared difference of two independent draws, but at least 1/4, so that a sum of such
//   values allows for a rare class.
std::vector<double> UndecidedClasses(const std::vector<double>& sizes, const std::vector<double>& errors,
                                     double omega);

// The same for a row in parts.
std::vector<uint8_t> TakenClasses(const std::vector<double>& sizes, const std::vector<SampledPart>& parts);
std::vector<double> UndecidedClasses(const std::vector<double>& sizes, const std::vector<double>& errors,
                                     const std::vector<SampledPart>& parts);

// The parameters of a head. Parameters that the head does not have by `config` are ignored, and may be empty.
struct Head {
  HeadConfig config;
  std::vector<double> weight;         // [V, D]
  std::vector<double> bias;           // [V]
  std::vector<double> norm_gain;      // [D]
  std::vector<double> norm_shift;     // [D]
  std::vector<double> class_weights;  // [V]
  std::vector<Head> teacher;          // one teacher with options.distillation, else none
};

// Rows of one microbatch. An optional vector that is empty takes its default for every row.
struct Rows {
  std::vector<double> hidden;        // [N, D]
  std::vector<int32_t> targets;      // [N]; kIgnoredTarget: no target
  std::vector<double> row_weights;   // [N], default 1; 0: the row is absent (kernels/backend.h)
  std::vector<uint8_t> accumulate;   // [N], default 1; 0: the row adds nothing to the parameter gradients
  double grad_scale = 1.0;           // dL/d(row loss)
  std::vector<double> grad_loss;     // [N], default 1; multiplies grad_scale
  std::vector<double> grad_lse;      // [N], default 0
  std::vector<double> grad_entropy;  // [N], default 0
  // For LossOptions::objective, as in kernels::Slice: advantages, old_logprobs and ref_logprobs, [N] each.
  std::vector<double> advantages;
  std::vector<double> old_logprobs;
  std::vector<double> ref_logprobs;
  // [N]: the value of log p_y in terms of the objective without a gradient; default: the row's own log p_y.
  std::vector<double> stopped_logprobs;
  uint64_t sample_seed = 0;  // as in kernels::Slice
  int64_t first_row = 0;
  // Whether the uniform part of label smoothing is sampled even without a softcap.
  bool sample_uniform = false;
  // The number of devices that the classes are divided over. Each samples its own classes.
  int class_parts = 1;
  // The shares of these devices (HeadConfig::shares); empty: equal shares.
  std::vector<int32_t> class_shares;
  // The error of a logit, relative to 1 + max |z| of its row. It determines which classes are undecided in
  // sampling.
  double logit_error = 0.0;
  std::vector<double> teacher_hidden;  // [N, D of the teacher], with options.distillation
  // [N, target_count], with options.rest, as in kernels::Slice.
  std::vector<int32_t> target_classes;
  std::vector<double> target_weights;
  int64_t target_count = 0;
};

// A gradient, with measures of the error that each element may have in a computation.
// - `magnitude`: the sum of the absolute values of the element's terms. Rounding errors are proportional to
//   it.
// - `variance`, only for sampled gradients, else 0: the variance of the element if classes were taken
//   independently, or a bound on it if the gradient goes through a norm. For weight and bias, where each row
//   adds one class to an element, it is the exact variance.
// - `undecided`, likewise: the squared difference that undecided classes make (UndecidedClasses).
struct Gradient {
  std::vector<double> value;
  std::vector<double> magnitude;
  std::vector<double> variance;
  std::vector<double> undecided;
};

// Gradients of the parameters, each in the shape of its parameter. Empty for parameters that the head does
// not have.
struct ParamGradients {
  Gradient weight;
  Gradient bias;
  Gradient norm_gain;
  Gradient norm_shift;
};

struct Result {
  // [N] each; 0 for ignored rows (argmax: -1). loss and z_loss are multiplied by the row weight, the others
  // are not.
  std::vector<double> loss;
  std::vector<double> z_loss;
  std::vector<double> lse;
  std::vector<double> entropy;
  std::vector<double> target_logprob;
  std::vector<int32_t> argmax;
  // For tolerances: the largest |z| of the row, to which errors of lse are relative; and the gap between its
  // two largest logits (infinite if V = 1), below which argmax may differ.
  std::vector<double> max_abs_logit;
  std::vector<double> top_gap;
  // The derivative of the row's loss, before its weight, with respect to log p_y: that of the objective, or 1
  // without an objective.
  std::vector<double> loss_sensitivity;
  Gradient grad_hidden;  // [N, D]
  // [N]: the probability that a filtered gradient of the row leaves out; otherwise 0.
  std::vector<double> dropped_mass;
  // [N] each, for sampled gradients: kappa, the variance and the square of the row's gradient (docs/math.md).
  std::vector<double> sample_scale;
  std::vector<double> sampling_variance;
  std::vector<double> squared_gradient;
  // [N], for rows with a teacher: the sum of the absolute derivatives of the divergence, before its weight,
  // with respect to z / temperature of all logits z of both heads. For such rows, max_abs_logit is the
  // largest |z / temperature| of both heads.
  std::vector<double> divergence_slope;

  LossSums sums;  // over all rows
};

ParamGradients ZeroGradients(const HeadConfig& config);

// Computes losses and gradients of `rows`. Adds the parameter gradients to *gradients unless it is null.
// Decisions for a whole chunk (kAuto, WhyExact) are left to the caller: kAuto is computed as kSampled.
Result Compute(const Head& head, const LossOptions& options, const Rows& rows, ParamGradients* gradients);

// The input of sampling, [N, V] each; 0 for targets and in ignored rows.
struct SampledClasses {
  std::vector<double> size;   // size_v / tau of docs/math.md
  std::vector<double> error;  // the error of `size`, from rows.logit_error
};
SampledClasses ComputeSampledClasses(const Head& head, const LossOptions& options, const Rows& rows);

// log p [N, V] of all rows, including ignored rows.
std::vector<double> LogProbabilities(const Head& head, const LossOptions& options, const Rows& rows);
// p [N, V] of all rows, including ignored rows.
std::vector<double> Probabilities(const Head& head, const LossOptions& options, const Rows& rows);

// The formulas of docs/math.md for one row: its logits, its loss, and the gradient with respect to its dot
// products.

// The logits of one row, and values that depend only on them.
struct Softmax {
  std::vector<double> z;
  std::vector<double> cap_slope;  // dz/ds
  std::vector<double> log_p;
  double lse = 0.0;
  double entropy = 0.0;
};
// y: the row after the norm.
Softmax ComputeSoftmax(const Head& head, const LossOptions& options, const std::vector<double>& y);

// The divergence of one row before its weight; its gradient with respect to the student's logits z; and
// `magnitude`, the sums of the absolute terms of the gradient.
struct RowDivergence {
  double value = 0.0;
  std::vector<double> gradient;
  std::vector<double> magnitude;
  double slope = 0.0;          // Result::divergence_slope
  double max_abs_logit = 0.0;  // Result::max_abs_logit
};
RowDivergence ComputeDivergence(const Distillation& distillation, const Softmax& student,
                                const Softmax& teacher);

// The class weights that the loss uses.
struct ClassWeights {
  const Head& head;
  bool used;
  double operator[](size_t v) const { return used ? head.class_weights[v] : 1.0; }
};

// The objective of one row, evaluated.
struct ObjectiveRow {
  double loss = 0.0;
  // The two parts of the derivative of `loss` with respect to the log-probability of the target.
  double policy_slope = 0.0;
  double kl_slope = 0.0;
  double slope_magnitude =
      // The sum of the absolute terms of the two slopes, including log-probabilities.
      0.0;
  // The sensitivity of `loss` to the log-probability, including terms without a gradient.
  double sensitivity = 1.0;
  double ratio = 0.0, old_kl = 0.0, ref_kl = 0.0;  // as in kernels::ObjectiveTerm
  bool clipped = false;
};
// l: log p_y. stopped: its value in terms without a gradient.
ObjectiveRow ComputeObjective(const Objective& objective, double l, double stopped, double advantage,
                              double old_logprob, double ref_logprob);
// The objective of row n, with the log-probability that `soft` gives its target.
ObjectiveRow ObjectiveOf(const LossOptions& options, const Softmax& soft, size_t target, const Rows& rows,
                         size_t n);

// The soft targets of one row (docs/math.md).
struct SoftTargets {
  std::vector<double> weight;  // [V]: q; empty: the row has no soft targets
  std::vector<uint8_t> named;  // [V]: the row names the class
  double total = 0.0;          // sum q + R
  double rest = 0.0;           // R
  double tail = 1.0;           // p_rest, the probability of all other classes

  bool used() const { return !weight.empty(); }
  double Loss(const Softmax& soft) const;
  // Slope is the derivative of the loss with respect to z_v, and Magnitude the sum of its absolute terms.
  double Slope(const Softmax& soft, size_t v) const;
  double Magnitude(const Softmax& soft, size_t v) const;
};
SoftTargets SoftTargetsOf(const LossOptions& options, const Softmax& soft, const Rows& rows, size_t n);

// The loss of one row before its weight, and the z-loss that it includes.
struct RowLoss {
  double loss = 0.0;
  double z_loss = 0.0;
};
// `objective` and `targets` are those of the row (ObjectiveOf, SoftTargetsOf).
RowLoss ComputeRowLoss(const LossOptions& options, const ClassWeights& u, const Softmax& soft, size_t target,
                       const ObjectiveRow& objective, const SoftTargets& targets);

// The upstream gradients of a row: the factors with which its loss, lse and entropy enter the gradients.
struct Upstream {
  double loss;  // grad_scale * row weight * grad_loss
  double lse;
  double entropy;  // includes the objective's entropy bonus
  ObjectiveRow objective;
  SoftTargets targets;
  // For a row with a teacher: the divergence and its factor. by_divergence is `loss` times the weight of the
  // divergence, while `loss` itself has been multiplied by target_weight.
  RowDivergence divergence = {};
  double by_divergence = 0.0;
};
Upstream UpstreamOf(const LossOptions& options, const Softmax& soft, size_t target, const Rows& rows,
                    size_t n);

// The largest absolute value of the finite values; 0 if there are none.
double MaxAbs(const std::vector<double>& values);
// values[i], or `missing` if `values` is empty.
double At(const std::vector<double>& values, size_t i, double missing);
Gradient Zeros(size_t n);

// The probability that filtered gradients leave out.
double DroppedMass(const LossOptions& options, const Softmax& soft, size_t target,
                   const SoftTargets& targets);

// The derivative dL/ds of one class in pieces, without the logit scale.
struct ClassGradient {
  double value = 0.0;      // without `uniform`
  double magnitude = 0.0;  // sum of the absolute terms of `value`
  double uncapped = 0.0;   // sum of the absolute terms of `value`, without the factor dz/ds
  // The part of label smoothing, which is the same for all rows except for a factor.
  double uniform = 0.0;
};

// The gradients of a row's classes, and the values that decide which are sampled.
struct RowClasses {
  std::vector<ClassGradient> gradient;
  double sample_scale = 0.0;     // kappa
  std::vector<double> size;      // size_v / tau; 0 for the target
  std::vector<double> error;     // the error of `size`
  std::vector<double> variance;  // the variance that sampling adds
};
RowClasses ComputeRowClasses(const LossOptions& options, const ClassWeights& u, const Softmax& soft,
                             size_t target, const Upstream& upstream, const Rows& rows);

// dL/d(dot product) of one row after sampling, with the figures of the sampling.
struct LogitGradient {
  Gradient gradient;  // [V]
  double sample_scale = 0.0;
  // The variance and the square are those of dL/d(logit scale * dot product).
  double sampling_variance = 0.0;
  double squared_gradient = 0.0;
};
// The gradient of row n of `rows`.
LogitGradient ComputeLogitGradient(const LossOptions& options, const ClassWeights& u, const Softmax& soft,
                                   size_t target, const Upstream& upstream, const Rows& rows, size_t n);

}  // namespace lossd::kernels::reference

#endif  // LOSSD_KERNELS_REFERENCE_REFERENCE_H_
