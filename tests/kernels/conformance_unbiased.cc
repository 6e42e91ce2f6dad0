// SPDX-License-Identifier: Apache-2.0
// What sampled gradients are for: without bias, with the spread that is predicted, and a function of the
// random numbers of each row alone.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/clear_samples.h"
#include "tests/kernels/comparison.h"
#include "tests/kernels/tolerances.h"

namespace lossd::kernels::testing {
namespace {

constexpr int kSeeds = 64;

// The mean over many runs of one tensor's gradient.
struct Mean {
  std::vector<double> value;

  void Add(const std::vector<float>& one) {
    value.resize(one.size());
    for (size_t i = 0; i < one.size(); ++i) value[i] += double{one[i]} / kSeeds;
  }
};

// The distance of a mean from the exact gradient is what the variance predicts, and rounding; at least
// `least` times that. Elements depend on each other, but there are many independent rows and classes.
void ExpectMeanNear(const Mean& mean, const reference::Gradient& exact, const std::vector<double>& variance,
                    double tolerance, double least) {
  double error = 0.0, predicted = 0.0, norm = 0.0;
  ASSERT_EQ(mean.value.size(), exact.value.size());
  for (size_t i = 0; i < exact.value.size(); ++i) {
    error += std::pow(mean.value[i] - exact.value[i], 2);
    predicted += variance[i] / kSeeds;
    norm += exact.value[i] * exact.value[i];
  }
  EXPECT_LT(std::sqrt(error), 1.3 * std::sqrt(predicted) + tolerance * std::sqrt(norm));
  EXPECT_GT(std::sqrt(error), least * std::sqrt(predicted) - tolerance * std::sqrt(norm));
}

// How much of the true gradient of classes that are never a target is there: 1 without bias. Leaving small
// probabilities out leaves out what pushes these classes down.
void ExpectFullPushDown(const Problem& problem, const Mean& mean, const reference::Gradient& exact,
                        const std::vector<double>& variance, double tolerance) {
  const auto d = static_cast<size_t>(problem.config.hidden_size);
  double product = 0.0, norm = 0.0, spread = 0.0;
  for (size_t i = 0; i < exact.value.size(); ++i) {
    bool is_target = false;
    for (const SliceData& slice : problem.slices) {
      for (const int32_t target : slice.targets) is_target |= target == static_cast<int32_t>(i / d);
    }
    if (is_target) continue;
    product += mean.value[i] * exact.value[i];
    norm += exact.value[i] * exact.value[i];
    spread += variance[i] * exact.value[i] * exact.value[i] / kSeeds;
  }
  ASSERT_GT(norm, 0.0);
  // The samples of one class and row move all its elements alike.
  const double deviation = std::sqrt(spread * static_cast<double>(d)) / norm;
  EXPECT_NEAR(product / norm, 1.0, 4.0 * deviation + tolerance);
}

}  // namespace

TEST_P(GradientsConformance, SampledGradientsAreExactOnAverage) {
  for (const bool with_options : {false, true}) {
    ProblemSpec spec = Plain({60, 40}, 24, 700);
    spec.config.has_bias = true;
    spec.options.gradients = Gradients::kSampled;
    spec.options.sample_threshold = 0.02f;
    spec.logit_deviation = 2.0f;
    if (with_options) {
      spec.options.softcap = 8.0f;
      spec.options.label_smoothing = 0.1f;
      spec.options.z_loss = 1e-3f;
      spec.grad_loss = spec.grad_lse = spec.grad_entropy = true;
    }
    Problem problem = MakeProblem(spec, rng());
    SCOPED_TRACE(Describe(problem));
    const auto head = MakeHead(backend(), problem);
    ASSERT_NE(head, nullptr);
    Mean hidden, weight, bias;
    ChunkRun run;
    for (int i = 0; i < kSeeds; ++i) {
      for (SliceData& slice : problem.slices) slice.sample_seed = rng()();
      ASSERT_TRUE(head->ZeroGradients().ok());
      run = RunChunk(*head, problem);
      ASSERT_TRUE(run.done.ok()) << run.done;
      ExpectGradients(run, Gradients::kSampled);
      hidden.Add(run.slices[0].grad_hidden);
      weight.Add(ReadGradient(*head, Param::kWeight));
      bias.Add(ReadGradient(*head, Param::kBias));
    }
    reference::ParamGradients sampled = reference::ZeroGradients(problem.config);
    const auto spread = ComputeReference(AsComputed(problem, run), &sampled);
    problem.options.gradients = Gradients::kExact;
    reference::ParamGradients exact = reference::ZeroGradients(problem.config);
    const auto want = ComputeReference(problem, &exact);
    const DType compute = head->compute_dtype();
    const double tolerance =
        ToleranceFor(compute).Gradient(MaxAbsLogit(want)) + UnitRoundoff(problem.hidden_dtype);
    // What the classes of a row add up to is more certain than if they were taken independently.
    ExpectMeanNear(hidden, want[0].grad_hidden, spread[0].grad_hidden.variance, tolerance, 0.4);
    ExpectMeanNear(weight, exact.weight, sampled.weight.variance, tolerance, 0.7);
    ExpectMeanNear(bias, exact.bias, sampled.bias.variance, tolerance, 0.7);
    ExpectFullPushDown(problem, weight, exact.weight, sampled.weight.variance, tolerance);
  }
}

TEST_P(GradientsConformance, SampledBitsAreAFunctionOfTheNumbers) {
  ProblemSpec spec = Random(70, 45, 210);
  spec.options.gradients = Gradients::kSampled;
  spec.options.sample_threshold = 0.02f;
  spec.slice_rows = {70};
  spec.ignored = 0.0;
  spec.accumulate_mask = false;
  spec.grad_loss = spec.row_weights = false;
  const Problem problem = MakeProblem(spec, rng());
  SCOPED_TRACE(Describe(problem));
  const auto gradients_of = [&](uint64_t seed, int64_t first_row) {
    Problem changed = problem;
    changed.slices.front().sample_seed = seed;
    changed.slices.front().first_row = first_row;
    const auto head = MakeHead(backend(), changed);
    EXPECT_NE(head, nullptr);
    std::vector<std::vector<float>> gradients = {RunChunk(*head, changed).slices[0].grad_hidden};
    for (std::vector<float>& gradient : AllGradients(*head)) gradients.push_back(std::move(gradient));
    return gradients;
  };
  const auto once = gradients_of(1, 5);
  EXPECT_EQ(gradients_of(1, 5), once);
  EXPECT_NE(gradients_of(2, 5), once);
  EXPECT_NE(gradients_of(1, 6), once);
}

// The cut of a microbatch into chunks decides about no class: whole or in three chunks, the reference of the
// same numbers is what comes.
TEST_P(GradientsConformance, SampledAlikeInWhateverChunk) {
  ProblemSpec spec = Plain({90}, 45, 210);
  spec.options.gradients = Gradients::kSampled;
  spec.options.sample_threshold = 0.02f;
  spec.config.has_bias = true;
  const Problem whole = WithClearSamples(MakeProblem(spec, rng()));
  SCOPED_TRACE(Describe(whole));
  const SliceData& all = whole.slices.front();
  const auto head = MakeHead(backend(), whole);
  ASSERT_NE(head, nullptr);
  reference::ParamGradients gradients = reference::ZeroGradients(whole.config);
  double max_abs_logit = 0.0;
  for (const auto& [begin, end] : {std::pair{0, 1}, {1, 64}, {64, 90}}) {
    Problem part = whole;
    SliceData& slice = part.slices.front();
    slice.hidden.assign(all.hidden.begin() + begin * 45, all.hidden.begin() + end * 45);
    slice.targets.assign(all.targets.begin() + begin, all.targets.begin() + end);
    slice.first_row += begin;
    const ChunkRun got = RunChunk(*head, part);
    ASSERT_TRUE(got.done.ok()) << got.done;
    const Problem computed = AsComputed(part, got);
    const auto want = ComputeReference(computed, &gradients);
    ExpectSliceMatches(head->compute_dtype(), computed, computed.slices.front(), want[0], got.slices[0]);
    max_abs_logit = std::max(max_abs_logit, MaxAbsLogit(want));
  }
  ExpectGradientsMatch(*head, gradients, max_abs_logit);
}

}  // namespace lossd::kernels::testing
