// SPDX-License-Identifier: Apache-2.0
#include "client/plan/pipeline.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <utility>

namespace lossd::plan {

// ---- Balance ----

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The exact sum, rounded once, as Python's math.fsum: of partial sums that do not overlap (Shewchuk 1997).
// Of values >= 0.
double ExactSum(absl::Span<const double> values) {
  std::vector<double> partials;  // ascending
  for (double x : values) {
    size_t kept = 0;
    for (double y : partials) {
      if (std::fabs(x) < std::fabs(y)) std::swap(x, y);
      const double high = x + y;
      const double low = y - (high - x);
      if (low != 0.0) partials[kept++] = low;
      x = high;
    }
    partials.resize(kept);
    partials.push_back(x);
  }
  double sum = 0.0, rest = 0.0;
  while (!partials.empty()) {
    const double x = sum;
    const double y = partials.back();
    partials.pop_back();
    sum = x + y;
    rest = y - (sum - x);
    if (rest != 0.0) break;
  }
  // What is left decides a tie.
  if (!partials.empty() && ((rest < 0.0 && partials.back() < 0.0) || (rest > 0.0 && partials.back() > 0.0))) {
    const double twice = rest * 2.0;
    const double higher = sum + twice;
    if (twice == higher - sum) sum = higher;
  }
  return sum;
}

enum class Least : uint8_t { kSlowest, kSquares };

// The division whose largest load, or whose sum of squared loads, is least, with no load above `limit`.
std::vector<int64_t> Best(absl::Span<const double> times, absl::Span<const double> besides, double limit,
                          Least least, int64_t least_on_last) {
  const size_t count = times.size(), stages = besides.size();
  std::vector<double> sums = {0.0};
  for (const double time : times) sums.push_back(sums.back() + time);
  // Of the layers before each end, by the stages so far.
  std::vector<double> costs(count + 1, kInfinity);
  costs[0] = 0.0;
  std::vector<std::vector<size_t>> choices;
  for (size_t stage = 0; stage < stages; ++stage) {
    const size_t fewest = stage + 1 == stages ? static_cast<size_t>(least_on_last) : 1;
    std::vector<double> reached(count + 1, kInfinity);
    std::vector<size_t> begins(count + 1, 0);
    for (size_t end = fewest; end <= count; ++end) {
      for (size_t begin = 0; begin + fewest <= end; ++begin) {
        const double load = sums[end] - sums[begin] + besides[stage];
        if (load > limit || costs[begin] == kInfinity) continue;
        const double cost =
            least == Least::kSquares ? costs[begin] + load * load : std::max(costs[begin], load);
        if (cost < reached[end]) {
          reached[end] = cost;
          begins[end] = begin;
        }
      }
    }
    costs = std::move(reached);
    choices.push_back(std::move(begins));
  }
  std::vector<int64_t> layers(stages);
  size_t end = count;
  for (size_t stage = stages; stage-- > 0;) {
    layers[stage] = static_cast<int64_t>(end - choices[stage][end]);
    end = choices[stage][end];
  }
  return layers;
}

// As long as no stage is slower than the slowest of the best division, or than `bound`, which a head fills,
// stages are as even as can be.
std::vector<int64_t> DivideUpTo(absl::Span<const double> times, absl::Span<const double> besides,
                                double bound, int64_t least_on_last) {
  const std::vector<double> loads =
      StageSeconds(times, besides, Best(times, besides, kInfinity, Least::kSlowest, least_on_last));
  const double slowest = *std::max_element(loads.begin(), loads.end());
  return Best(times, besides, std::max(slowest, bound) * (1 + 1e-12), Least::kSquares, least_on_last);
}

// The part of the head's time that each stage takes, so that those that take some end together.
std::vector<double> Fill(const std::vector<double>& loads, double head) {
  std::vector<double> order = loads;
  std::sort(order.begin(), order.end());
  double level = order.front();
  for (size_t number = 1; number <= order.size(); ++number) {
    level = (ExactSum(absl::MakeConstSpan(order).first(number)) + head) / static_cast<double>(number);
    if (number == order.size() || level <= order[number]) break;
  }
  std::vector<double> parts;
  parts.reserve(loads.size());
  for (const double load : loads) parts.push_back(std::max(0.0, level - load));
  return parts;
}

}  // namespace

Balanced Balance(absl::Span<const double> layer_seconds, double head_seconds,
                 absl::Span<const double> stage_seconds, int64_t least_share) {
  const double bound = (ExactSum(layer_seconds) + ExactSum(stage_seconds) + head_seconds) /
                       static_cast<double>(stage_seconds.size());
  Balanced balanced;
  balanced.layers = DivideUpTo(layer_seconds, stage_seconds, bound, 1);
  const std::vector<double> loads = StageSeconds(layer_seconds, stage_seconds, balanced.layers);
  for (const double part : Fill(loads, head_seconds)) {
    // nearbyint rounds halves to even, as Python's round does.
    const auto share =
        head_seconds > 0.0
            ? static_cast<int64_t>(std::nearbyint(static_cast<double>(kWholeShare) * part / head_seconds))
            : int64_t{1};
    balanced.shares.push_back(std::max(least_share, share));
  }
  return balanced;
}

std::vector<int64_t> DivideLayers(absl::Span<const double> layer_seconds,
                                  absl::Span<const double> stage_seconds, int64_t least_on_last) {
  return DivideUpTo(layer_seconds, stage_seconds, 0.0, least_on_last);
}

std::vector<double> StageSeconds(absl::Span<const double> layer_seconds,
                                 absl::Span<const double> stage_seconds, absl::Span<const int64_t> layers) {
  std::vector<double> loads;
  size_t first = 0;
  for (size_t stage = 0; stage < layers.size(); ++stage) {
    const auto count = static_cast<size_t>(layers[stage]);
    loads.push_back(ExactSum(layer_seconds.subspan(first, count)) + stage_seconds[stage]);
    first += count;
  }
  return loads;
}

// ---- Steps of a pipeline ----

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
    const double part =
        whole > 0.0 ? static_cast<double>(shares[stage]) / whole : 1.0 / static_cast<double>(busy.size());
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
