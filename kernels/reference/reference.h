// SPDX-License-Identifier: Apache-2.0
// The reference implementation of the loss head: double precision, row by row, with plain loops. Tests
// compare every backend with it; no other code uses it. The formulas and symbols are those of docs/math.md: N
// rows, hidden size D, V classes. tests/kernels/reference checks the gradients against finite differences of
// the loss.
//
// The main function is Compute. Tests also use some of its parts alone: the classes that sampling takes
// (TakenClasses) and the formulas for one row. ApplyUpdate is the optimizer. For each gradient, the functions
// also compute how far a correct backend may be from it: rounding (`magnitude`), chance (`variance`), and
// classes for which a rounding error decides whether sampling takes them (`undecided`).
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
// the parameter is a bias or belongs to the norm; weight decay then applies only with options.decay_vectors.
// `cols`: the length of a row of a weight matrix. It is used only with options.lazy_rows and not for vectors:
// rows whose gradient is 0 then do not change.
void ApplyUpdate(const OptimizerOptions& options, int64_t update, bool is_vector,
                 const std::vector<double>& gradient, std::vector<double>& values, OptimizerMoments& moments,
                 size_t cols = 1);

// Systematic sampling of one row (docs/math.md, "Sampled gradients"). TakenClasses returns the classes that
// are taken. UndecidedClasses returns the classes for which rounding errors decide whether they are taken.

// Classes [begin, end) of a row. They are sampled together, with the random number `omega`, which belongs to
// this part.
struct SampledPart {
  size_t begin = 0;
  size_t end = 0;
  double omega = 0.0;
};

// The parts of a row whose classes are divided over `parts` devices (ClassShardOf): in proportion to
// `shares`, or evenly if `shares` is empty. `seed`: the microbatch's seed. `row`: the row's number in the
// microbatch.
std::vector<SampledPart> SampledPartsOf(size_t classes, int parts, absl::Span<const int32_t> shares,
                                        uint64_t seed, uint64_t row);

// Returns for each class [V] whether it is taken: 1 or 0. `sizes`: size_v / tau of each class, 0 for the
// target.
std::vector<uint8_t> TakenClasses(const std::vector<double>& sizes, double omega);

// Returns for each class how far a tested computation may differ from TakenClasses.
//
// The classes lie side by side on a line, each as wide as its size, but at most 1. The points omega, omega +
// 1, omega + 2, ... take the classes that they fall on. Suppose that the sizes of the tested computation are
// wrong by up to `errors` [V]. Element v of the result [V] says how large (taken here - taken by the
// computation)^2 may be for class v, where "taken" is 1 or 0:
// - 0: the decision is certain.
// - 1, or a share of 1: a point lies so close to an end of the class that it may fall on either side, because
//   the distance is less than the sum of the errors of all classes up to there. The class that the point
//   falls on here gets 1. The classes that it may fall on instead share another 1.
// - Where this sum reaches 1/2, half the distance between two points, only the probabilities are known. The
//   value is then the expected squared difference of two independent draws, but at least 1/4, so that a sum
//   of such values allows for a rare class.
std::vector<double> UndecidedClasses(const std::vector<double>& sizes, const std::vector<double>& errors,
                                     double omega);

// The same two functions for a row whose classes are sampled in parts.
std::vector<uint8_t> TakenClasses(const std::vector<double>& sizes, const std::vector<SampledPart>& parts);
std::vector<double> UndecidedClasses(const std::vector<double>& sizes, const std::vector<double>& errors,
                                     const std::vector<SampledPart>& parts);

// The parameters of a head. Parameters that a head with this `config` does not have are ignored, and may be
// empty.
struct Head {
  HeadConfig config;
  std::vector<double> weight;         // [V, D]
  std::vector<double> bias;           // [V]
  std::vector<double> norm_gain;      // [D]
  std::vector<double> norm_shift;     // [D]
  std::vector<double> class_weights;  // [V]
  std::vector<Head> teacher;          // one teacher with options.distillation, else none
};

// Rows of one microbatch. A vector with a default may be empty; every row then has the default.
struct Rows {
  std::vector<double> hidden;        // [N, D]
  std::vector<int32_t> targets;      // [N]; kIgnoredTarget: no target
  std::vector<double> row_weights;   // [N], default 1; 0: the row is absent (kernels/backend.h)
  std::vector<uint8_t> accumulate;   // [N], default 1; 0: the row adds nothing to the parameter gradients
  double grad_scale = 1.0;           // dL/d(row loss)
  std::vector<double> grad_loss;     // [N], default 1; multiplies grad_scale
  std::vector<double> grad_lse;      // [N], default 0
  std::vector<double> grad_entropy;  // [N], default 0
  // The inputs of LossOptions::objective, [N] each, as in kernels::Slice.
  std::vector<double> advantages;
  std::vector<double> old_logprobs;
  std::vector<double> ref_logprobs;
  // [N]: the value of log p_y in those terms of the objective that have no gradient; default: the row's own
  // log p_y.
  std::vector<double> stopped_logprobs;
  uint64_t sample_seed = 0;  // as in kernels::Slice
  int64_t first_row = 0;
  // Whether the uniform part of label smoothing is sampled even without a softcap.
  bool sample_uniform = false;
  // The number of devices that the classes are divided over. Each device samples its own classes.
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
// - `variance`: the variance that the element would have if the classes of a row were taken independently of
//   each other. For weight and bias it is the exact variance, because each row adds only one class to an
//   element. If the gradient goes through a norm, it is an upper bound. It is 0 unless gradients are sampled.
// - `undecided`: the squared difference that undecided classes may make (UndecidedClasses); 0 unless
//   gradients are sampled.
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
  // [N] each; 0 for ignored rows (argmax: -1). loss and z_loss are multiplied by the row weight, the other
  // results are not.
  std::vector<double> loss;
  std::vector<double> z_loss;
  std::vector<double> lse;
  std::vector<double> entropy;
  std::vector<double> target_logprob;
  std::vector<int32_t> argmax;
  // These two are for the tolerances of tests. max_abs_logit is the largest |z| of the row; errors of lse are
  // relative to it. top_gap is the difference of the row's two largest logits, infinite if V = 1. argmax may
  // differ if the errors of logits are larger than this difference.
  std::vector<double> max_abs_logit;
  std::vector<double> top_gap;
  // The sensitivity of the row's loss, before its weight, to log p_y (ObjectiveRow::sensitivity); 1 without
  // an objective. With soft targets it is 2 * SoftTargets::total, a bound on the sum of |dloss/dz| over the
  // logits z, without the z-loss. It is 0 if the loss with the target does not count, because the row weight
  // or Distillation::target_weight is 0.
  std::vector<double> loss_sensitivity;
  Gradient grad_hidden;  // [N, D]
  // [N]: the probability that the row's filtered gradient leaves out; 0 if gradients are not filtered.
  std::vector<double> dropped_mass;
  // [N] each, for sampled gradients (docs/math.md): kappa, the variance that sampling adds to the gradient
  // with respect to the row's scaled dot products, and the square of this gradient.
  std::vector<double> sample_scale;
  std::vector<double> sampling_variance;
  std::vector<double> squared_gradient;
  // [N], for rows with a teacher: the sum, over all logits z of both heads, of the absolute derivative of the
  // divergence (before its weight) with respect to z / temperature. For rows with a teacher, max_abs_logit is
  // the largest |z / temperature| of both heads.
  std::vector<double> divergence_slope;

  LossSums sums;  // over all rows
};

ParamGradients ZeroGradients(const HeadConfig& config);

// Computes losses and gradients of `rows`. Adds the parameter gradients to *gradients unless it is null.
// Decisions about a whole chunk (kAuto, WhyExact) are left to the caller. So Compute treats kAuto as
// kSampled.
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

// The divergence of one row, before its weight. `gradient` [V] is its derivative with respect to the
// student's logits z. `magnitude` [V] is the sum of the absolute values of the terms of each derivative.
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
  // The derivative of `loss` with respect to the log-probability of the target has two parts: the policy's,
  // and that of the divergence from the reference.
  double policy_slope = 0.0;
  double kl_slope = 0.0;
  // The sum of the absolute values of the terms of both slopes; log-probabilities count as terms.
  double slope_magnitude = 0.0;
  // The sensitivity of `loss` to the log-probability, including terms without a gradient.
  double sensitivity = 1.0;
  double ratio = 0.0, old_kl = 0.0, ref_kl = 0.0;  // as in kernels::ObjectiveTerm
  bool clipped = false;
};
// `l`: log p_y. `stopped`: the value of log p_y in terms that have no gradient.
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
  // Slope is the derivative of the loss with respect to z_v. Magnitude is the sum of the absolute values of
  // its terms.
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
  double loss;     // grad_scale * row weight * grad_loss
  double lse;      // Rows::grad_lse
  double entropy;  // includes the objective's entropy bonus
  ObjectiveRow objective;
  SoftTargets targets;
  // For a row with a teacher: the divergence, and the factor with which it enters the gradients, which is
  // grad_scale * row weight * grad_loss * Distillation::weight. `loss` then has the factor target_weight.
  // UpstreamOf knows no teacher; Compute adds these values.
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
  double value = 0.0;      // the sum of all terms except `uniform`
  double magnitude = 0.0;  // sum of the absolute terms of `value`
  double uncapped = 0.0;   // like `magnitude`, but without the factor dz/ds
  // The uniform part of label smoothing. It is the same for all rows, except for a factor of the row.
  double uniform = 0.0;
};

// The gradients of a row's classes, and the values that decide which classes are sampled.
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
  // The variance that sampling adds to dL/d(logit scale * dot product), and the square of that derivative;
  // both summed over the row's classes.
  double sampling_variance = 0.0;
  double squared_gradient = 0.0;
};
// The gradient of row n of `rows`.
LogitGradient ComputeLogitGradient(const LossOptions& options, const ClassWeights& u, const Softmax& soft,
                                   size_t target, const Upstream& upstream, const Rows& rows, size_t n);

}  // namespace lossd::kernels::reference

#endif  // LOSSD_KERNELS_REFERENCE_REFERENCE_H_
