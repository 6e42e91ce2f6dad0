// SPDX-License-Identifier: Apache-2.0
// Optimizer hyper-parameters of one step, as plain data. They come with every step, so that a
// learning-rate schedule lives in the trainer.
#ifndef LOSSD_KERNELS_OPTIMIZER_OPTIONS_H_
#define LOSSD_KERNELS_OPTIMIZER_OPTIONS_H_

#include <cstdint>

#include "absl/status/status.h"

namespace lossd::kernels {

// How much per-parameter state a head reserves when it is created.
enum class OptimizerState : uint8_t {
  kNone,      // plain SGD only: no state
  kMomentum,  // one fp32 value a parameter: SGD with momentum
  kAdam,      // two fp32 values a parameter: AdamW (SGD with momentum fits too)
};

// The update is torch.optim.AdamW's (decoupled weight decay, bias correction) or torch.optim.SGD's
// (L2 weight decay added to the gradient, momentum with optional dampening and Nesterov), on fp32
// master weights. The gradient used is grad_multiplier times the accumulated one. Unlike in torch, AdamW with
// epsilon 0 leaves a parameter alone that has not had a gradient (0 / 0 there).
struct OptimizerOptions {
  enum class Kind : uint8_t { kSgd, kAdamW };

  Kind kind = Kind::kAdamW;
  double learning_rate = 1e-3;   // >= 0, finite
  double weight_decay = 0.0;     // >= 0, finite
  bool decay_vectors = false;    // apply weight decay to bias and norm parameters too
  double grad_multiplier = 1.0;  // finite; gradient clipping and loss scaling
  // AdamW
  double beta1 = 0.9;     // in [0, 1)
  double beta2 = 0.999;   // in [0, 1)
  double epsilon = 1e-8;  // >= 0
  // SGD
  double momentum = 0.0;   // >= 0, finite
  double dampening = 0.0;  // finite; must be 0 with nesterov
  bool nesterov = false;   // needs momentum > 0

  friend bool operator==(const OptimizerOptions&, const OptimizerOptions&) = default;
};

// INVALID_ARGUMENT naming the field and its value if a hyper-parameter is outside its range.
absl::Status Validate(const OptimizerOptions& options);

// The least state that `options` needs: kNone, kMomentum or kAdam.
OptimizerState RequiredState(const OptimizerOptions& options);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_OPTIMIZER_OPTIONS_H_
