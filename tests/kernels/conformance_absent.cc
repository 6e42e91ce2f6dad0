// SPDX-License-Identifier: Apache-2.0
// Rows of weight 0 are absent: they have loss 0 and gradient 0, and nothing that their hidden states hold
// reaches any sum. Where these are finite, the other row results are those of any row.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/clear_samples.h"
#include "tests/kernels/comparison.h"

namespace lossd::kernels::testing {
namespace {

// Weight 0 for each row with this probability, else a random one.
void MakeAbsent(Problem& problem, double probability, Rng& rng) {
  for (SliceData& slice : problem.slices) {
    slice.row_weights.clear();
    for (size_t i = 0; i < slice.targets.size(); ++i) {
      slice.row_weights.push_back(Chance(rng, probability) ? 0.0f : Uniform(rng, 0.5f, 2.0f));
    }
  }
}

bool IsAbsentRow(const SliceData& slice, size_t row) {
  return slice.targets[row] != kIgnoredTarget && slice.row_weights[row] == 0.0f;
}

// Hidden states of absent rows that have no finite logit, each of another kind.
Problem Poisoned(Problem problem) {
  const float kinds[] = {kNan, kInf, -kInf};
  size_t next = 0;
  const auto d = static_cast<size_t>(problem.config.hidden_size);
  for (SliceData& slice : problem.slices) {
    for (size_t row = 0; row < slice.targets.size(); ++row) {
      if (!IsAbsentRow(slice, row)) continue;
      const float bad = kinds[next++ % 3];
      for (size_t i = 0; i < d; ++i) slice.hidden[row * d + i] = i % 2 == 0 || !std::isinf(bad) ? bad : -bad;
    }
  }
  return problem;
}

// Checks what poisoned rows say, and puts what the same rows say with finite hidden states in its place.
void TakePoisoned(const Problem& problem, const SliceData& slice, const reference::Result& want,
                  SliceOutputs& got) {
  const auto d = static_cast<size_t>(problem.config.hidden_size);
  for (size_t row = 0; row < slice.targets.size(); ++row) {
    if (!IsAbsentRow(slice, row)) continue;
    EXPECT_EQ(got.loss[row], 0.0f) << "row " << row;
    EXPECT_TRUE(std::isnan(got.lse[row])) << "row " << row << " " << got.lse[row];
    EXPECT_TRUE(std::isnan(got.entropy[row])) << "row " << row << " " << got.entropy[row];
    EXPECT_TRUE(std::isnan(got.target_logprob[row])) << "row " << row << " " << got.target_logprob[row];
    EXPECT_EQ(got.argmax[row], -1) << "row " << row;
    for (size_t i = 0; slice.want_grad_hidden && i < d; ++i) ASSERT_EQ(got.grad_hidden[row * d + i], 0.0f);
    got.lse[row] = static_cast<float>(want.lse[row]);
    got.entropy[row] = static_cast<float>(want.entropy[row]);
    got.target_logprob[row] = static_cast<float>(want.target_logprob[row]);
    got.argmax[row] = want.argmax[row];
    got.sums.entropy += want.entropy[row];
    got.sums.correct_rows += want.argmax[row] == slice.targets[row] ? 1 : 0;
  }
}

// Runs the problem with absent rows that are not finite, and compares all but their results with the
// reference.
void RunPoisonedAndCompare(Backend& backend, const Problem& asked) {
  SCOPED_TRACE(Describe(asked));
  const auto head = MakeHead(backend, asked);
  ASSERT_NE(head, nullptr);
  ChunkRun run = RunChunk(*head, Poisoned(asked));
  ASSERT_TRUE(run.results.ok()) << run.results;
  ASSERT_TRUE(run.done.ok()) << run.done;
  const Problem problem = AsComputed(asked, run);
  reference::ParamGradients gradients = reference::ZeroGradients(problem.config);
  const auto want = ComputeReference(problem, &gradients);
  for (size_t i = 0; i < want.size(); ++i) {
    TakePoisoned(problem, problem.slices[i], want[i], run.slices[i]);
    ExpectSliceMatches(head->compute_dtype(), problem, problem.slices[i], want[i], run.slices[i]);
  }
  ExpectGradientsMatch(*head, gradients, MaxAbsLogit(want));
}

std::vector<ProblemSpec> AbsentSpecs(ProblemSpec plain) {
  std::vector<ProblemSpec> specs = EachOptionAlone(plain);
  // Those whose upstream gradients of lse or entropy make rows of weight 0 present.
  std::erase_if(specs, [](const ProblemSpec& spec) { return spec.grad_lse || spec.grad_entropy; });
  ProblemSpec& all = specs.emplace_back(plain);
  all.config.has_bias = all.accumulate_mask = true;
  all.config.norm = Norm::kLayerNorm;
  all.options = {.softcap = 10.0f, .label_smoothing = 0.1f, .z_loss = 0.01f};
  return specs;
}

}  // namespace

// Those with an upstream gradient of lse or entropy have that.
TEST_P(BackendConformance, RowsOfWeightZeroBesideOthers) {
  for (const ProblemSpec& spec : EachOptionAlone(Plain({17, 20}, 37, 101))) {
    Problem problem = MakeProblem(spec, rng());
    MakeAbsent(problem, 0.5, rng());
    RunAndCompare(backend(), {problem});
  }
}

TEST_P(BackendConformance, AbsentRowsMayHoldAnything) {
  for (const ProblemSpec& spec : AbsentSpecs(Plain({17, 20, 3}, 37, 101))) {
    Problem problem = MakeProblem(spec, rng());
    MakeAbsent(problem, 0.4, rng());
    problem.slices[2].want_grad_hidden = false;
    RunPoisonedAndCompare(backend(), problem);
  }
}

TEST_P(BackendConformance, AbsentRowsOfShapesThatNoTileDivides) {
  for (const auto& [rows, hidden, vocab] : kOddShapes) {
    Problem problem = MakeProblem(Plain({rows}, hidden, vocab), rng());
    MakeAbsent(problem, 0.3, rng());
    RunPoisonedAndCompare(backend(), problem);
  }
}

TEST_P(GradientsConformance, AbsentRowsWithOtherGradients) {
  for (const Gradients gradients : {Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
    for (const float smoothing : {0.0f, 0.1f}) {
      for (const float max_error : {0.0f, 1e6f}) {
        ProblemSpec spec = Plain({9, 30}, 37, 600);
        spec.options.gradients = gradients;
        spec.options.label_smoothing = smoothing;
        spec.options.filter_epsilon = 1e-3f;
        spec.options.sample_threshold = 1e-2f;
        spec.options.max_gradient_error = max_error;
        Problem problem = WithClearEpsilon(MakeProblem(spec, rng()));
        MakeAbsent(problem, 0.4, rng());
        RunPoisonedAndCompare(backend(), WithClearSamples(problem));
      }
    }
  }
}

TEST_P(GradientsConformance, ChunksOfAbsentRowsAddNothing) {
  for (const Norm norm : {Norm::kNone, Norm::kRmsNorm}) {
    for (const Gradients gradients :
         {Gradients::kExact, Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
      ProblemSpec spec = Plain({12}, 19, 300);
      spec.config.norm = norm;
      spec.config.has_bias = true;
      spec.options.gradients = gradients;
      Problem problem = MakeProblem(spec, rng());
      MakeAbsent(problem, 1.0, rng());
      const auto head = MakeHead(backend(), problem);
      ASSERT_NE(head, nullptr);
      const ChunkRun run = RunChunk(*head, Poisoned(problem));
      ASSERT_TRUE(run.done.ok()) << run.done;
      EXPECT_EQ(run.slices[0].first_nonfinite_row, -1);
      EXPECT_TRUE(AllZero(run.slices[0].grad_hidden));
      EXPECT_TRUE(AllZero(run.slices[0].loss));
      EXPECT_EQ(run.slices[0].sums.loss, 0.0);
      ExpectZeroGradients(*head);
    }
  }
}

// What an absent row holds changes no bit of what others leave.
TEST_P(BackendConformance, AbsentRowsChangeNoBit) {
  for (const Norm norm : {Norm::kNone, Norm::kLayerNorm}) {
    ProblemSpec spec = Plain({40}, 37, 300);
    spec.config.norm = norm;
    spec.config.has_bias = true;
    Problem problem = MakeProblem(spec, rng());
    MakeAbsent(problem, 0.4, rng());
    const auto finite = MakeHead(backend(), problem), poisoned = MakeHead(backend(), problem);
    ASSERT_NE(finite, nullptr);
    ASSERT_NE(poisoned, nullptr);
    const ChunkRun a = RunChunk(*finite, problem, {.independent = true});
    const ChunkRun b = RunChunk(*poisoned, Poisoned(problem), {.independent = true});
    ASSERT_TRUE(a.done.ok() && b.done.ok()) << a.done << b.done;
    EXPECT_EQ(a.slices[0].grad_hidden, b.slices[0].grad_hidden);
    EXPECT_EQ(a.slices[0].loss, b.slices[0].loss);
    EXPECT_EQ(AllGradients(*finite), AllGradients(*poisoned));
  }
}

// A row of weight 0 whose lse or entropy has a gradient is there, and has to be finite.
TEST_P(BackendConformance, RowsOfWeightZeroWithOtherGradientsAreNotAbsent) {
  for (const bool entropy : {false, true}) {
    ProblemSpec spec = Plain({12, 9}, 19, 45);
    spec.ignored = 0.0;
    Problem problem = MakeProblem(spec, rng());
    MakeAbsent(problem, 1.0, rng());
    std::vector<float>& upstream = entropy ? problem.slices[1].grad_entropy : problem.slices[1].grad_lse;
    upstream.assign(9, 0.0f);
    upstream[4] = 0.5f;
    const auto head = MakeHead(backend(), problem);
    ASSERT_NE(head, nullptr);
    const ChunkRun run = RunChunk(*head, Poisoned(problem));
    ASSERT_TRUE(run.done.ok()) << run.done;
    EXPECT_EQ(run.slices[0].first_nonfinite_row, -1);
    EXPECT_EQ(run.slices[1].first_nonfinite_row, 4);
    ExpectZeroGradients(*head);
  }
}

TEST_P(BackendConformance, AbsentRowsThatAreRetained) {
  for (const Norm norm : {Norm::kNone, Norm::kRmsNorm}) {
    ProblemSpec spec = Plain({41, 5}, 24, 300);
    spec.config.norm = norm;
    spec.grad_loss = true;
    Problem problem = MakeProblem(spec, rng());
    MakeAbsent(problem, 0.4, rng());
    const Problem poisoned = Poisoned(problem);
    auto retained = backend().AllocateRetained(std::max<int64_t>(64, RetainedBytes(problem)));
    ASSERT_TRUE(retained.ok()) << retained.status();
    const auto head = MakeHead(backend(), problem);
    ASSERT_NE(head, nullptr);
    Problem forward = poisoned;
    forward.accumulate_gradients = false;
    for (SliceData& slice : forward.slices) {
      slice.want_grad_hidden = false;
      slice.grad_loss.clear();
    }
    const ChunkRun first = RunChunk(*head, forward, {.retained = retained->get()});
    ASSERT_TRUE(first.done.ok()) << first.done;
    for (const SliceOutputs& slice : first.slices) EXPECT_EQ(slice.first_nonfinite_row, -1);
    ChunkRun got = RunChunk(*head, poisoned, {.retained = retained->get(), .take_retained = true});
    ASSERT_TRUE(got.done.ok()) << got.done;
    reference::ParamGradients gradients = reference::ZeroGradients(problem.config);
    const auto want = ComputeReference(problem, &gradients);
    for (size_t i = 0; i < want.size(); ++i) {
      TakePoisoned(problem, problem.slices[i], want[i], got.slices[i]);
      ExpectSliceMatches(head->compute_dtype(), problem, problem.slices[i], want[i], got.slices[i]);
    }
    ExpectGradientsMatch(*head, gradients, MaxAbsLogit(want));
  }
}

}  // namespace lossd::kernels::testing
