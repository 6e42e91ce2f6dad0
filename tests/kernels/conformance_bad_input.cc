// SPDX-License-Identifier: Apache-2.0
// What a chunk can get wrong: it, or the slice at fault, fails by itself and changes nothing else.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/comparison.h"

namespace lossd::kernels::testing {
namespace {

using ::testing::HasSubstr;

}  // namespace

// The slice with the bad row fails with its index; the others and the accumulators are as if it were absent.
TEST_P(BackendConformance, NonFiniteRowFailsItsSliceAlone) {
  struct Case {
    float bad;
    float softcap;
    Norm norm;
  };
  const Case cases[] = {{kNan, 0.0f, Norm::kNone},       {kInf, 0.0f, Norm::kNone},
                        {-kInf, 0.0f, Norm::kLayerNorm}, {kNan, 0.0f, Norm::kRmsNorm},
                        {kInf, 20.0f, Norm::kNone},      {kNan, 20.0f, Norm::kLayerNorm}};
  for (const Case& c : cases) {
    ProblemSpec spec = Plain({10, 12, 7}, 29, 83);
    spec.config.norm = c.norm;
    spec.config.has_bias = true;
    spec.options.softcap = c.softcap;
    spec.ignored = 0.0;
    Problem problem = MakeProblem(spec, rng());
    Problem without = problem;
    without.slices[1].targets.assign(12, kIgnoredTarget);
    problem.slices[1].hidden[5 * 29 + 3] = c.bad;
    problem.slices[1].hidden[9 * 29] = c.bad;
    SCOPED_TRACE(Describe(problem));
    const auto head = MakeHead(backend(), problem);
    ASSERT_NE(head, nullptr);
    const ChunkRun run = RunChunk(*head, problem);
    ASSERT_TRUE(run.results.ok()) << run.results;
    ASSERT_TRUE(run.done.ok()) << run.done;
    EXPECT_EQ(run.slices[1].first_nonfinite_row, 5);
    reference::ParamGradients gradients = reference::ZeroGradients(problem.config);
    const auto want = ComputeReference(without, &gradients);
    for (size_t i : {0, 2}) {
      ExpectSliceMatches(head->compute_dtype(), without, without.slices[i], want[i], run.slices[i]);
    }
    ExpectGradientsMatch(*head, gradients, MaxAbsLogit(want));
  }
}

// Whatever order a backend looks at its rows in.
TEST_P(BackendConformance, TheFirstOfSeveralNonFiniteRowsIsNamed) {
  ProblemSpec spec = Plain({6, 6, 6}, 16, 40);
  spec.ignored = 0.0;
  Problem problem = MakeProblem(spec, rng());
  const std::vector<std::vector<int64_t>> bad = {{0, 3, 5}, {2, 4}, {}};
  for (size_t i = 0; i < bad.size(); ++i) {
    for (const int64_t row : bad[i]) problem.slices[i].hidden[static_cast<size_t>(row * 16 + 1)] = kNan;
    problem.slices[i].accumulate = {1, 0, 0, 1, 1, 0};
  }
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  const ChunkRun run = RunChunk(*head, problem);
  ASSERT_TRUE(run.results.ok()) << run.results;
  EXPECT_EQ(run.slices[0].first_nonfinite_row, 0);
  EXPECT_EQ(run.slices[1].first_nonfinite_row, 2);
  EXPECT_EQ(run.slices[2].first_nonfinite_row, -1);
}

TEST_P(BackendConformance, NonFiniteIgnoredRowIsNoFailure) {
  ProblemSpec spec = Plain({6}, 12, 20);
  spec.ignored = 0.0;
  Problem problem = MakeProblem(spec, rng());
  problem.slices[0].targets[2] = kIgnoredTarget;
  Problem poisoned = problem;
  std::fill_n(poisoned.slices[0].hidden.begin() + 2 * 12, 12, kNan);
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  reference::ParamGradients gradients = reference::ZeroGradients(problem.config);
  const auto want = ComputeReference(problem, &gradients);
  const ChunkRun run = RunChunk(*head, poisoned);
  ASSERT_TRUE(run.done.ok()) << run.done;
  ExpectSliceMatches(head->compute_dtype(), problem, problem.slices[0], want[0], run.slices[0]);
  ExpectGradientsMatch(*head, gradients, MaxAbsLogit(want));
}

TEST_P(BackendConformance, NonFiniteUpstreamNeverReachesTheAccumulators) {
  for (int which = 0; which < 4; ++which) {
    ProblemSpec spec = Plain({6, 6}, 12, 20);
    spec.ignored = 0.0;
    Problem problem = MakeProblem(spec, rng());
    SliceData& slice = problem.slices[1];
    std::vector<float>* const fields[] = {&slice.row_weights, &slice.grad_loss, &slice.grad_lse,
                                          &slice.grad_entropy};
    fields[which]->assign(6, 1.0f);
    (*fields[which])[4] = kNan;
    const auto head = MakeHead(backend(), problem);
    ASSERT_NE(head, nullptr);
    const ChunkRun run = RunChunk(*head, problem);
    EXPECT_EQ(run.slices[1].first_nonfinite_row, 4);
    EXPECT_EQ(run.slices[0].first_nonfinite_row, -1);
    for (const std::vector<float>& gradient : AllGradients(*head)) EXPECT_TRUE(AllFinite(gradient));
  }
}

TEST_P(BackendConformance, BadChunksAreRefusedAndChangeNothing) {
  ProblemSpec spec = Plain({4, 5}, 8, 30);
  const Problem good = MakeProblem(spec, rng());
  const auto head = MakeHead(backend(), good);
  ASSERT_NE(head, nullptr);
  struct Case {
    std::function<void(Problem&)> change;
    const char* message;
  };
  const int64_t too_many = head->chunk_rows() + 1;
  const Case cases[] = {
      {[](Problem& p) { p.slices[1].targets[3] = 30; },
       "slices[1].targets[3] must be in [0, 30) or -1, got 30"},
      {[](Problem& p) { p.slices[0].targets[0] = -2; }, "got -2"},
      {[](Problem& p) { p.slices[0].targets[1] = std::numeric_limits<int32_t>::max(); }, "got 2147483647"},
      {[](Problem& p) { p.options.label_smoothing = 1.5f; }, "label_smoothing must be in [0, 1], got 1.5"},
      {[](Problem& p) { p.options.softcap = -1.0f; }, "softcap"},
      {[](Problem& p) { p.options.logit_scale = kNan; }, "logit_scale"},
      {[](Problem& p) { p.options.z_loss = -0.5f; }, "z_loss"},
      {[](Problem& p) { p.options.gradients = static_cast<Gradients>(4); },
       "gradients must be exact, filtered, sampled or auto, got 4"},
      {[](Problem& p) { p.options.use_class_weights = true; }, "use_class_weights"},
      {[](Problem& p) { p.slices[1].grad_scale = kInf; }, "slices[1].grad_scale must be finite, got inf"},
      {[&](Problem& p) {
         p.slices[1].targets.assign(static_cast<size_t>(too_many), 0);
         p.slices[1].hidden.assign(static_cast<size_t>(too_many * 8), 0.0f);
       },
       "a chunk holds at most"},
  };
  for (const Case& c : cases) {
    Problem bad = good;
    c.change(bad);
    const ChunkRun run = RunChunk(*head, bad);
    EXPECT_EQ(run.results.code(), absl::StatusCode::kInvalidArgument) << run.results;
    EXPECT_EQ(run.done.code(), absl::StatusCode::kInvalidArgument) << run.done;
    EXPECT_THAT(std::string(run.results.message()), HasSubstr(c.message));
    ExpectZeroGradients(*head);
  }
  reference::ParamGradients gradients = reference::ZeroGradients(good.config);
  const auto want = ComputeReference(good, &gradients);
  ASSERT_TRUE(RunChunk(*head, good).done.ok());
  ExpectGradientsMatch(*head, gradients, MaxAbsLogit(want));
}

}  // namespace lossd::kernels::testing
