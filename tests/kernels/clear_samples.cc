#include "tests/kernels/clear_samples.h"

#include <algorithm>
#include <cmath>

#include "gtest/gtest.h"
#include "kernels/reference/reference.h"
#include "kernels/sampling.h"
#include "tests/kernels/comparison.h"
#include "tests/kernels/tolerances.h"

namespace lossd::kernels::testing {
namespace {

bool IsSampledOrAuto(const Problem& problem) {
  return problem.options.gradients == Gradients::kSampled || problem.options.gradients == Gradients::kAuto;
}

// How far the random numbers of a slice are from what decides, relative to the error that a unit error of the
// logits makes.
class Clearance {
 public:
  Clearance(const Problem& problem, const SliceData& slice)
      : tau_(double{problem.options.sample_threshold}),
        vocab_(static_cast<size_t>(problem.config.vocab_size)) {
    const reference::Head head = ReferenceHead(problem);
    const reference::Rows rows = ReferenceRows(slice);
    const auto result = reference::Compute(head, problem.options, rows, nullptr);
    classes_ = reference::ComputeSampledClasses(head, problem.options, rows);
    enough_ = 2.0 * ToleranceFor(problem.config.compute_dtype).logit * (1.0 + MaxAbsLogit({&result, 1}));
  }

  // Rounding moves no decision of numbers that are as far.
  double enough() const { return enough_; }
  // Of the slice with whatever seed; at most enough().
  double Of(const SliceData& slice) const {
    double clearance = enough_;
    for (size_t i = 0; i < classes_.size.size() && clearance > 0.0; ++i) {
      const double a = classes_.size[i];
      if (!(a < 1.1 * tau_) || a == 0.0) continue;
      const SampleKey key =
          SampleKeyOf(slice.sample_seed, static_cast<uint64_t>(slice.first_row) + i / vocab_);
      const double omega = double{SampleOf(key, static_cast<uint32_t>(i % vocab_))};
      clearance = std::min(clearance, std::fabs(omega * tau_ - a) / classes_.error[i]);
    }
    return clearance;
  }

 private:
  const double tau_;
  const size_t vocab_;
  reference::SampledClasses classes_;
  double enough_ = 0.0;
};

}  // namespace

Problem WithClearSamples(Problem problem) {
  constexpr int kTries = 200;
  if (!IsSampledOrAuto(problem)) return problem;
  for (SliceData& slice : problem.slices) {
    const Clearance clearance(problem, slice);
    double best = clearance.Of(slice);
    uint64_t seed = slice.sample_seed;
    for (int i = 0; i < kTries && best < clearance.enough(); ++i) {
      slice.sample_seed = MixBits(slice.sample_seed);
      const double here = clearance.Of(slice);
      if (here <= best) continue;
      best = here;
      seed = slice.sample_seed;
    }
    slice.sample_seed = seed;
    if (problem.config.compute_dtype == DType::kFloat32) {
      EXPECT_GE(best, clearance.enough()) << "no seed was found";
    }
  }
  return problem;
}

bool HasClearSamples(const Problem& problem) {
  for (const SliceData& slice : problem.slices) {
    const Clearance clearance(problem, slice);
    if (clearance.Of(slice) < clearance.enough()) return false;
  }
  return true;
}

}  // namespace lossd::kernels::testing
