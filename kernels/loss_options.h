// SPDX-License-Identifier: Apache-2.0
// What loss a row has: the options of docs/math.md as plain data.
//
// Rows may share a chunk when their head, hidden dtype and LossOptions are equal; nothing else
// about their origin matters.
#ifndef LOSSD_KERNELS_LOSS_OPTIONS_H_
#define LOSSD_KERNELS_LOSS_OPTIONS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace lossd::kernels {

// How gradients are computed from the probabilities. Losses and row results do not depend on it. Whatever a
// head does with its logits (HeadConfig::logits), its requests may ask for any of these. docs/math.md has the
// formulas under "Filtered gradients" and "Sampled gradients".
enum class Gradients : uint8_t {
  kExact,     // every class contributes
  kFiltered,  // classes whose probability is below filter_epsilon contribute nothing, except for the target
  kSampled,   // classes below sample_threshold contribute by chance, so that the expectation is kExact's
  kAuto,      // a chunk is kSampled if the error predicted for it is at most max_gradient_error, else kExact
};
absl::string_view Name(Gradients gradients);  // "exact", "filtered", "sampled", "auto"
// Whether classes may be taken by chance: kSampled and kAuto.
constexpr bool MaySample(Gradients gradients) {
  return gradients == Gradients::kSampled || gradients == Gradients::kAuto;
}

// Symbols as in docs/math.md: s = t (W x + b); z = c tanh(s / c) with a softcap c, else z = s;
// lse = log sum_v exp z_v; u are the class weights (all 1 if unused). The loss of a row is
//   u_y (1 - alpha) (lse - z_y) + alpha / V * sum_v u_v (lse - z_v) + lambda lse^2.
struct LossOptions {
  float logit_scale = 1.0f;        // t: multiplies W x + b (1 / temperature); finite, not 0
  float softcap = 0.0f;            // c: 0 means none; otherwise > 0
  float label_smoothing = 0.0f;    // alpha: in [0, 1]
  float z_loss = 0.0f;             // lambda: >= 0
  bool use_class_weights = false;  // u: take the head's class weights [V]

  Gradients gradients = Gradients::kExact;
  float filter_epsilon = 0x1p-12f;  // kFiltered: a probability in [0, 1). With 0 every class is kept.
  // tau, kSampled and kAuto: a probability in (0, 1]. A backend takes a larger one, the same for all rows of
  // a chunk, where it has not enough room for what this one takes.
  float sample_threshold = 0x1p-10f;
  float max_gradient_error = 0.01f;  // kAuto: the predicted relative error of a chunk's dL/dlogits; >= 0

  friend bool operator==(const LossOptions&, const LossOptions&) = default;
};

// INVALID_ARGUMENT naming the field and its value if an option is outside its range.
absl::Status Validate(const LossOptions& options);

// About the largest derivative of a row's loss with respect to a logit that these options lead to. For the
// choice of units in which gradients neither overflow nor vanish; no bound, since the z-loss has none.
double LargestSlope(const LossOptions& options, double largest_class_weight);

// Why a chunk is computed exactly although its options ask for something else, or "". Filtered gradients need
// gradients that are small where probabilities are; sampled ones need nothing. any_grad_entropy: some row has
// an upstream gradient of its entropy.
absl::string_view WhyExact(const LossOptions& options, bool any_grad_entropy);

// How a chunk's gradients are computed as far as that is known before its logits are: kExact if why_exact
// gives a reason, else what the options ask for.
Gradients GradientsOf(const LossOptions& options, absl::string_view why_exact);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_LOSS_OPTIONS_H_
