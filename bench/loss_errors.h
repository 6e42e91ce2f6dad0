// SPDX-License-Identifier: Apache-2.0
// How far the loss and the gradients of a microbatch are from double precision, over some rows and classes.
#ifndef LOSSD_BENCH_LOSS_ERRORS_H_
#define LOSSD_BENCH_LOSS_ERRORS_H_

#include "bench/gpu_data.h"
#include "bench/gpu_microbatch.h"
#include "kernels/backend.h"
#include "nlohmann/json.hpp"

namespace lossd::bench {

// Errors ||a - ref|| / ||ref|| of the microbatch computed last, whose gradients are all that the head has,
// and the projection of its dW on the true one over the classes that are no row's target. With seeds > 0 also
// those of the mean over so many sample seeds. Computes microbatches; leaves gradients. row_gradients: of a
// backward; null: a loss with gradients.
nlohmann::json MeasureErrors(kernels::HeadKernels& head, Microbatch& batch, const DataShape& shape,
                             const LossData& data, const RowGradients* row_gradients, int seeds);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_LOSS_ERRORS_H_
