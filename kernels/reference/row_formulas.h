// SPDX-License-Identifier: Apache-2.0
// The formulas of docs/math.md for one row: its logits, its loss, and the gradient with respect to its dot
// products. Pure functions; thread-safe.
#ifndef LOSSD_KERNELS_REFERENCE_ROW_FORMULAS_H_
#define LOSSD_KERNELS_REFERENCE_ROW_FORMULAS_H_

#include <cstddef>
#include <vector>

#include "kernels/loss_options.h"
#include "kernels/reference/reference.h"

namespace lossd::kernels::reference {

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

// Class weights as the loss sees them.
struct ClassWeights {
  const Head& head;
  bool used;
  double operator[](size_t v) const { return used ? head.class_weights[v] : 1.0; }
};

// The loss of one row before its weight, and the part of it that is the z-loss.
struct RowLoss {
  double loss = 0.0;
  double z_loss = 0.0;
};
RowLoss ComputeRowLoss(const LossOptions& options, const ClassWeights& u, const Softmax& soft, size_t target);

// What a row's loss is multiplied with on its way into the gradients.
struct Upstream {
  double loss;  // grad_scale * row weight * grad_loss
  double lse;
  double entropy;
};
Upstream UpstreamOf(const Rows& rows, size_t n);

// Of those that are finite; 0 if none is.
double MaxAbs(const std::vector<double>& values);
// values[i], or `missing` if there are none.
double At(const std::vector<double>& values, size_t i, double missing);
Gradient Zeros(size_t n);

// What filtered gradients leave out.
double DroppedMass(const LossOptions& options, const Softmax& soft, size_t target);

// A class's part of dL/ds in pieces, without the logit scale.
struct ClassGradient {
  double value = 0.0;      // but for `uniform`
  double magnitude = 0.0;  // of the terms of `value`
  double uncapped = 0.0;   // likewise, without the factor dz/ds
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
// Of row n of `rows`.
LogitGradient ComputeLogitGradient(const LossOptions& options, const ClassWeights& u, const Softmax& soft,
                                   size_t target, const Upstream& upstream, const Rows& rows, size_t n);

}  // namespace lossd::kernels::reference

#endif  // LOSSD_KERNELS_REFERENCE_ROW_FORMULAS_H_
