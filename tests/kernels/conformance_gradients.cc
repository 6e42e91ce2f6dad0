// SPDX-License-Identifier: Apache-2.0
// Gradients of every kind on one head, and what `auto` decides.
#include <algorithm>
#include <vector>

#include "gmock/gmock.h"
#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/clear_samples.h"
#include "tests/kernels/comparison.h"

namespace lossd::kernels::testing {
namespace {

using ::testing::HasSubstr;

// What a request asks for and gets where sampling makes an error: every value of the option, and of `auto`
// both decisions.
struct Request {
  Gradients gradients;
  float max_gradient_error;
  Gradients outcome;
};
constexpr Request kRequests[] = {{Gradients::kExact, 0.01f, Gradients::kExact},
                                 {Gradients::kFiltered, 0.01f, Gradients::kFiltered},
                                 {Gradients::kSampled, 0.01f, Gradients::kSampled},
                                 {Gradients::kAuto, 10.0f, Gradients::kSampled},
                                 {Gradients::kAuto, 1e-4f, Gradients::kExact}};

// One class gets nearly everything in rows [begin, end) of a flat problem.
void Peak(const Problem& problem, SliceData& slice, int64_t begin, int64_t end) {
  for (int64_t i = begin * problem.config.hidden_size; i < end * problem.config.hidden_size; ++i) {
    float& x = slice.hidden[static_cast<size_t>(i)];
    x = RoundTo(problem.hidden_dtype, 1000.0f * x);
  }
}

}  // namespace

// Rows without any preference, `auto`, and a threshold far above their probabilities.
ProblemSpec BackendConformance::FlatSpec(std::vector<int64_t> slice_rows) const {
  ProblemSpec spec = Plain(std::move(slice_rows), 24, 300);
  spec.ignored = 0.0;
  spec.options.gradients = Gradients::kAuto;
  spec.options.sample_threshold = 0.05f;
  spec.logit_deviation = 0.1f;
  return spec;
}

// A head takes requests for any gradients in turn, whatever it does with its logits.
TEST_P(GradientsConformance, EveryHeadComputesAllGradients) {
  ProblemSpec spec = Plain({40, 9}, 24, 300);
  spec.config.has_bias = true;
  spec.options.filter_epsilon = 0.003f;
  spec.options.sample_threshold = 0.01f;
  spec.options.gradients = Gradients::kFiltered;
  const Problem exact = WithClearEpsilon(MakeProblem(spec, rng()));
  std::vector<Problem> chunks;
  for (const auto& [gradients, limit, outcome] : kRequests) {
    Problem& chunk = chunks.emplace_back(exact);
    chunk.options.gradients = gradients;
    chunk.options.max_gradient_error = limit;
  }
  RunAndCompare(backend(), chunks);
  const auto head = MakeHead(backend(), exact);
  ASSERT_NE(head, nullptr);
  for (size_t i = 0; i < chunks.size(); ++i) {
    SCOPED_TRACE(Describe(chunks[i]));
    ExpectGradients(RunChunk(*head, chunks[i]), kRequests[i].outcome);
  }
}

// The head's config says what requests ask for that leave it open. That is the caller's to fill in: a chunk
// gets what its own options say.
TEST_P(GradientsConformance, AChunkGetsWhatItsOptionsSayNotWhatItsHeadDoes) {
  for (const Gradients of_head :
       {Gradients::kExact, Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
    ProblemSpec spec = Plain({12}, 24, 300);
    spec.config.gradients = of_head;
    Problem problem = MakeProblem(spec, rng());
    const auto head = MakeHead(backend(), problem);
    ASSERT_NE(head, nullptr);
    const std::vector<Choice> said = head->Describe();
    const auto gradients = std::find_if(said.begin(), said.end(),
                                        [](const Choice& choice) { return choice.what == "gradients"; });
    ASSERT_NE(gradients, said.end());
    EXPECT_EQ(gradients->choice, Name(of_head));
    ExpectGradients(RunChunk(*head, problem), Gradients::kExact);
    for (const Gradients asked : {Gradients::kFiltered, Gradients::kSampled}) {
      problem.options.gradients = asked;
      ExpectGradients(RunChunk(*head, problem), asked);
    }
  }
}

// Of flat rows with this threshold the predicted error is 0.22, of peaked ones 0; of the mixture 0.07.
TEST_P(GradientsConformance, AutoDecidesByAllRowsOfAChunk) {
  constexpr int64_t kPeaked = 32, kFlat = 8;
  const Problem flat = MakeProblem(FlatSpec({kPeaked + kFlat}), rng());
  // The rows that decide may come last, after more rows than a backend looks at together.
  for (const bool flat_rows_first : {false, true}) {
    Problem problem = flat;
    SliceData& slice = problem.slices.front();
    const int64_t begin = flat_rows_first ? kFlat : 0;
    Peak(problem, slice, begin, begin + kPeaked);
    const auto head = MakeHead(backend(), problem);
    ASSERT_NE(head, nullptr);
    for (const float limit : {0.03f, 0.15f}) {
      problem.options.max_gradient_error = limit;
      RunAndCompare(backend(), {problem});
      const ChunkRun run = RunChunk(*head, problem);
      ExpectGradients(run, limit > 0.1f ? Gradients::kSampled : Gradients::kExact);
      EXPECT_THAT(run.choices.front().reason, HasSubstr("max_gradient_error"));
      EXPECT_EQ(run.slices[0].sums.squared_gradient > 0.0, limit > 0.1f);
    }
  }
}

// Rows that want no gradient are not sampled, so they have no part in the decision.
TEST_P(GradientsConformance, AutoDecidesByRowsWithAGradientAlone) {
  for (const bool flat_counts : {false, true}) {
    Problem problem = MakeProblem(FlatSpec({20, 20}), rng());
    Peak(problem, problem.slices[flat_counts ? 1 : 0], 0, 20);
    problem.options.max_gradient_error = 0.1f;
    problem.slices[1].want_grad_hidden = false;
    problem.slices[1].accumulate.assign(20, 0);
    RunAndCompare(backend(), {problem});
    const auto head = MakeHead(backend(), problem);
    ASSERT_NE(head, nullptr);
    ExpectGradients(RunChunk(*head, problem), flat_counts ? Gradients::kExact : Gradients::kSampled);
  }
}

// Nor have zeros that keep the places of rows which are not computed again, although they are flat.
TEST_P(GradientsConformance, RowsThatStandInDecideNothingAndLeaveTheBitsOfOthers) {
  Problem whole = MakeProblem(FlatSpec({13, 20, 7}), rng());
  for (SliceData& slice : whole.slices) Peak(whole, slice, 0, slice.rows());
  whole.options.max_gradient_error = 0.1f;
  const auto head = MakeHead(backend(), whole);
  ASSERT_NE(head, nullptr);
  const ChunkRun want = RunChunk(*head, whole, {.independent = true});
  ExpectGradients(want, Gradients::kSampled);
  const auto gradients = AllGradients(*head);
  Problem repeat = whole;
  for (SliceData& slice : repeat.slices) slice.accumulate.assign(static_cast<size_t>(slice.rows()), 0);
  for (const size_t i : {0, 2})
    std::fill(repeat.slices[i].hidden.begin(), repeat.slices[i].hidden.end(), 0.0f);
  ExpectGradients(RunChunk(*head, repeat, {.independent = true}), Gradients::kExact);
  for (const size_t i : {0, 2}) repeat.slices[i].stands_in = true;
  const ChunkRun got = RunChunk(*head, repeat, {.independent = true});
  ExpectGradients(got, Gradients::kSampled);
  EXPECT_EQ(got.slices[1].loss, want.slices[1].loss);
  EXPECT_EQ(got.slices[1].grad_hidden, want.slices[1].grad_hidden);
  EXPECT_EQ(AllGradients(*head), gradients) << "nothing was added";
}

// A backend may leave sampling out where it was long in vain, but for chunks that are to be independent, and
// comes back to it.
TEST_P(GradientsConformance, AutoAfterManyFlatChunks) {
  constexpr int kMany = 60, kSoon = 40;
  Problem flat = MakeProblem(FlatSpec({9, 3}), rng());
  flat.options.max_gradient_error = 0.1f;
  RunAndCompare(backend(), std::vector<Problem>(kMany, flat));
  Problem peaked = flat;
  for (SliceData& slice : peaked.slices) Peak(peaked, slice, 0, slice.rows());
  const auto head = MakeHead(backend(), flat);
  ASSERT_NE(head, nullptr);
  for (int i = 0; i < kMany; ++i) ExpectGradients(RunChunk(*head, flat), Gradients::kExact);
  ExpectGradients(RunChunk(*head, peaked, {.independent = true}), Gradients::kSampled);
  ExpectGradients(RunChunk(*head, flat, {.independent = true}), Gradients::kExact);
  for (int i = 0; i < kSoon; ++i) RunChunk(*head, peaked);
  for (int i = 0; i < 3; ++i) ExpectGradients(RunChunk(*head, peaked), Gradients::kSampled);
}

// A slice with a bad row fails by itself, however the gradients of the others are computed.
TEST_P(GradientsConformance, NonFiniteRowFailsItsSliceAloneWithAnyGradients) {
  for (const Norm norm : {Norm::kNone, Norm::kRmsNorm}) {
    for (const auto& [gradients, limit, outcome] : kRequests) {
      ProblemSpec spec = Plain({10, 12, 7}, 29, 300);
      spec.options.gradients = gradients;
      spec.config.norm = norm;
      spec.config.has_bias = true;
      spec.ignored = 0.0;
      spec.options.filter_epsilon = 0.003f;
      spec.options.sample_threshold = 0.01f;
      spec.options.max_gradient_error = limit;
      Problem without = MakeProblem(spec, rng());
      Problem problem = without;
      without.slices[1].targets.assign(12, kIgnoredTarget);
      without = WithClearSamples(WithClearEpsilon(without));
      problem.options = without.options;
      for (size_t i : {0, 2}) problem.slices[i].sample_seed = without.slices[i].sample_seed;
      problem.slices[1].hidden[5 * 29 + 3] = kNan;
      SCOPED_TRACE(Describe(problem));
      const auto head = MakeHead(backend(), problem);
      ASSERT_NE(head, nullptr);
      const ChunkRun run = RunChunk(*head, problem);
      ASSERT_TRUE(run.results.ok()) << run.results;
      ASSERT_TRUE(run.done.ok()) << run.done;
      EXPECT_EQ(run.slices[1].first_nonfinite_row, 5);
      ExpectGradients(run, outcome);
      reference::ParamGradients wanted = reference::ZeroGradients(problem.config);
      without = AsComputed(without, run);
      const auto want = ComputeReference(without, &wanted);
      for (size_t i : {0, 2}) {
        ExpectSliceMatches(head->compute_dtype(), without, without.slices[i], want[i], run.slices[i]);
      }
      ExpectGradientsMatch(*head, wanted, MaxAbsLogit(want));
    }
  }
}

}  // namespace lossd::kernels::testing
