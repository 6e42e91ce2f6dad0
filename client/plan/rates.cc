// SPDX-License-Identifier: Apache-2.0
#include "client/plan/rates.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "absl/strings/str_cat.h"

namespace lossd::plan {
namespace {

// Seconds a row and an element of the weight.
double UnitSeconds(const Timing& t) {
  return t.ms * 1e-3 /
         (static_cast<double>(t.rows) * static_cast<double>(t.hidden) * static_cast<double>(t.vocab));
}

bool SameShape(const Timing& a, int64_t hidden, int64_t vocab) {
  return a.hidden == hidden && a.vocab == vocab;
}

// One of each shape: that with the most rows.
std::vector<Timing> OfEachShape(absl::Span<const Timing> measured) {
  std::vector<Timing> shapes;
  for (const Timing& t : measured) {
    const auto it = std::find_if(shapes.begin(), shapes.end(),
                                 [&](const Timing& s) { return SameShape(s, t.hidden, t.vocab); });
    if (it == shapes.end()) {
      shapes.push_back(t);
    } else if (t.rows > it->rows) {
      *it = t;
    }
  }
  return shapes;
}

double MeanUnit(absl::Span<const Timing> shapes, const Timing* without) {
  double sum = 0.0;
  int count = 0;
  for (const Timing& t : shapes) {
    if (&t == without) continue;
    sum += UnitSeconds(t);
    ++count;
  }
  return sum / count;
}

// The largest relative error of a shape's time as the others predict it.
double WorstError(absl::Span<const Timing> shapes) {
  double worst = 0.0;
  for (const Timing& t : shapes) {
    worst = std::max(worst, std::fabs(MeanUnit(shapes, &t) / UnitSeconds(t) - 1.0));
  }
  return worst;
}

// Whether value is near the range of what get() says of the shapes.
template <typename Get>
bool IsNear(absl::Span<const Timing> shapes, int64_t value, const Get& get) {
  int64_t least = get(shapes.front()), most = least;
  for (const Timing& t : shapes) {
    least = std::min(least, get(t));
    most = std::max(most, get(t));
  }
  const auto v = static_cast<double>(value);
  return v >= static_cast<double>(least) / kNearFactor && v <= static_cast<double>(most) * kNearFactor;
}

Estimate None(std::string why) {
  Estimate none;
  none.why_none = std::move(why);
  return none;
}

std::vector<size_t> SourcesOf(absl::Span<const Timing> timings) {
  std::vector<size_t> sources;
  for (const Timing& t : timings) sources.push_back(t.source);
  std::sort(sources.begin(), sources.end());
  sources.erase(std::unique(sources.begin(), sources.end()), sources.end());
  return sources;
}

}  // namespace

absl::string_view Name(Basis basis) {
  switch (basis) {
    case Basis::kMeasured:
      return "measured";
    case Basis::kLikeShapes:
      return "from other shapes";
    case Basis::kBetween:
      return "between other shapes";
    case Basis::kDataSheets:
      return "bounds by data sheets";
    case Basis::kNone:
      break;
  }
  return "not measured";
}

Estimate EstimateTime(absl::Span<const Timing> measured, int64_t hidden, int64_t vocab, int64_t rows) {
  if (measured.empty()) return None("not measured on this card with such data");
  if (rows < kLeastRows) return None(absl::StrCat("not measured for less than ", kLeastRows, " rows"));
  const Timing* same = nullptr;
  for (const Timing& t : measured) {
    if (!SameShape(t, hidden, vocab)) continue;
    if (same == nullptr || std::llabs(t.rows - rows) < std::llabs(same->rows - rows)) same = &t;
  }
  if (same != nullptr) {
    const double seconds = same->ms * 1e-3 * static_cast<double>(rows) / static_cast<double>(same->rows);
    return {Basis::kMeasured, seconds, seconds, {same->source}, ""};
  }
  const std::vector<Timing> shapes = OfEachShape(measured);
  constexpr size_t kFewestShapes = 3;
  if (shapes.size() < kFewestShapes) return None("too few shapes were measured on this card");
  if (!IsNear(shapes, hidden, [](const Timing& t) { return t.hidden; })) {
    return None("no hidden size near this one was measured");
  }
  if (!IsNear(shapes, vocab, [](const Timing& t) { return t.vocab; })) {
    return None("no vocabulary near this one was measured");
  }
  const double units = static_cast<double>(rows) * static_cast<double>(hidden) * static_cast<double>(vocab);
  Estimate estimate = {Basis::kLikeShapes, 0.0, 0.0, SourcesOf(shapes), ""};
  const double worst = WorstError(shapes);
  if (worst <= kMostError) {
    const double seconds = MeanUnit(shapes, nullptr) * units;
    estimate.low_seconds = seconds * (1.0 - worst);
    estimate.high_seconds = seconds * (1.0 + worst);
    return estimate;
  }
  const auto [fast, slow] =
      std::minmax_element(shapes.begin(), shapes.end(),
                          [](const Timing& a, const Timing& b) { return UnitSeconds(a) < UnitSeconds(b); });
  estimate.basis = Basis::kBetween;
  estimate.low_seconds = UnitSeconds(*fast) * units;
  estimate.high_seconds = UnitSeconds(*slow) * units;
  return estimate;
}

Estimate Bounded(Estimate estimate, const std::optional<CardBounds>& bounds) {
  if (!bounds.has_value() || !estimate.known()) return estimate;
  estimate.basis = Basis::kDataSheets;
  estimate.low_seconds *= bounds->least;
  estimate.high_seconds *= bounds->most;
  return estimate;
}

std::vector<Timing> TimingsOf(const Measured& measured, kernels::Logits logits, kernels::Gradients gradients,
                              absl::string_view data) {
  std::vector<Timing> timings;
  for (const LossTiming& t : measured.loss) {
    if (t.logits == logits && t.gradients == gradients && t.data == data) timings.push_back(t);
  }
  return timings;
}

std::vector<Timing> TimingsOf(const Measured& measured, absl::string_view last_stage_method,
                              absl::string_view data) {
  std::vector<Timing> timings;
  for (const LastStageTiming& t : measured.last_stage) {
    if (t.method == last_stage_method && t.data == data) timings.push_back(t);
  }
  return timings;
}

}  // namespace lossd::plan
