// SPDX-License-Identifier: Apache-2.0
// What a loss with gradients is compared with: its three bare products, and its parts one by one.
#ifndef LOSSD_BENCH_LOSS_FLOOR_H_
#define LOSSD_BENCH_LOSS_FLOOR_H_

#include <cstdint>

#include "bench/gpu_data.h"
#include "bench/gpu_timer.h"
#include "nlohmann/json.hpp"

namespace lossd::bench {

struct BareOptions {
  int iterations = 10;
  bool autotune = false;  // choose the algorithms of the products by timing
};

struct Floor {
  Times logits, hidden_gradient, weight_gradient;
  int64_t rows = 0;  // that were measured
  double total() const { return logits.median + hidden_gradient.median + weight_gradient.median; }
};

// Of all rows. Where their logits are too large, that of some, times as many as there are.
Floor MeasureFloor(const DataShape& shape, const LossData& data, const BareOptions& options, Timer& timer);

// {"logits", "row_loss_forward", "row_loss", ..., "row_loss_gbps"}. `rows`: of a chunk, at most those of the
// shape.
nlohmann::json MeasureParts(const DataShape& shape, const LossData& data, int64_t rows,
                            const BareOptions& options, Timer& timer);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_LOSS_FLOOR_H_
