// SPDX-License-Identifier: Apache-2.0
// Sampled gradients, element by element with the random numbers of the reference.
#include <algorithm>
#include <cmath>
#include <vector>

#include "gmock/gmock.h"
#include "kernels/decision.h"
#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/clear_samples.h"
#include "tests/kernels/comparison.h"

namespace lossd::kernels::testing {
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

}  // namespace lossd::kernels::testing
