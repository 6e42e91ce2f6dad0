// What loss a row has: the options of docs/math.md as plain data.
//
// Rows may share a chunk when their head, hidden dtype and LossOptions are equal; nothing else
// about their origin matters.
#ifndef LOSSD_KERNELS_LOSS_OPTIONS_H_
#define LOSSD_KERNELS_LOSS_OPTIONS_H_

#include "absl/status/status.h"

namespace lossd::kernels {

// Symbols as in docs/math.md: s = t (W x + b); z = c tanh(s / c) with a softcap c, else z = s;
// lse = log sum_v exp z_v; u are the class weights (all 1 if unused). The loss of a row is
//   u_y (1 - alpha) (lse - z_y) + alpha / V * sum_v u_v (lse - z_v) + lambda lse^2.
struct LossOptions {
  float logit_scale = 1.0f;        // t: multiplies W x + b (1 / temperature); finite, not 0
  float softcap = 0.0f;            // c: 0 means none; otherwise > 0
  float label_smoothing = 0.0f;    // alpha: in [0, 1]
  float z_loss = 0.0f;             // lambda: >= 0
  bool use_class_weights = false;  // u: take the head's class weights [V]

  friend bool operator==(const LossOptions&, const LossOptions&) = default;
};

// INVALID_ARGUMENT naming the field and its value if an option is outside its range.
absl::Status Validate(const LossOptions& options);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_LOSS_OPTIONS_H_
