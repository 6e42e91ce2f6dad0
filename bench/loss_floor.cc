// SPDX-License-Identifier: Apache-2.0
#include "bench/loss_floor.h"

#include <algorithm>

#include "bench/bare_products.h"
#include "bench/gpu_results.h"

namespace lossd::bench {
namespace {

BareProducts MakeBare(const DataShape& shape, const LossData& data, int64_t rows, const BareOptions& options,
                      Timer& timer) {
  return BareProducts(shape, data, rows, options.iterations, options.autotune, timer);
}

Times Scaled(const Times& times, double factor) {
  return {times.median * factor, times.min * factor, times.max * factor};
}

}  // namespace

Floor MeasureFloor(const DataShape& shape, const LossData& data, const BareOptions& options, Timer& timer) {
  constexpr int64_t kMostLogits = int64_t{6} << 30;
  const int64_t rows = std::min(shape.rows, kMostLogits / shape.vocab);
  const double factor = static_cast<double>(shape.rows) / static_cast<double>(rows);
  Floor floor;
  BareProducts bare = MakeBare(shape, data, rows, options, timer);
  floor.logits = Scaled(bare.Logits(), factor);
  bare.RowLoss(true);  // the other two multiply real gradients
  floor.hidden_gradient = Scaled(bare.HiddenGradient(), factor);
  floor.weight_gradient = Scaled(bare.WeightGradient(kernels::DType::kBFloat16, 0.0f), factor);
  floor.rows = rows;
  return floor;
}

nlohmann::json MeasureParts(const DataShape& shape, const LossData& data, int64_t rows,
                            const BareOptions& options, Timer& timer) {
  BareProducts bare = MakeBare(shape, data, rows, options, timer);
  nlohmann::json parts;
  parts["logits"] = ToJson(bare.Logits());
  parts["row_loss_forward"] = ToJson(bare.RowLoss(false));
  parts["row_loss"] = ToJson(bare.RowLoss(true));
  parts["hidden_gradient"] = ToJson(bare.HiddenGradient());
  parts["weight_gradient_first"] = ToJson(bare.WeightGradient(kernels::DType::kFloat32, 0.0f));
  parts["weight_gradient_add"] = ToJson(bare.WeightGradient(kernels::DType::kFloat32, 1.0f));
  const double bytes =
      6.0 * static_cast<double>(rows) * static_cast<double>(shape.vocab);  // fp32 in, 16 bits out
  parts["row_loss_gbps"] = bytes / parts["row_loss"]["median_ms"].get<double>() / 1e6;
  return parts;
}

}  // namespace lossd::bench
