// SPDX-License-Identifier: Apache-2.0
// Objectives in the place of the cross-entropy (kernels/objective.h): every one against the reference, alone
// and with all other options, and rows whose numbers are extreme.
#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/comparison.h"

namespace lossd::kernels::testing {
namespace {

using ::testing::HasSubstr;

// In 16-bit numbers a ratio is off by some percent, so the bounds of the clip are far apart.
Objective WithClip(ObjectiveKind kind, DType compute) {
  Objective objective{.kind = kind};
  if (!HasClip(kind)) return objective;
  const bool wide = compute != DType::kFloat32;
  objective.clip_low = wide ? 0.5f : 0.2f;
  objective.clip_high = wide ? 1.0f : 0.3f;
  return objective;
}

std::vector<Objective> AllObjectives(DType compute) {
  std::vector<Objective> all;
  for (int kind = 1; kind <= static_cast<int>(kLastObjective); ++kind) {
    all.push_back(WithClip(static_cast<ObjectiveKind>(kind), compute));
  }
  Objective dual = WithClip(ObjectiveKind::kPpo, compute);
  dual.dual_clip = 2.5f;
  all.push_back(dual);
  for (const KlEstimator kl : {KlEstimator::kK1, KlEstimator::kK2, KlEstimator::kK3}) {
    Objective grpo = WithClip(ObjectiveKind::kPpo, compute);
    grpo.kl = kl;
    grpo.kl_coef = 0.3f;
    all.push_back(grpo);
  }
  Objective entropy = WithClip(ObjectiveKind::kReinforce, compute);
  entropy.entropy_bonus = 0.25f;
  all.push_back(entropy);
  return all;
}

Objective RandomObjective(DType compute, Rng& rng) {
  const int last = static_cast<int>(kLastObjective);
  Objective objective = WithClip(static_cast<ObjectiveKind>(UniformInt(rng, 1, last)), compute);
  if (objective.kind == ObjectiveKind::kPpo && Chance(rng, 0.3)) objective.dual_clip = 3.0f;
  if (Chance(rng, 0.4)) {
    objective.kl = static_cast<KlEstimator>(UniformInt(rng, 0, 2));
    objective.kl_coef = Uniform(rng, 0.01f, 0.5f);
  }
  if (Chance(rng, 0.3)) objective.entropy_bonus = Uniform(rng, -0.2f, 0.5f);
  return objective;
}

}  // namespace

TEST_P(BackendConformance, EachObjectiveAlone) {
  for (const Objective& objective : AllObjectives(GetParam().compute)) {
    RunAndCompare(backend(), {WithObjective(MakeProblem(Plain({23, 31}, 37, 211), rng()), objective, rng())});
  }
}

TEST_P(BackendConformance, ObjectivesOfShapesThatNoTileDivides) {
  for (const auto& [rows, hidden, vocab] : kOddShapes) {
    const Objective objective = RandomObjective(GetParam().compute, rng());
    RunAndCompare(backend(),
                  {WithObjective(MakeProblem(Plain({rows}, hidden, vocab), rng()), objective, rng())});
  }
}

TEST_P(BackendConformance, ObjectivesWithAllOtherOptionsOverSeveralChunks) {
  for (int repeat = 0; repeat < 12; ++repeat) {
    ProblemSpec spec = Random(40, 24 + 9 * repeat, 61 + 53 * repeat);
    spec.options.label_smoothing = 0.0f;
    spec.options.use_class_weights = false;
    const Objective objective = RandomObjective(GetParam().compute, rng());
    std::vector<Problem> chunks = {WithObjective(MakeProblem(spec, rng()), objective, rng())};
    Problem next = chunks.front();
    next.slices = {MakeSlice(spec, UniformInt(rng(), 1, 40), rng())};
    next.slices.front().want_grad_hidden = Chance(rng(), 0.5);
    chunks.push_back(WithObjective(next, objective, rng()));
    RunAndCompare(backend(), chunks);
  }
}

TEST_P(GradientsConformance, ObjectivesWithGradientsOfEveryKind) {
  for (const Gradients gradients : {Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
    for (const Objective& objective : AllObjectives(GetParam().compute)) {
      ProblemSpec spec = Plain({33, 30}, 40, 700);
      spec.options.gradients = gradients;
      spec.options.filter_epsilon = 1e-3f;
      spec.options.sample_threshold = 5e-3f;
      spec.options.max_gradient_error = 1e6f;
      spec.row_weights = true;
      RunAndCompare(backend(), {WithObjective(MakeProblem(spec, rng()), objective, rng())});
    }
  }
}

TEST_P(BackendConformance, ObjectivesWithoutGradients) {
  for (const Objective& objective : AllObjectives(GetParam().compute)) {
    Problem problem = WithObjective(MakeProblem(Plain({17, 20}, 37, 101), rng()), objective, rng());
    problem.accumulate_gradients = false;
    for (SliceData& slice : problem.slices) slice.want_grad_hidden = false;
    RunAndCompare(backend(), {problem});
  }
}

// As torch has it: no part of a row that is clipped has a gradient but the divergence and the bonus.
TEST_P(BackendConformance, ClippedRowsHaveNoGradient) {
  ProblemSpec spec = Plain({24}, 19, 90);
  spec.ignored = 0.0;
  Problem problem = WithObjective(MakeProblem(spec, rng()),
                                  {.kind = ObjectiveKind::kPpo, .clip_low = 0.2f, .clip_high = 0.2f}, rng());
  SliceData& slice = problem.slices.front();
  for (size_t row = 0; row < slice.targets.size(); ++row) {
    const bool above = row % 2 == 0;
    slice.advantages[row] = above ? 1.0f : -1.0f;
    slice.old_logprobs[row] = above ? -60.0f : 40.0f;
  }
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  const ChunkRun run = RunChunk(*head, problem);
  ASSERT_TRUE(run.done.ok()) << run.done;
  EXPECT_TRUE(AllZero(run.slices[0].grad_hidden));
  ExpectZeroGradients(*head);
  EXPECT_EQ(run.slices[0].sums.objective.clipped_rows, 24);
  for (size_t row = 0; row < slice.targets.size(); ++row) {
    EXPECT_FLOAT_EQ(run.slices[0].loss[row], row % 2 == 0 ? -1.2f : 0.8f) << "row " << row;
  }
}

// Rows of weight 0 are in no sum, and their numbers are not looked at.
TEST_P(BackendConformance, AbsentRowsHaveNoObjective) {
  ProblemSpec spec = Plain({20, 12}, 24, 130);
  spec.ignored = 0.1;
  Objective objective{.kind = ObjectiveKind::kImportanceSampling, .kl_coef = 0.2f, .entropy_bonus = 0.1f};
  Problem problem = WithObjective(MakeProblem(spec, rng()), objective, rng());
  for (SliceData& slice : problem.slices) {
    slice.row_weights.assign(slice.targets.size(), 1.0f);
    for (size_t row = 0; row < slice.targets.size(); row += 3) {
      slice.row_weights[row] = 0.0f;
      slice.old_logprobs[row] = -1e30f;
      slice.ref_logprobs[row] = 1e30f;
    }
  }
  RunAndCompare(backend(), {problem});
}

// A ratio, or the exponential of k3, that fp32 has no number for.
TEST_P(BackendConformance, RowsWhoseRatioOverflowsAreNamed) {
  for (const bool of_reference : {false, true}) {
    for (const bool advantage : {false, true}) {
      ProblemSpec spec = Plain({11, 9}, 19, 45);
      spec.ignored = 0.0;
      const Objective objective{.kind = ObjectiveKind::kPpo,
                                .clip_low = 0.2f,
                                .clip_high = 0.2f,
                                .kl_coef = of_reference ? 0.1f : 0.0f};
      Problem problem = WithObjective(MakeProblem(spec, rng()), objective, rng());
      (of_reference ? problem.slices[1].ref_logprobs[4] : problem.slices[1].old_logprobs[4]) =
          of_reference ? 200.0f : -200.0f;
      problem.slices[1].advantages[4] = advantage ? 1.0f : -1.0f;
      const auto head = MakeHead(backend(), problem);
      ASSERT_NE(head, nullptr);
      const ChunkRun run = RunChunk(*head, problem);
      ASSERT_TRUE(run.results.ok()) << run.results;
      EXPECT_EQ(run.slices[0].first_nonfinite_row, -1);
      EXPECT_EQ(run.slices[1].first_nonfinite_row, 4);
      Problem first = problem;
      first.slices.resize(1);
      reference::ParamGradients gradients = reference::ZeroGradients(problem.config);
      const auto want = ComputeReference(first, &gradients);
      ExpectGradientsMatch(*head, gradients, MaxAbsLogit(want));
    }
  }
}

TEST_P(BackendConformance, ObjectivesWithoutTheirNumbersAreRefused) {
  const Objective objective{
      .kind = ObjectiveKind::kCispo, .clip_low = 1.0f, .clip_high = 4.0f, .kl_coef = 0.1f};
  const Problem whole = WithObjective(MakeProblem(Plain({5}, 8, 20), rng()), objective, rng());
  const auto head = MakeHead(backend(), whole);
  ASSERT_NE(head, nullptr);
  const auto message = [&](auto change) {
    Problem problem = whole;
    change(problem.slices.front());
    const ChunkRun run = RunChunk(*head, problem);
    EXPECT_EQ(run.results.code(), absl::StatusCode::kInvalidArgument);
    return std::string(run.results.message());
  };
  EXPECT_THAT(message([](SliceData& s) { s.advantages.clear(); }), HasSubstr("slices[0].advantages"));
  EXPECT_THAT(message([](SliceData& s) { s.old_logprobs.clear(); }), HasSubstr("slices[0].old_logprobs"));
  EXPECT_THAT(message([](SliceData& s) { s.ref_logprobs.clear(); }), HasSubstr("slices[0].ref_logprobs"));
  ExpectZeroGradients(*head);
}

}  // namespace lossd::kernels::testing
