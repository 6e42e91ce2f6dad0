// SPDX-License-Identifier: Apache-2.0
// Times the two calls of a deferred microbatch: the one that returns the losses and entropies of its rows and
// retains their hidden states, and the backward with upstream gradients of each row's loss, log-sum-exp and
// entropy, which computes the logits once more.
#ifndef LOSSD_BENCH_DEFERRED_TIMES_H_
#define LOSSD_BENCH_DEFERRED_TIMES_H_

#include <string>

#include "bench/gpu_data.h"
#include "kernels/backend.h"
#include "kernels/dtype.h"
#include "kernels/loss_options.h"
#include "nlohmann/json.hpp"

namespace lossd::bench {

// {"retain", "backward", "choices", "errors" if asked for}: the last two of the backward. Each call is run
// time after time, as many chunks in flight as the backend takes. Leaves gradients in the head.
nlohmann::json TimeDeferred(kernels::Backend& backend, kernels::HeadKernels& head, const DataShape& shape,
                            const LossData& data, kernels::DType dtype, const kernels::LossOptions& options,
                            int iterations, bool errors);

// A line for people of that with "backward_ratio", to the time of a loss with gradients.
std::string DeferredText(const nlohmann::json& deferred);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_DEFERRED_TIMES_H_
