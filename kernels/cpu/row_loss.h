// One row of logits to its loss, and in place to the gradient of the classifier's output. Formulas in
// docs/math.md.
//
// p_y - 1 is never formed by subtraction: it is -(sum of the other exponentials) / (sum of all), which keeps
// full relative accuracy when p_y is close to 1. The row loss is (max - z_y) + log(sum exp(z - max)) in
// double, so that a common offset of the logits does not cost accuracy either.
#ifndef LOSSD_KERNELS_CPU_ROW_LOSS_H_
#define LOSSD_KERNELS_CPU_ROW_LOSS_H_

#include <cstdint>

#include "kernels/cpu/row_loops.h"
#include "kernels/loss_options.h"

namespace lossd::kernels {

// What all rows of a chunk share. Pointers are borrowed.
struct RowLossContext {
  LossOptions options;  // `gradients` is kExact, kFiltered or kSampled
  int64_t vocab_size = 0;
  const float* bias = nullptr;           // [V] or null
  const float* class_weights = nullptr;  // [V] or null (all 1)
  double class_weight_sum = 0.0;         // V without class weights
};

struct RowRequest {
  int32_t target = 0;         // in [0, V)
  float row_weight = 1.0f;    // multiplies the loss
  double grad_loss = 1.0;     // dL/d(row loss / row_weight): grad_scale * row weight * upstream
  float grad_lse = 0.0f;      // dL/dlse
  float grad_entropy = 0.0f;  // dL/dentropy
  bool want_gradient = false;
  bool want_entropy = false;
  float sample = 0.0f;  // SampleOf() of the row, of sampled gradients
};

struct RowResult {
  double loss = 0.0;    // with z-loss, times the row weight
  double z_loss = 0.0;  // times the row weight
  double lse = 0.0;
  double entropy = 0.0;  // if wanted
  double target_logprob = 0.0;
  double dropped_mass = 0.0;  // with a filtered gradient
  // With a sampled gradient, as in SliceSums.
  double sampling_variance = 0.0;
  double squared_gradient = 0.0;
  int32_t argmax = -1;
  // Whether lse, loss and everything that scales the gradient are finite in fp32, and the logits before a
  // softcap too. If false, the rest is unspecified.
  bool finite = false;
};

// Thread-safe: holds no mutable state.
class RowLoss {
 public:
  RowLoss(const RowLoops& loops, const RowLossContext& context) : loops_(loops), context_(context) {}

  // `logits` [V] holds logit_scale * W x (no bias yet). With want_gradient it becomes
  // dL/d(W x + b), else its content is unspecified.
  RowResult Compute(const RowRequest& request, float* logits) const;

 private:
  struct Sums;

  bool Transform(float* logits) const;
  Sums Summarise(const RowRequest& request, float max, float* logits) const;
  double Drop(const RowRequest& request, const Sums& sums, float* logits) const;
  double TargetGradient(const RowRequest& request, const RowResult& row, const Sums& sums) const;
  void WriteGradient(const RowRequest& request, const RowResult& row, const Sums& sums, double smoothing,
                     float* logits) const;
  void Sample(const RowRequest& request, const Sums& sums, double target_gradient, RowResult& row,
              float* logits) const;
  bool KeepsLogits(const RowRequest& request) const;
  double ClassWeight(int32_t target) const;

  const RowLoops& loops_;
  const RowLossContext context_;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_ROW_LOSS_H_
