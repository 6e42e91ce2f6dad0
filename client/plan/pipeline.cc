// SPDX-License-Identifier: Apache-2.0
#include "client/plan/pipeline.h"

#include <algorithm>
#include <numeric>

#include "client/plan/arithmetic.h"

namespace lossd::plan {
namespace {

// Layers over stages as evenly as they go, the first stages with one more.
std::vector<int64_t> Even(int64_t layers, int stages) {
  std::vector<int64_t> each(static_cast<size_t>(stages), layers / stages);
  for (int64_t i = 0; i < layers % stages; ++i) ++each[static_cast<size_t>(i)];
  return each;
}

// `last`: what the last stage does beside its layers.
PipelineLayout Of(const PipelineShape& shape, std::vector<int64_t> layers, double last) {
  PipelineLayout layout;
  double sum = 0.0;
  for (size_t i = 0; i < layers.size(); ++i) {
    const double stage =
        static_cast<double>(layers[i]) * shape.layer_seconds + (i + 1 == layers.size() ? last : 0.0);
    layout.slowest_stage_seconds = std::max(layout.slowest_stage_seconds, stage);
    sum += stage;
  }
  layout.step_seconds = sum + static_cast<double>(shape.microbatches - 1) * layout.slowest_stage_seconds;
  layout.layers = std::move(layers);
  layout.gpus = shape.replicas * shape.stages;
  return layout;
}

double RowsOfAll(const PipelineShape& shape) {
  return static_cast<double>(shape.replicas * shape.microbatches * shape.microbatch_rows);
}

void Rate(const PipelineShape& shape, PipelineLayout& layout) {
  layout.rows_per_second_and_gpu = RowsOfAll(shape) / layout.step_seconds / static_cast<double>(layout.gpus);
}

}  // namespace

PipelineLayout WithLocalHead(const PipelineShape& shape, double head_seconds) {
  PipelineLayout best = Of(shape, Even(shape.layers, shape.stages), head_seconds);
  for (int64_t on_last = 0; shape.stages > 1 && on_last <= CeilDiv(shape.layers, shape.stages); ++on_last) {
    std::vector<int64_t> layers = Even(shape.layers - on_last, shape.stages - 1);
    layers.push_back(on_last);
    PipelineLayout layout = Of(shape, std::move(layers), head_seconds);
    if (layout.step_seconds < best.step_seconds) best = std::move(layout);
  }
  Rate(shape, best);
  return best;
}

PipelineLayout WithServer(const PipelineShape& shape, double server_rows_per_second, int gpus) {
  PipelineLayout layout = Of(shape, Even(shape.layers, shape.stages), 0.0);
  const double served = RowsOfAll(shape) / server_rows_per_second;
  layout.server_bound = served > layout.step_seconds;
  layout.step_seconds = std::max(layout.step_seconds, served);
  layout.gpus += gpus;
  Rate(shape, layout);
  return layout;
}

}  // namespace lossd::plan
