#include "tests/kernels/clear_samples.h"

#include <algorithm>
#include <vector>

#include "kernels/backend.h"
#include "kernels/reference/reference.h"
#include "tests/kernels/comparison.h"
#include "tests/kernels/tolerances.h"

namespace lossd::kernels::testing {
namespace {

// Of errors of all logits of a row in one direction. Those of fp32 are far below the tolerance, and mostly
// not.
double LogitError(DType compute, double max_abs_logit) {
  const double share = compute == DType::kFloat32 ? 0.2 : 1.0;
  return share * ToleranceFor(compute).logit * (1.0 + max_abs_logit);
}

bool MayBeSampled(const LossOptions& options) {
  return options.gradients == Gradients::kSampled || options.gradients == Gradients::kAuto;
}

// Whether sizes are uncertain by more than rounding: a backend for 16 bits may count the uniform part of
// label smoothing as part of them.
bool HasUncertainSizes(const Problem& problem) {
  return problem.config.compute_dtype != DType::kFloat32 && problem.options.label_smoothing > 0.0f;
}

// The rows of the slice that rounding may sample in another way.
std::vector<size_t> UnclearRows(const Problem& problem, const SliceData& slice) {
  const reference::Head head = ReferenceHead(problem);
  const reference::Rows rows = ReferenceRows(slice);
  const auto result = reference::Compute(head, problem.options, rows, nullptr);
  const auto clearances = reference::SampleClearances(head, problem.options, rows);
  std::vector<size_t> unclear;
  for (size_t row = 0; row < clearances.size(); ++row) {
    const double error = LogitError(problem.config.compute_dtype, result.max_abs_logit[row]);
    if (clearances[row] <= error) unclear.push_back(row);
  }
  return unclear;
}

}  // namespace

Problem WithClearSamples(Problem problem) {
  if (!MayBeSampled(problem.options) || HasUncertainSizes(problem)) return problem;
  for (SliceData& slice : problem.slices) {
    const std::vector<size_t> unclear = UnclearRows(problem, slice);
    if (2 * unclear.size() > slice.targets.size()) continue;
    for (const size_t row : unclear) slice.targets[row] = kIgnoredTarget;
  }
  return problem;
}

bool HasClearSamples(const Problem& problem, const SliceData& slice) {
  if (!MayBeSampled(problem.options)) return true;
  return !HasUncertainSizes(problem) && UnclearRows(problem, slice).empty();
}

}  // namespace lossd::kernels::testing
