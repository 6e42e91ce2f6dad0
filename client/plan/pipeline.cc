// SPDX-License-Identifier: Apache-2.0
#include "client/plan/pipeline.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

#include "client/plan/balance.h"

namespace lossd::plan {
namespace {

// Beside the layers: the embedding on the first stage.
std::vector<double> Besides(const PipelineShape& shape) {
  std::vector<double> besides(static_cast<size_t>(shape.stages), 0.0);
  besides.front() = shape.embedding_seconds;
  return besides;
}

std::vector<double> Scaled(std::vector<double> values, double factor) {
  for (double& value : values) value *= factor;
  return values;
}

// T of each stage, the head left out.
std::vector<double> WithoutHead(const PipelineShape& shape, const std::vector<int64_t>& layers,
                                double layer_factor) {
  return StageSeconds(Scaled(shape.layer_seconds, layer_factor), Besides(shape), layers);
}

double Sum(const std::vector<double>& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

struct Step {
  double slowest = 0.0;  // stage, of a microbatch
  double seconds = 0.0;
  bool server_bound = false;
};

// passed: seconds of a microbatch through the whole pipeline; served: of the server, for all replicas.
Step StepOf(const PipelineShape& shape, double passed, const std::vector<double>& busy, double served) {
  Step step;
  step.slowest = *std::max_element(busy.begin(), busy.end());
  step.server_bound = served > step.slowest;
  step.seconds = passed + static_cast<double>(shape.microbatches - 1) * std::max(step.slowest, served);
  return step;
}

Step LocalStep(const PipelineShape& shape, const std::vector<int64_t>& layers, double head,
               const PipelineFactors& factors) {
  std::vector<double> busy = WithoutHead(shape, layers, factors.layer);
  busy.back() += factors.local_head * head;
  return StepOf(shape, Sum(busy), busy, 0.0);
}

Step ServerStep(const PipelineShape& shape, const std::vector<int64_t>& layers, double head,
                const PipelineFactors& factors) {
  const std::vector<double> busy = WithoutHead(shape, layers, factors.layer);
  return StepOf(shape, Sum(busy) + head, busy, static_cast<double>(shape.replicas) * head);
}

Step ColocatedStep(const PipelineShape& shape, const std::vector<int64_t>& layers,
                   const std::vector<int64_t>& shares, double head, const PipelineFactors& factors) {
  std::vector<double> busy = WithoutHead(shape, layers, factors.layer);
  double passed = Sum(busy), largest = 0.0;
  const auto whole = static_cast<double>(std::accumulate(shares.begin(), shares.end(), int64_t{0}));
  for (size_t stage = 0; stage < busy.size(); ++stage) {
    const double part = whole > 0.0 ? static_cast<double>(shares[stage]) / whole
                                    : 1.0 / static_cast<double>(busy.size());
    busy[stage] += factors.colocated * part * head;
    largest = std::max(largest, part);
  }
  passed += factors.colocated * largest * head;
  return StepOf(shape, passed, busy, 0.0);
}

PipelineLayout LayoutOf(const PipelineShape& shape, const Step& step, const Step& least,
                        std::vector<int64_t> layers, int server_gpus) {
  PipelineLayout layout;
  layout.layers = std::move(layers);
  layout.gpus = shape.replicas * shape.stages + server_gpus;
  layout.slowest_stage_seconds = step.slowest;
  layout.step_seconds = step.seconds;
  layout.least_step_seconds = least.seconds;
  layout.server_bound = step.server_bound;
  const auto rows = static_cast<double>(shape.replicas * shape.microbatches * shape.microbatch_rows);
  layout.rows_per_second_and_gpu = rows / step.seconds / static_cast<double>(layout.gpus);
  return layout;
}

}  // namespace

PipelineLayout LocalLayout(const PipelineShape& shape, std::vector<int64_t> layers, double head_seconds,
                           const PipelineFactors& factors) {
  const Step step = LocalStep(shape, layers, head_seconds, factors);
  const Step least = LocalStep(shape, layers, head_seconds, {});
  return LayoutOf(shape, step, least, std::move(layers), 0);
}

PipelineLayout ServerLayout(const PipelineShape& shape, std::vector<int64_t> layers, double head_seconds,
                            int gpus, const PipelineFactors& factors) {
  const Step step = ServerStep(shape, layers, head_seconds, factors);
  const Step least = ServerStep(shape, layers, head_seconds, {});
  return LayoutOf(shape, step, least, std::move(layers), gpus);
}

PipelineLayout ColocatedLayout(const PipelineShape& shape, std::vector<int64_t> layers,
                               std::vector<int64_t> shares, double head_seconds,
                               const PipelineFactors& factors) {
  const Step step = ColocatedStep(shape, layers, shares, head_seconds, factors);
  const Step least = ColocatedStep(shape, layers, shares, head_seconds, {});
  PipelineLayout layout = LayoutOf(shape, step, least, std::move(layers), 0);
  layout.shares = std::move(shares);
  return layout;
}

PipelineLayout WithLocalHead(const PipelineShape& shape, double head_seconds,
                             const PipelineFactors& factors) {
  std::vector<double> besides = Besides(shape);
  besides.back() += factors.local_head * head_seconds;
  const int64_t least_on_last = shape.stages == 1 ? 1 : 0;
  std::vector<int64_t> layers =
      DivideLayers(Scaled(shape.layer_seconds, factors.layer), besides, least_on_last);
  return LocalLayout(shape, std::move(layers), head_seconds, factors);
}

PipelineLayout WithServer(const PipelineShape& shape, double head_seconds, int gpus,
                          const PipelineFactors& factors) {
  std::vector<int64_t> layers = DivideLayers(Scaled(shape.layer_seconds, factors.layer), Besides(shape), 1);
  return ServerLayout(shape, std::move(layers), head_seconds, gpus, factors);
}

PipelineLayout Colocated(const PipelineShape& shape, double head_seconds, int64_t least_share,
                         const PipelineFactors& factors) {
  Balanced balanced = Balance(shape.layer_seconds, head_seconds, Besides(shape), least_share);
  return ColocatedLayout(shape, std::move(balanced.layers), std::move(balanced.shares), head_seconds,
                         factors);
}

}  // namespace lossd::plan
