// SPDX-License-Identifier: Apache-2.0
// Filtered gradients.
#include <algorithm>
#include <vector>

#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/comparison.h"

namespace lossd::kernels::testing {

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

}  // namespace lossd::kernels::testing
