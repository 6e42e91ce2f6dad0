// Errors of losses and gradients on a GPU: ||a - ref|| / ||ref|| over sampled rows and classes, against
// double precision.
#ifndef LOSSD_BENCH_LOSS_ERRORS_H_
#define LOSSD_BENCH_LOSS_ERRORS_H_

#include "bench/gpu_data.h"
#include "bench/gpu_microbatch.h"
#include "kernels/backend.h"
#include "nlohmann/json.hpp"

namespace lossd::bench {

// Of one microbatch that has just been computed in bf16, and its mean loss; the gradients of the head were
// zero before it.
nlohmann::json ErrorsOf(kernels::HeadKernels& head, const Microbatch& batch, const DataShape& shape,
                        const LossData& data);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_LOSS_ERRORS_H_
