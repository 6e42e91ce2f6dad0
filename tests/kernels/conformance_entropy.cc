// SPDX-License-Identifier: Apache-2.0
// Gradients of entropies, as an entropy bonus in reinforcement learning has them: rows with and without one
// in the same chunk, of any sign, with every other option.
#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/clear_samples.h"
#include "tests/kernels/comparison.h"

namespace lossd::kernels::testing {
namespace {

// dL/dentropy of every kind: none, of both signs, large and small beside the other gradients.
void MixEntropies(Problem& problem, Rng& rng) {
  for (SliceData& slice : problem.slices) {
    slice.grad_entropy.resize(slice.targets.size());
    for (float& gradient : slice.grad_entropy) {
      const float kinds[] = {0.0f, 0.0f, Uniform(rng, -1.0f, 1.0f), -5.0f, 4.0f, 1e-3f};
      gradient = kinds[UniformInt(rng, 0, 5)];
    }
  }
}

Problem WithEntropies(const ProblemSpec& spec, Rng& rng) {
  Problem problem = MakeProblem(spec, rng);
  MixEntropies(problem, rng);
  return problem;
}

// `plain` with upstream gradients of the loss and lse too, once for each other option.
std::vector<ProblemSpec> WithEachOption(ProblemSpec plain) {
  plain.grad_loss = plain.grad_lse = true;
  std::vector<ProblemSpec> specs = EachOptionAlone(plain);
  specs.emplace_back(plain).options.logit_scale = -0.5f;
  specs.emplace_back(plain).accumulate_mask = true;
  for (const float softcap : {1.0f, 2.0f, 4.0f, 30.0f}) {  // of logits on both sides of most of them
    ProblemSpec& capped = specs.emplace_back(plain);
    capped.logit_deviation = 8.0f;
    capped.options.softcap = softcap;
    capped.config.has_bias = true;
  }
  ProblemSpec& all = specs.emplace_back(plain);
  all.config.has_bias = all.config.has_class_weights = all.options.use_class_weights = true;
  all.config.norm = Norm::kRmsNorm;
  all.options.softcap = 10.0f;
  all.options.z_loss = 0.01f;
  all.options.logit_scale = 0.7f;
  all.row_weights = all.accumulate_mask = true;
  specs.emplace_back(all).options.label_smoothing = 0.1f;
  return specs;
}

std::string LossChoice(const ChunkRun& run) {
  for (const Choice& choice : run.choices) {
    if (choice.what == "loss") return choice.choice + ": " + choice.reason;
  }
  return "";
}

}  // namespace

TEST_P(BackendConformance, EntropiesWithEachOption) {
  for (const ProblemSpec& spec : WithEachOption(Plain({9, 30}, 37, 300))) {
    RunAndCompare(backend(), {WithEntropies(spec, rng())});
  }
}

TEST_P(BackendConformance, EntropiesOfShapesThatNoTileDivides) {
  for (const auto& [rows, hidden, vocab] : kOddShapes) {
    for (const float softcap : {0.0f, 3.0f}) {
      ProblemSpec spec = Plain({rows}, hidden, vocab);
      spec.options.softcap = softcap;
      RunAndCompare(backend(), {WithEntropies(spec, rng())});
    }
  }
}

TEST_P(GradientsConformance, EntropiesOfSampledRows) {
  for (const float softcap : {0.0f, 3.0f}) {
    for (const float threshold : {1e-30f, 0.003f, 0.1f}) {
      ProblemSpec spec = Plain({9, 30}, 37, 600);
      spec.options.softcap = softcap;
      spec.options.gradients = Gradients::kSampled;
      spec.options.sample_threshold = threshold;
      spec.grad_loss = spec.grad_lse = true;
      RunAndCompare(backend(), {WithEntropies(spec, rng())});
    }
  }
}

// Filtered gradients are exact in such chunks, and auto decides.
TEST_P(GradientsConformance, EntropiesWithOtherGradients) {
  for (const Gradients gradients : {Gradients::kFiltered, Gradients::kAuto}) {
    for (const float max_error : {0.0f, 1e6f}) {
      ProblemSpec spec = Plain({9, 30}, 37, 600);
      spec.options.gradients = gradients;
      spec.options.max_gradient_error = max_error;
      RunAndCompare(backend(), {WithEntropies(spec, rng())});
    }
  }
}

// One class with nearly all the mass, two with half of it each, targets in the tail up to 128 nats below the
// rest, all equal.
TEST_P(BackendConformance, EntropiesOfAdversarialRows) {
  constexpr size_t kClasses = 1031;
  std::vector<float> nearly_one(kClasses, -6.0f);
  nearly_one[700] = 6.0f;
  std::vector<float> two_maxima(kClasses, 0.0f);
  two_maxima[3] = two_maxima[1030] = 10.0f;
  std::vector<float> tail(kClasses);
  for (size_t v = 0; v < kClasses; ++v) tail[v] = -static_cast<float>(v / 32) * 4.0f;
  const Problem problems[] = {WithLogits(nearly_one, {700, 0, 1030}), WithLogits(two_maxima, {3, 1030, 512}),
                              WithLogits(tail, {1030, 1029, 0, 515}),
                              WithLogits(std::vector<float>(33, 5.0f), {0, 32})};
  for (Problem problem : problems) {
    const size_t rows = problem.slices.front().targets.size();
    for (const float softcap : {0.0f, 100.0f}) {
      for (const float entropy : {1.0f, -1.0f}) {
        problem.options.softcap = softcap;
        problem.slices.front().grad_entropy.assign(rows, entropy);
        RunAndCompare(backend(), {problem});
      }
    }
  }
}

// Then the entropy is 0, and so is its gradient, whether the class is the target or not.
TEST_P(BackendConformance, EntropiesOfOneClassWithAllTheMass) {
  std::vector<float> one_class(1031, -40.0f);
  one_class[700] = 40.0f;
  Problem problem = WithLogits(one_class, {700, 0, 1030});
  problem.slices.front().grad_loss.assign(3, 0.0f);
  problem.slices.front().grad_entropy.assign(3, -2.0f);
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  const ChunkRun run = RunChunk(*head, problem);
  ASSERT_TRUE(run.done.ok()) << run.done;
  constexpr double kRounding = 1e-5;  // of exponents of this size, in fp32
  EXPECT_LE(NormOf(run.slices[0].entropy), kRounding);
  EXPECT_LE(NormOf(run.slices[0].grad_hidden), 40.0 * 2.0 * kRounding);
}

// A row that is not finite fails its slice and leaves the others alone.
TEST_P(BackendConformance, EntropiesBesideRowsThatFail) {
  ProblemSpec spec = Plain({12, 12}, 24, 300);
  spec.ignored = 0.0;
  Problem problem = WithEntropies(spec, rng());
  problem.slices.front().grad_entropy[5] = kInf;
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  const ChunkRun run = RunChunk(*head, problem);
  ASSERT_TRUE(run.done.ok()) << run.done;
  EXPECT_EQ(run.slices[0].first_nonfinite_row, 5);
  Problem rest = problem;
  rest.slices.erase(rest.slices.begin());
  reference::ParamGradients gradients = reference::ZeroGradients(rest.config);
  const auto want = ComputeReference(rest, &gradients);
  ExpectSliceMatches(head->compute_dtype(), rest, rest.slices.front(), want.front(), run.slices[1]);
  ExpectGradientsMatch(*head, gradients, MaxAbsLogit(want));
}

// Nothing about how a loss is computed depends on whether its entropy has a gradient.
TEST_P(BackendConformance, EntropiesDoNotChangeHowLossesAreComputed) {
  for (const float softcap : {0.0f, 5.0f}) {
    ProblemSpec spec = Plain({600}, 24, 300);
    spec.options.softcap = softcap;
    spec.config.has_bias = true;
    Problem problem = MakeProblem(spec, rng());
    const auto head = MakeHead(backend(), problem);
    ASSERT_NE(head, nullptr);
    const ChunkRun without = RunChunk(*head, problem);
    MixEntropies(problem, rng());
    const ChunkRun with = RunChunk(*head, problem);
    EXPECT_EQ(LossChoice(with), LossChoice(without));
  }
}

TEST_P(BackendConformance, EntropiesInADeferredBackward) {
  for (const Norm norm : {Norm::kNone, Norm::kRmsNorm}) {
    for (const float softcap : {0.0f, 5.0f}) {
      ProblemSpec spec = Plain({41, 5}, 24, 300);
      spec.config.norm = norm;
      spec.options.softcap = softcap;
      spec.grad_loss = spec.grad_lse = true;
      const Problem problem = WithEntropies(spec, rng());
      auto retained = backend().AllocateRetained(std::max<int64_t>(64, RetainedBytes(problem)));
      ASSERT_TRUE(retained.ok()) << retained.status();
      const auto head = MakeHead(backend(), problem);
      ASSERT_NE(head, nullptr);
      Problem forward = problem;
      forward.accumulate_gradients = false;
      for (SliceData& slice : forward.slices) {
        slice.want_grad_hidden = false;
        slice.grad_loss.clear();
        slice.grad_lse.clear();
        slice.grad_entropy.clear();
      }
      ASSERT_TRUE(RunChunk(*head, forward, {.retained = retained->get()}).done.ok());
      const ChunkRun got = RunChunk(*head, problem, {.retained = retained->get(), .take_retained = true});
      ASSERT_TRUE(got.done.ok()) << got.done;
      reference::ParamGradients gradients = reference::ZeroGradients(problem.config);
      const auto want = ComputeReference(problem, &gradients);
      for (size_t i = 0; i < want.size(); ++i) {
        ExpectSliceMatches(head->compute_dtype(), problem, problem.slices[i], want[i], got.slices[i]);
      }
      ExpectGradientsMatch(*head, gradients, MaxAbsLogit(want));
    }
  }
}

}  // namespace lossd::kernels::testing
