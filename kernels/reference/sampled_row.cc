// SPDX-License-Identifier: Apache-2.0
#include "kernels/reference/sampled_row.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "kernels/replica.h"
#include "kernels/sampling.h"

namespace lossd::kernels::reference {
namespace {

// The elements of a part.
std::vector<double> Of(const SampledPart& part, const std::vector<double>& values) {
  return {values.begin() + static_cast<std::ptrdiff_t>(part.begin),
          values.begin() + static_cast<std::ptrdiff_t>(part.end)};
}

double WidthOf(double size) { return std::clamp(size, 0.0, 1.0); }

// A class that is taken or not, where it lies in the row, and the error of that.
struct OpenClass {
  size_t v;
  double begin, end;
  double error;
};

std::vector<OpenClass> OpenClasses(const std::vector<double>& sizes, const std::vector<double>& errors) {
  std::vector<OpenClass> open;
  double end = 0.0, error = 0.0;
  for (size_t v = 0; v < sizes.size(); ++v) {
    const double width = WidthOf(sizes[v]);
    const double least = WidthOf(sizes[v] - errors[v]), most = WidthOf(sizes[v] + errors[v]);
    error += std::max(most - width, width - least);
    if (least < 1.0 && most > 0.0) open.push_back({v, end, end + width, error});
    end += width;
  }
  return open;
}

// A class on which a point falls, or may.
struct Candidate {
  size_t v;
  size_t point;
  bool taken;
  double share;  // of the places where the point may be
};

void AddCandidates(const OpenClass& c, double omega, std::vector<Candidate>& candidates) {
  const double first = std::max(0.0, std::ceil(c.begin - c.error - omega));
  for (double k = first; omega + k <= c.end + c.error; k += 1.0) {
    const double x = omega + k;
    if (x - c.error > c.begin && x + c.error < c.end) continue;
    const double share = (std::min(c.end, x + c.error) - std::max(c.begin, x - c.error)) / (2.0 * c.error);
    const bool taken = x > c.begin && x <= c.end;
    if (taken || share > 0.0) candidates.push_back({c.v, static_cast<size_t>(k), taken, share});
  }
}

}  // namespace

std::vector<SampledPart> SampledPartsOf(size_t classes, int parts, absl::Span<const int32_t> shares,
                                        uint64_t seed, uint64_t row) {
  std::vector<SampledPart> all;
  for (int part = 0; part < parts; ++part) {
    const Shard shard = ClassShardOf(static_cast<int64_t>(classes), {part, parts}, shares);
    const auto first = static_cast<uint64_t>(shard.first_class);
    all.push_back({static_cast<size_t>(shard.first_class), static_cast<size_t>(shard.end_class()),
                   static_cast<double>(SampleOf(seed, row, first))});
  }
  return all;
}

std::vector<uint8_t> TakenClasses(const std::vector<double>& sizes, double omega) {
  SystematicSampler<double> sampler(omega);
  std::vector<uint8_t> taken;
  for (const double size : sizes) taken.push_back(sampler.Take(size) ? 1 : 0);
  return taken;
}

std::vector<double> UndecidedClasses(const std::vector<double>& sizes, const std::vector<double>& errors,
                                     double omega) {
  std::vector<double> undecided(sizes.size());
  std::vector<Candidate> candidates;
  for (const OpenClass& c : OpenClasses(sizes, errors)) {
    const double width = c.end - c.begin;
    if (c.error >= 0.5) undecided[c.v] = std::max(0.25, 2.0 * width * (1.0 - width));
    if (c.error > 0.0 && c.error < 0.5) AddCandidates(c, omega, candidates);
  }
  std::vector<double> others(sizes.size() + 2);  // a point: the shares of the classes that are not taken
  for (const Candidate& c : candidates) others[c.point] += c.taken ? 0.0 : c.share;
  for (const Candidate& c : candidates) {
    undecided[c.v] = std::min(1.0, undecided[c.v] + (c.taken ? 1.0 : c.share / others[c.point]));
  }
  return undecided;
}

std::vector<uint8_t> TakenClasses(const std::vector<double>& sizes, const std::vector<SampledPart>& parts) {
  std::vector<uint8_t> all;
  for (const SampledPart& part : parts) {
    const std::vector<uint8_t> taken = TakenClasses(Of(part, sizes), part.omega);
    all.insert(all.end(), taken.begin(), taken.end());
  }
  return all;
}

std::vector<double> UndecidedClasses(const std::vector<double>& sizes, const std::vector<double>& errors,
                                     const std::vector<SampledPart>& parts) {
  std::vector<double> all;
  for (const SampledPart& part : parts) {
    const std::vector<double> undecided = UndecidedClasses(Of(part, sizes), Of(part, errors), part.omega);
    all.insert(all.end(), undecided.begin(), undecided.end());
  }
  return all;
}

}  // namespace lossd::kernels::reference
