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
  std::vector<double> row_weights;   // [N], default 1
  std::vector<uint8_t> accumulate;   // [N], default 1; 0: not into the parameter gradients
  double grad_scale = 1.0;           // dL/d(row loss)
  std::vector<double> grad_loss;     // [N], default 1; multiplies grad_scale
  std::vector<double> grad_lse;      // [N], default 0
  std::vector<double> grad_entropy;  // [N], default 0
};

// A gradient and, element by element, the sum of the absolute values of the terms it is made of:
// rounding errors of a computation in floating point are proportional to the latter.
struct Gradient {
  std::vector<double> value;
  std::vector<double> magnitude;
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

  double loss_sum = 0.0;
  double z_loss_sum = 0.0;
  double entropy_sum = 0.0;
  int64_t valid_rows = 0;
  int64_t correct_rows = 0;
};

ParamGradients ZeroGradients(const HeadConfig& config);

// Losses and gradients of `rows`; adds the parameter gradients to *gradients unless it is null. Filters
// unless options.gradients is kExact: what a chunk as a whole decides (kAuto, WhyNotFiltered) is the
// caller's.
Result Compute(const Head& head, const LossOptions& options, const Rows& rows, ParamGradients* gradients);

// p [N, V] of the rows; of ignored rows too.
std::vector<double> Probabilities(const Head& head, const LossOptions& options, const Rows& rows);

}  // namespace lossd::kernels::reference

#endif  // LOSSD_KERNELS_REFERENCE_REFERENCE_H_
