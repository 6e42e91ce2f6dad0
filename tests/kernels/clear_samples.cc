// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/clear_samples.h"

#include <cmath>
#include <cstddef>
#include <numeric>
#include <vector>

#include "kernels/decision.h"
#include "kernels/reference/reference.h"
#include "tests/kernels/comparison.h"
#include "tests/kernels/tolerances.h"

namespace lossd::kernels::testing {
namespace {

// The sum of what is undecided in a slice.
double UndecidedOf(const reference::SampledClasses& classes, const SliceData& slice, const Problem& problem) {
  const size_t vocab = slice.targets.empty() ? 0 : classes.size.size() / slice.targets.size();
  double sum = 0.0;
  for (size_t row = 0; row < slice.targets.size(); ++row) {
    const auto begin = static_cast<std::ptrdiff_t>(row * vocab),
               end = begin + static_cast<std::ptrdiff_t>(vocab);
    const auto parts =
        reference::SampledPartsOf(vocab, problem.class_parts, problem.config.shares, slice.sample_seed,
                                  static_cast<uint64_t>(slice.first_row) + row);
    const std::vector<double> undecided =
        reference::UndecidedClasses({classes.size.begin() + begin, classes.size.begin() + end},
                                    {classes.error.begin() + begin, classes.error.begin() + end}, parts);
    sum = std::accumulate(undecided.begin(), undecided.end(), sum);
  }
  return sum;
}

}  // namespace

bool MayBeSampled(const Problem& problem) { return MaySample(problem.options.gradients); }

reference::Rows SampledRows(const Problem& problem, const SliceData& slice) {
  reference::Rows rows = ReferenceRows(slice);
  const bool is_auto = problem.options.gradients == Gradients::kAuto;
  rows.sample_uniform = problem.samples_uniform || (problem.auto_samples_uniform && is_auto);
  rows.class_parts = problem.class_parts;
  rows.class_shares = problem.config.shares;
  rows.logit_error = SampledElementError(problem.config.compute_dtype);
  return rows;
}

Problem WithClearSamples(Problem problem) {
  constexpr int kTries = 30;
  if (!MayBeSampled(problem)) return problem;
  for (SliceData& slice : problem.slices) {
    const auto classes = reference::ComputeSampledClasses(ReferenceHead(problem), problem.options,
                                                          SampledRows(problem, slice));
    uint64_t best = slice.sample_seed;
    double least = UndecidedOf(classes, slice, problem);
    for (int i = 0; i < kTries && least > 0.0; ++i) {
      slice.sample_seed = MixBits(slice.sample_seed);
      const double here = UndecidedOf(classes, slice, problem);
      if (here >= least) continue;
      least = here;
      best = slice.sample_seed;
    }
    slice.sample_seed = best;
  }
  return problem;
}

double UndecidedError(const reference::Gradient& want) {
  return 3.0 * std::sqrt(std::accumulate(want.undecided.begin(), want.undecided.end(), 0.0));
}

}  // namespace lossd::kernels::testing
