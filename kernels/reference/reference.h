// SPDX-License-Identifier: Apache-2.0
// What the numbers have to be: the loss head in double precision, row by row, with plain loops.
// Tests compare every backend with it; nothing else uses it. The formulas are those of docs/math.md,
// and tests/kernels/reference proves the gradients by finite differences of the loss.
//
// All functions are pure and thread-safe. Arguments are assumed valid. Matrices are row-major.
#ifndef LOSSD_KERNELS_REFERENCE_REFERENCE_H_
#define LOSSD_KERNELS_REFERENCE_REFERENCE_H_

#include <cstdint>
#include <vector>

#include "kernels/head_config.h"
#include "kernels/loss_options.h"

namespace lossd::kernels::reference {

// The parameters of a head; those that config does not have are ignored and may be empty.
struct Head {
  HeadConfig config;
  std::vector<double> weight;         // [V, D]
  std::vector<double> bias;           // [V]
  std::vector<double> norm_gain;      // [D]
  std::vector<double> norm_shift;     // [D]
  std::vector<double> class_weights;  // [V]
};

// Rows of one microbatch. An optional vector that is empty takes its default for every row.
struct Rows {
  std::vector<double> hidden;        // [N, D]
  std::vector<int32_t> targets;      // [N]; kIgnoredTarget: none
  std::vector<double> row_weights;   // [N], default 1; 0: the row is absent (kernels/absent_row.h)
  std::vector<uint8_t> accumulate;   // [N], default 1; 0: not into the parameter gradients
  double grad_scale = 1.0;           // dL/d(row loss)
  std::vector<double> grad_loss;     // [N], default 1; multiplies grad_scale
  std::vector<double> grad_lse;      // [N], default 0
  std::vector<double> grad_entropy;  // [N], default 0
  uint64_t sample_seed = 0;          // as in kernels::Slice
  int64_t first_row = 0;
  // Whether the uniform part of label smoothing is sampled without a softcap too.
  bool sample_uniform = false;
  int class_parts = 1;                // on so many devices the classes lie, which sample them by themselves
  std::vector<int32_t> class_shares;  // of these devices (HeadConfig::shares); empty: they have the same
  // The error of logits over 1 + max |z| of the row, which decides what is undecided of sampled gradients.
  double logit_error = 0.0;
};

// A gradient and, element by element, the sum of the absolute values of the terms it is made of: rounding
// errors of a computation in floating point are proportional to it. Of sampled gradients (else 0) also the
// variance that sampling would give each element if classes were taken independently, or, through a norm, a
// bound on that: of elements that one class of each row adds to (weight and bias) it is the variance. And the
// square of the difference that undecided classes make (sampled_row.h).
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
  Gradient grad_hidden;  // [N, D]
  // [N]: the probability left out of the row's gradient; 0 unless filtered.
  std::vector<double> dropped_mass;
  // [N] each, of sampled gradients: kappa, the variance and the square of the row's gradient (docs/math.md).
  std::vector<double> sample_scale;
  std::vector<double> sampling_variance;
  std::vector<double> squared_gradient;

  double loss_sum = 0.0;
  double z_loss_sum = 0.0;
  double entropy_sum = 0.0;
  int64_t valid_rows = 0;
  int64_t correct_rows = 0;
};

ParamGradients ZeroGradients(const HeadConfig& config);

// Losses and gradients of `rows`; adds the parameter gradients to *gradients unless it is null. What a chunk
// as a whole decides (kAuto, WhyExact) is the caller's: kAuto is computed as kSampled.
Result Compute(const Head& head, const LossOptions& options, const Rows& rows, ParamGradients* gradients);

// What sampling goes through, [N, V] each; 0 of targets and in ignored rows.
struct SampledClasses {
  std::vector<double> size;   // a / tau of docs/math.md
  std::vector<double> error;  // of `size`, from rows.logit_error
};
SampledClasses ComputeSampledClasses(const Head& head, const LossOptions& options, const Rows& rows);

// p [N, V] of the rows; of ignored rows too.
std::vector<double> Probabilities(const Head& head, const LossOptions& options, const Rows& rows);

}  // namespace lossd::kernels::reference

#endif  // LOSSD_KERNELS_REFERENCE_REFERENCE_H_
