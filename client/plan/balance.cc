// SPDX-License-Identifier: Apache-2.0
#include "client/plan/balance.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>

namespace lossd::plan {
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

}  // namespace lossd::plan
