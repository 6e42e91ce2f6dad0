// SPDX-License-Identifier: Apache-2.0
// Conformance tests of backends (backend_conformance.h) about gradients that are not exact: filtered and
// sampled.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "kernels/decision.h"
#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/comparison.h"

namespace lossd::kernels::testing {

// ---- Filtered gradients ----

TEST_P(GradientsConformance, FilteredWithEachOption) {
  ProblemSpec plain = Plain({17, 20}, 37, 101);
  plain.options.gradients = Gradients::kFiltered;
  plain.options.filter_epsilon = 0.004f;
  std::vector<ProblemSpec> specs = EachOptionAlone(plain);  // exact with a gradient for the entropy
  specs.emplace_back(plain).options.logit_scale = -0.5f;
  specs.emplace_back(plain).accumulate_mask = true;
  ProblemSpec& weighted = specs.emplace_back(plain);
  weighted.config.has_class_weights = weighted.options.use_class_weights = true;
  weighted.options.label_smoothing = 0.2f;
  weighted.config.has_bias = true;
  ProblemSpec& capped = specs.emplace_back(plain);  // exact, too
  capped.options.softcap = 6.0f;
  capped.options.label_smoothing = 0.1f;
  for (const ProblemSpec& spec : specs) RunAndCompare(backend(), {MakeProblem(spec, rng())});
}

void BackendConformance::RunFilteredOddShapes(float epsilon) {
  for (const auto& [rows, hidden, vocab] : kOddShapes) {
    ProblemSpec spec = Plain({rows}, hidden, vocab);
    spec.options.gradients = Gradients::kFiltered;
    spec.options.filter_epsilon = epsilon;
    RunAndCompare(backend(), {MakeProblem(spec, rng())});
  }
}

// A test for each epsilon: tools that look for races take minutes for one.
TEST_P(GradientsConformance, FilteredShapesThatNoTileDividesWithAllKept) { RunFilteredOddShapes(0.0f); }

TEST_P(GradientsConformance, FilteredShapesThatNoTileDividesWithSomeKept) { RunFilteredOddShapes(0.003f); }

TEST_P(GradientsConformance, FilteredShapesThatNoTileDividesWithFewKept) { RunFilteredOddShapes(0.9f); }

// Epsilon 0 keeps every element: what a backend that keeps lists can hold, or more.
TEST_P(GradientsConformance, FilteredWithEveryClassKept) {
  ProblemSpec spec = Plain({9}, 24, 9000);
  spec.options.gradients = Gradients::kFiltered;
  spec.options.filter_epsilon = 0.0f;
  spec.logit_deviation = 1.0f;
  RunAndCompare(backend(), {MakeProblem(spec, rng())});
}

// After enough of them a backend need not try any more.
TEST_P(GradientsConformance, FilteredManyTimesWithEveryClassKept) {
  constexpr int kMany = 24;
  ProblemSpec spec = Plain({5}, 24, 2500);
  spec.ignored = 0.0;
  spec.options.gradients = Gradients::kFiltered;
  spec.options.filter_epsilon = 0.0f;
  spec.logit_deviation = 1.0f;
  RunAndCompare(backend(), std::vector<Problem>(kMany, MakeProblem(spec, rng())));
}

// Few rows, and lists as long as those of a flat softmax are.
TEST_P(GradientsConformance, FilteredWithMostClassesKept) {
  ProblemSpec spec = Plain({9, 2}, 24, 600);
  spec.options.gradients = Gradients::kFiltered;
  spec.options.filter_epsilon = 0.001f;
  spec.logit_deviation = 0.7f;
  RunAndCompare(backend(), {MakeProblem(spec, rng())});
}

// Before its last classes a row looks as if every class had to be kept.
TEST_P(GradientsConformance, FilteredRowsThatEndHigh) {
  std::vector<float> logits(40'000, 0.0f);
  std::fill(logits.end() - 8, logits.end(), 20.0f);
  Problem problem = WithLogits(logits, {5, 39'999, 20'000, 39'993});
  problem.options.gradients = Gradients::kFiltered;
  problem.options.filter_epsilon = 0x1p-18f;
  RunAndCompare(backend(), {problem});
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  EXPECT_GT(RunChunk(*head, problem).slices[0].sums.dropped_mass, 0.0) << "it was not filtered";
}

TEST_P(GradientsConformance, NothingIsDroppedFromALossAlone) {
  ProblemSpec spec = Plain({12}, 24, 300);
  spec.options.gradients = Gradients::kFiltered;
  Problem problem = MakeProblem(spec, rng());
  problem.accumulate_gradients = false;
  problem.slices.front().want_grad_hidden = false;
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  const ChunkRun run = RunChunk(*head, problem);
  EXPECT_EQ(run.slices[0].sums.dropped_mass, 0.0);
  ExpectGradients(run, Gradients::kExact);
}

// ---- Sampled gradients ----
// Element by element, with the random numbers of the reference.

namespace {

ProblemSpec Sampled(ProblemSpec spec, float threshold) {
  spec.options.gradients = Gradients::kSampled;
  spec.options.sample_threshold = threshold;
  return spec;
}

Problem Sampled(Problem problem, float threshold) {
  problem.options.gradients = Gradients::kSampled;
  problem.options.sample_threshold = threshold;
  return problem;
}

}  // namespace

TEST_P(GradientsConformance, SampledWithEachOption) {
  const ProblemSpec plain = Sampled(Plain({17, 20}, 37, 101), 0.02f);
  std::vector<ProblemSpec> specs = EachOptionAlone(plain);
  specs.emplace_back(plain).options.logit_scale = -0.5f;
  specs.emplace_back(plain).accumulate_mask = true;
  ProblemSpec& weighted = specs.emplace_back(plain);
  weighted.config.has_class_weights = weighted.options.use_class_weights = true;
  weighted.options.label_smoothing = 0.2f;
  weighted.config.has_bias = true;
  ProblemSpec capped = plain;
  capped.options.softcap = 6.0f;
  capped.options.label_smoothing = 0.1f;
  specs.push_back(capped);
  capped.grad_entropy = capped.grad_lse = capped.grad_loss = true;
  specs.push_back(capped);
  for (const ProblemSpec& spec : specs) RunAndCompare(backend(), {MakeProblem(spec, rng())});
}

// With all thresholds: the least keeps every class, at the greatest only the target is certain. Where logits
// are recomputed, blocks of rows raise the threshold each for itself, and the chunk says the highest: the
// reference cannot follow if some have to and others need not, as happens with 1031 classes at 2^-10.
TEST_P(GradientsConformance, SampledShapesThatNoTileDivides) {
  const float usual = recomputes_logits() ? 0x1p-8f : 0x1p-10f;
  for (const auto& [rows, hidden, vocab] : kOddShapes) {
    for (const float threshold : {1e-30f, usual, 0.03f, 1.0f}) {
      RunAndCompare(backend(), {MakeProblem(Sampled(Plain({rows}, hidden, vocab), threshold), rng())});
    }
  }
}

TEST_P(GradientsConformance, SampledWithEachNormAndSide) {
  for (const Norm norm : {Norm::kNone, Norm::kRmsNorm, Norm::kLayerNorm}) {
    ProblemSpec spec = Sampled(Plain({23, 18}, 40, 300), 0.01f);
    spec.config.norm = norm;
    spec.config.has_bias = true;
    const Problem problem = MakeProblem(spec, rng());
    RunAndCompare(backend(), {problem});
    Problem frozen_input = problem;
    for (SliceData& slice : frozen_input.slices) slice.want_grad_hidden = false;
    RunAndCompare(backend(), {frozen_input});
    Problem frozen_head = problem;
    frozen_head.config.trainable = false;
    frozen_head.accumulate_gradients = false;
    RunAndCompare(backend(), {frozen_head});
  }
}

TEST_P(GradientsConformance, NothingIsSampledOfALossAlone) {
  Problem problem = MakeProblem(Sampled(Plain({12}, 24, 300), 0.01f), rng());
  problem.accumulate_gradients = false;
  problem.slices.front().want_grad_hidden = false;
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  const ChunkRun run = RunChunk(*head, problem);
  EXPECT_EQ(run.slices[0].sums.sampling_variance, 0.0);
  EXPECT_EQ(run.slices[0].sums.squared_gradient, 0.0);
  ExpectGradients(run, Gradients::kExact);
}

TEST_P(GradientsConformance, SaysWhichThresholdItTook) {
  const Problem problem = MakeProblem(Sampled(Plain({12}, 24, 300), 0.0625f), rng());
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  const ChunkRun run = RunChunk(*head, problem);
  ExpectGradients(run, Gradients::kSampled);
  EXPECT_EQ(run.sample_threshold, 0.0625f);
  EXPECT_THAT(run.choices, ::testing::Contains(ThresholdChoice(0.0625f, 0.0625f)));
}

// However much a threshold takes there is room, if need be at a larger one.
TEST_P(GradientsConformance, SampledRowsThatAreFlat) {
  for (const float threshold : {1e-30f, 0x1p-13f, 0x1p-10f}) {
    const Problem flat = WithLogits(std::vector<float>(9000, 0.0f), {0, 17, 8999, kIgnoredTarget, 4500});
    RunAndCompare(backend(), {Sampled(flat, threshold)});
  }
}

TEST_P(GradientsConformance, SampledAdversarialRows) {
  constexpr size_t kClasses = 1031;
  std::vector<float> one_class(kClasses, -40.0f);
  one_class[700] = 40.0f;
  std::vector<float> two_maxima(kClasses, 0.0f);
  two_maxima[3] = two_maxima[1030] = 20.0f;
  std::vector<float> tail(kClasses);
  for (size_t v = 0; v < kClasses; ++v) tail[v] = -static_cast<float>(v / 32) * 0.5f;
  for (const float threshold : {0x1p-12f, 0x1p-4f, 0.5f}) {
    RunAndCompare(backend(), {Sampled(WithLogits(one_class, {700, 0, 1030}), threshold)});
    RunAndCompare(backend(), {Sampled(WithLogits(two_maxima, {3, 1030, 512}), threshold)});
    RunAndCompare(backend(), {Sampled(WithLogits(tail, {1030, 1029, 0, 515}), threshold)});
    Problem capped = Sampled(WithLogits(tail, {1030, 1029, 0, 515}), threshold);
    capped.options.softcap = 10.0f;
    capped.options.label_smoothing = 0.2f;
    RunAndCompare(backend(), {capped});
  }
}

// A class at the threshold counts with its probability, or is taken almost surely: it makes no difference.
TEST_P(GradientsConformance, SampledAtAThresholdThatIsAProbability) {
  constexpr size_t kClasses = 64;
  Problem problem = WithLogits(std::vector<float>(kClasses, 0.0f), {0, 5, 63});
  for (size_t v = 0; v < kClasses; ++v) {
    for (size_t i = 1; i < 24; ++i) problem.weight[v * 24 + i] = 0.0f;  // every probability is 1/64
    problem.weight[v * 24 + 1] = v % 2 == 0 ? 0.0f : 1.0f;
  }
  for (SliceData& slice : problem.slices) {
    for (size_t n = 0; n < slice.targets.size(); ++n) slice.hidden[n * 24 + 1] = 0.0f;
  }
  for (const float scale : {1.0f, 0.37f, -3.0f}) {
    for (const float threshold : {1.0f / 128, 1.0f / 64}) {
      problem.slices.front().grad_scale = scale;
      const auto head = MakeHead(backend(), problem);
      ASSERT_NE(head, nullptr);
      const ChunkRun exact = RunChunk(*head, problem);
      const auto weight = ReadGradient(*head, Param::kWeight);
      ASSERT_TRUE(head->ZeroGradients().ok());
      const ChunkRun sampled = RunChunk(*head, Sampled(problem, threshold));
      ExpectGradients(sampled, Gradients::kSampled);
      const double tolerance = head->compute_dtype() == DType::kFloat32 ? 1e-5 : 2e-2;
      const auto got = ReadGradient(*head, Param::kWeight);
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_NEAR(got[i], weight[i], tolerance * std::abs(double{scale}));
      }
      // As much as rounding moves probabilities below the threshold.
      const double rounding = head->compute_dtype() == DType::kFloat32 ? 1e-4 : 2e-3;
      EXPECT_NEAR(sampled.slices[0].sums.sampling_variance, 0.0, rounding * double{scale} * double{scale});
      EXPECT_EQ(exact.slices[0].sums.squared_gradient, 0.0);
    }
  }
}

// With one class p - onehot is 0 and so is every gradient but that of a z-loss, of whatever kind and exactly.
TEST_P(BackendConformance, OneClassHasNoGradient) {
  for (const Norm norm : {Norm::kNone, Norm::kRmsNorm, Norm::kLayerNorm}) {
    for (const Gradients gradients :
         {Gradients::kExact, Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
      for (const bool with_options : {false, true}) {
        ProblemSpec spec = Plain({9, 30}, 40, 1);
        spec.config.norm = norm;
        spec.config.has_bias = true;
        spec.options.gradients = gradients;
        spec.ignored = 0.1;
        if (with_options) {
          spec.options.softcap = 5.0f;
          spec.options.label_smoothing = 0.3f;
          spec.options.logit_scale = 0.7f;
          spec.row_weights = spec.grad_loss = spec.grad_entropy = true;
        }
        const Problem problem = MakeProblem(spec, rng());
        SCOPED_TRACE(Describe(problem));
        const auto head = MakeHead(backend(), problem);
        ASSERT_NE(head, nullptr);
        const ChunkRun run = RunChunk(*head, problem);
        ASSERT_TRUE(run.done.ok()) << run.done;
        for (const SliceOutputs& slice : run.slices) {
          EXPECT_TRUE(AllZero(slice.grad_hidden));
          EXPECT_TRUE(AllZero(slice.target_logprob));
          EXPECT_TRUE(AllZero(slice.entropy));
        }
        ExpectZeroGradients(*head);
      }
    }
  }
}

// Retained rows, among them none at all, with gradients of lse and entropy that come later.
TEST_P(GradientsConformance, SampledInADeferredBackward) {
  for (const int64_t rows : {0, 1, 41}) {
    ProblemSpec spec = Sampled(Plain({rows, 5, 0}, 24, 300), 0.01f);
    spec.config.norm = Norm::kRmsNorm;
    spec.grad_loss = spec.grad_lse = spec.grad_entropy = true;
    Problem problem = MakeProblem(spec, rng());
    if (rows == 0) problem.slices = {problem.slices[0]};
    auto retained = backend().AllocateRetained(std::max<int64_t>(64, RetainedBytes(problem)));
    ASSERT_TRUE(retained.ok()) << retained.status();
    problem = WithClearSamples(problem);
    const auto head = MakeHead(backend(), problem);
    ASSERT_NE(head, nullptr);
    Problem forward = problem;
    forward.accumulate_gradients = false;
    for (SliceData& slice : forward.slices) slice.want_grad_hidden = false;
    ASSERT_TRUE(RunChunk(*head, forward, {.retained = retained->get()}).done.ok());
    const ChunkRun got = RunChunk(*head, problem, {.retained = retained->get(), .take_retained = true});
    ASSERT_TRUE(got.done.ok()) << got.done;
    reference::ParamGradients gradients = reference::ZeroGradients(problem.config);
    const Problem computed = AsComputed(problem, got);
    const auto want = ComputeReference(computed, &gradients);
    for (size_t i = 0; i < want.size(); ++i) {
      ExpectSliceMatches(head->compute_dtype(), computed, computed.slices[i], want[i], got.slices[i]);
    }
    ExpectGradientsMatch(*head, gradients, MaxAbsLogit(want));
  }
}

// ---- Means of sampled gradients ----
// What sampled gradients are for: without bias, with the spread that is predicted, and a function of the
// random numbers of each row alone.

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

// Over kSeeds runs of a problem whose head has a bias: the means of all gradients are the exact
// ones, and as close to these as is predicted.
void ExpectExactOnAverage(Backend& backend, Problem problem, Rng& rng) {
  SCOPED_TRACE(Describe(problem));
  const auto head = MakeHead(backend, problem);
  ASSERT_NE(head, nullptr);
  const auto teacher = problem.teacher.empty() ? nullptr : MakeHead(backend, problem.teacher.front());
  Mean hidden, weight, bias;
  ChunkRun run;
  for (int i = 0; i < kSeeds; ++i) {
    for (SliceData& slice : problem.slices) slice.sample_seed = rng();
    ASSERT_TRUE(head->ZeroGradients().ok());
    run = RunChunk(*head, problem, {.teacher = teacher.get()});
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
    ExpectExactOnAverage(backend(), MakeProblem(spec, rng()), rng());
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

// ---- Rows with a teacher ----

TEST_P(DistillationConformance, SampledWithEachDivergence) {
  if (!Distils()) return;
  for (const Divergence divergence : kDivergences) {
    for (const float threshold : {1e-30f, 0.02f, 1.0f}) {
      Run(Sampled(Distilled({17, 20}, 37, 101, 30, {.divergence = divergence}), threshold));
    }
    for (const float temperature : {0.5f, 3.0f}) {
      const Distillation mixture = {
          .divergence = divergence, .temperature = temperature, .weight = 0.7f, .target_weight = 0.3f};
      Run(Sampled(Distilled({40}, 24, 210, 56, mixture), 0.01f));
    }
  }
}

TEST_P(DistillationConformance, SampledShapesThatNoTileDivides) {
  if (!Distils()) return;
  for (const auto& [rows, hidden, vocab] : kOddShapes) {
    const ProblemSpec spec =
        Distilled({rows}, hidden, vocab, hidden + 3, {.divergence = Divergence::kForwardKl});
    RunAndCompare(backend(), {MakeProblem(Sampled(spec, 0x1p-8f), rng())});
  }
}

TEST_P(DistillationConformance, SampledWithOptionsOfTheLossWithTargets) {
  if (!Distils()) return;
  const ProblemSpec plain =
      Sampled(Distilled({17, 20}, 37, 101, 30,
                        {.divergence = Divergence::kForwardKl, .weight = 0.5f, .target_weight = 0.5f}),
              0.02f);
  for (ProblemSpec spec : EachOptionAlone(plain)) {
    if (spec.grad_lse || spec.grad_entropy) continue;
    spec.accumulate_mask = true;
    Run(spec);
  }
  ProblemSpec capped = plain;
  capped.options.softcap = 6.0f;
  capped.options.label_smoothing = 0.1f;
  capped.options.distillation.teacher_softcap = 9.0f;
  Run(capped);
}

// With a limit that no threshold keeps, and with one that all do.
TEST_P(DistillationConformance, SampledWhereThePredictedErrorIsSmall) {
  if (!Distils()) return;
  for (const Divergence divergence : {Divergence::kForwardKl, Divergence::kReverseKl}) {
    for (const float limit : {0.0f, 100.0f}) {
      ProblemSpec spec = Sampled(Distilled({30}, 24, 210, 56, {.divergence = divergence}), 0.02f);
      spec.options.gradients = Gradients::kAuto;
      spec.options.max_gradient_error = limit;
      const Problem problem = MakeProblem(spec, rng());
      RunAndCompare(backend(), {problem});
      const auto head = MakeHead(backend(), problem);
      const auto teacher = MakeHead(backend(), problem.teacher.front());
      ExpectGradients(RunChunk(*head, problem, {.teacher = teacher.get()}),
                      limit == 0.0f || GetParam().exact_distilled ? Gradients::kExact : Gradients::kSampled);
    }
  }
}

TEST_P(DistillationConformance, SampledGradientsAreExactOnAverage) {
  if (!Distils() || GetParam().exact_distilled) return;
  for (const Divergence divergence : kDivergences) {
    ProblemSpec spec = Distilled({60, 40}, 24, 700, 32, {.divergence = divergence, .temperature = 1.5f});
    spec.config.has_bias = true;
    spec.options.gradients = Gradients::kSampled;
    spec.options.sample_threshold = 0.02f;
    spec.logit_deviation = 2.0f;
    ExpectExactOnAverage(backend(), MakeProblem(spec, rng()), rng());
  }
}

}  // namespace lossd::kernels::testing
