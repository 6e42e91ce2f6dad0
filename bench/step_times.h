// SPDX-License-Identifier: Apache-2.0
// Times the end of a step: the norm of the gradient, then AdamW's update of all parameters.
#ifndef LOSSD_BENCH_STEP_TIMES_H_
#define LOSSD_BENCH_STEP_TIMES_H_

#include <functional>

#include "kernels/backend.h"
#include "nlohmann/json.hpp"

namespace lossd::bench {

// {"norm_and_update": of the host's clock, of `count` steps after two that are not timed, "exchanges": of
// ExchangeWatch, of the last step}. `accumulate` has a microbatch accumulate gradients and waits for it,
// which is no part of the time. `head` has the state of AdamW.
nlohmann::json TimeSteps(const kernels::Backend& backend, kernels::HeadKernels& head, int count,
                         const std::function<void()>& accumulate);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_STEP_TIMES_H_
