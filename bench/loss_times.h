// SPDX-License-Identifier: Apache-2.0
// What cuda_loss_bench measures of a loss on GPUs: its deferred form, its errors, the bare products that it
// is compared with, its norm kernels, and the end of a step. Not thread-safe; aborts on a CUDA error.
#ifndef LOSSD_BENCH_LOSS_TIMES_H_
#define LOSSD_BENCH_LOSS_TIMES_H_

#include <cstdint>
#include <functional>
#include <string>

#include "bench/gpu_data.h"
#include "bench/gpu_microbatch.h"
#include "bench/gpu_timer.h"
#include "kernels/backend.h"
#include "kernels/head_config.h"
#include "nlohmann/json.hpp"

namespace lossd::bench {

// Times the two calls of a deferred microbatch: the one that returns the losses and entropies of its rows and
// retains their hidden states, and the backward with upstream gradients of each row's loss, log-sum-exp and
// entropy, which computes the logits once more.
//
// {"retain", "backward", "choices", "errors" if asked for}: the last two of the backward. Each call is run
// time after time, as many chunks in flight as the backend takes. Leaves gradients in the head.
nlohmann::json TimeDeferred(kernels::Backend& backend, kernels::HeadKernels& head, const DataShape& shape,
                            const LossData& data, kernels::DType dtype, const kernels::LossOptions& options,
                            int iterations, bool errors);

// A line for people of that with "backward_ratio", to the time of a loss with gradients.
std::string DeferredText(const nlohmann::json& deferred);

// How far the loss and the gradients of a microbatch are from double precision, over some rows and classes.
//
// Errors ||a - ref|| / ||ref|| of the microbatch computed last, whose gradients are all that the head has,
// and the projection of its dW on the true one over the classes that are no row's target. With seeds > 0 also
// those of the mean over so many sample seeds. Computes microbatches; leaves gradients. row_gradients: of a
// backward; null: a loss with gradients.
nlohmann::json MeasureErrors(kernels::HeadKernels& head, Microbatch& batch, const DataShape& shape,
                             const LossData& data, const RowGradients* row_gradients, int seeds);

// How MeasureFloor and MeasureParts measure what a loss with gradients is compared with.
struct BareOptions {
  int iterations = 10;
  bool autotune = false;  // choose the algorithms of the products by timing
};

// The times of the three bare products of a loss with gradients.
struct Floor {
  Times logits, hidden_gradient, weight_gradient;
  int64_t rows = 0;  // that were measured
  double total() const { return logits.median + hidden_gradient.median + weight_gradient.median; }
};

// Of all rows. Where their logits are too large, that of some, times as many as there are.
Floor MeasureFloor(const DataShape& shape, const LossData& data, const BareOptions& options, Timer& timer);

// The parts of a loss with gradients one by one:
// {"logits", "row_loss_forward", "row_loss", ..., "row_loss_gbps"}. `rows`: of a chunk, at most those of the
// shape.
nlohmann::json MeasureParts(const DataShape& shape, const LossData& data, int64_t rows,
                            const BareOptions& options, Timer& timer);

inline constexpr int64_t kNormRows = 4096;

// Times of the norm kernels, fp16, with nothing left in L2 from one launch to the next.
struct NormTimes {
  Times forward, backward;                         // of one launch
  double forward_gbps = 0.0, backward_gbps = 0.0;  // rows read and written
};

// `centred`: LayerNorm, else RMSNorm.
NormTimes TimeNorm(int64_t cols, bool centred, Timer& timer);

// Times the end of a step: the norm of the gradient, then AdamW's update of all parameters.
//
// {"norm_and_update": of the host's clock, of `count` steps after two that are not timed, "exchanges": of
// ExchangeWatch, of the last step}. `accumulate` has a microbatch accumulate gradients and waits for it,
// which is no part of the time. `head` has the state of AdamW.
nlohmann::json TimeSteps(const kernels::Backend& backend, kernels::HeadKernels& head, int count,
                         const std::function<void()>& accumulate);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_LOSS_TIMES_H_
