// Filtered gradients, whether asked for or chosen by `auto`, and gradients of either kind on one head.
#include <algorithm>
#include <vector>

#include "gmock/gmock.h"
#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/comparison.h"

namespace lossd::kernels::testing {
namespace {

using ::testing::HasSubstr;

// What a request asks for and gets where some mass is dropped: every value of the option, and of `auto` both
// decisions.
struct Request {
  Gradients gradients;
  float max_dropped_mass;
  Gradients outcome;
};
constexpr Request kRequests[] = {{Gradients::kExact, 0.05f, Gradients::kExact},
                                 {Gradients::kFiltered, 0.05f, Gradients::kFiltered},
                                 {Gradients::kAuto, 1.0f, Gradients::kFiltered},
                                 {Gradients::kAuto, 0.0f, Gradients::kExact}};

ProblemSpec WithGradients(ProblemSpec spec, Gradients gradients) {
  spec.options.gradients = gradients;
  return spec;
}

}  // namespace

TEST_P(BackendConformance, FilteredWithEachOption) {
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

TEST_P(BackendConformance, FilteredShapesThatNoTileDivides) {
  for (const auto& [rows, hidden, vocab] : kOddShapes) {
    for (float epsilon : {0.0f, 0.003f, 0.9f}) {
      ProblemSpec spec = Plain({rows}, hidden, vocab);
      spec.options.gradients = Gradients::kFiltered;
      spec.options.filter_epsilon = epsilon;
      RunAndCompare(backend(), {MakeProblem(spec, rng())});
    }
  }
}

// Epsilon 0 keeps every element: what a backend that keeps lists can hold, or more.
TEST_P(BackendConformance, FilteredWithEveryClassKept) {
  ProblemSpec spec = Plain({9}, 24, 9000);
  spec.options.gradients = Gradients::kFiltered;
  spec.options.filter_epsilon = 0.0f;
  spec.logit_deviation = 1.0f;
  RunAndCompare(backend(), {MakeProblem(spec, rng())});
}

// After enough of them a backend need not try any more.
TEST_P(BackendConformance, FilteredManyTimesWithEveryClassKept) {
  constexpr int kMany = 24;
  ProblemSpec spec = Plain({5}, 24, 2500);
  spec.ignored = 0.0;
  spec.options.gradients = Gradients::kFiltered;
  spec.options.filter_epsilon = 0.0f;
  spec.logit_deviation = 1.0f;
  RunAndCompare(backend(), std::vector<Problem>(kMany, MakeProblem(spec, rng())));
}

// Few rows, and lists as long as those of a flat softmax are.
TEST_P(BackendConformance, FilteredWithMostClassesKept) {
  ProblemSpec spec = Plain({9, 2}, 24, 600);
  spec.options.gradients = Gradients::kFiltered;
  spec.options.filter_epsilon = 0.001f;
  spec.logit_deviation = 0.7f;
  RunAndCompare(backend(), {MakeProblem(spec, rng())});
}

// Before its last classes a row looks as if every class had to be kept.
TEST_P(BackendConformance, FilteredRowsThatEndHigh) {
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

TEST_P(BackendConformance, AutoFiltersWhileLittleIsDropped) {
  ProblemSpec spec = Plain({40, 9}, 24, 300);
  spec.options.gradients = Gradients::kAuto;
  spec.options.filter_epsilon = 0.003f;
  spec.options.max_dropped_mass = 1.0f;
  Problem problem = WithClearEpsilon(MakeProblem(spec, rng()));
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  double dropped = 0.0;
  int64_t rows = 0;
  for (const SliceOutputs& slice : RunChunk(*head, problem).slices) {
    dropped += slice.sums.dropped_mass;
    rows += slice.sums.valid_rows;
  }
  const double mean = dropped / static_cast<double>(rows);
  ASSERT_GT(mean, 0.0);
  for (double share : {0.8, 1.25}) {
    problem.options.max_dropped_mass = static_cast<float>(share * mean);
    RunAndCompare(backend(), {problem});
    const ChunkRun run = RunChunk(*head, problem);
    EXPECT_EQ(run.slices[0].sums.dropped_mass > 0.0, share > 1.0);
    ExpectGradients(run, share > 1.0 ? Gradients::kFiltered : Gradients::kExact);
    EXPECT_THAT(run.choices.front().reason, HasSubstr("max_dropped_mass"));
  }
}

// A backend may leave the filter out where it was long in vain, but for chunks that are to be independent,
// and comes back to it.
TEST_P(BackendConformance, AutoAfterManyFlatChunks) {
  constexpr int kMany = 60, kSoon = 40;
  ProblemSpec spec = Plain({9, 3}, 24, 300);
  spec.ignored = 0.0;
  spec.options.gradients = Gradients::kAuto;
  spec.options.filter_epsilon = 0.05f;
  spec.logit_deviation = 0.1f;
  const Problem flat = MakeProblem(spec, rng());
  RunAndCompare(backend(), std::vector<Problem>(kMany, flat));
  Problem peaked = flat;  // one class has nearly everything
  for (SliceData& slice : peaked.slices) {
    for (float& x : slice.hidden) x = RoundTo(peaked.hidden_dtype, 1000.0f * x);
  }
  const auto head = MakeHead(backend(), flat);
  ASSERT_NE(head, nullptr);
  for (int i = 0; i < kMany; ++i) ExpectGradients(RunChunk(*head, flat), Gradients::kExact);
  ExpectGradients(RunChunk(*head, peaked, {.independent = true}), Gradients::kFiltered);
  ExpectGradients(RunChunk(*head, flat, {.independent = true}), Gradients::kExact);
  for (int i = 0; i < kSoon; ++i) RunChunk(*head, peaked);
  for (int i = 0; i < 3; ++i) ExpectGradients(RunChunk(*head, peaked), Gradients::kFiltered);
}

TEST_P(BackendConformance, NothingIsDroppedFromALossAlone) {
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

// A head takes requests for any gradients in turn, whatever it does with its logits.
TEST_P(BackendConformance, EveryHeadComputesAllGradients) {
  ProblemSpec spec = Plain({40, 9}, 24, 300);
  spec.config.has_bias = true;
  spec.options.filter_epsilon = 0.003f;
  const Problem exact = WithClearEpsilon(MakeProblem(WithGradients(spec, Gradients::kFiltered), rng()));
  std::vector<Problem> chunks;
  for (const auto& [gradients, limit, outcome] : kRequests) {
    Problem& chunk = chunks.emplace_back(exact);
    chunk.options.gradients = gradients;
    chunk.options.max_dropped_mass = limit;
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
TEST_P(BackendConformance, AChunkGetsWhatItsOptionsSayNotWhatItsHeadDoes) {
  for (const Gradients of_head : {Gradients::kExact, Gradients::kFiltered, Gradients::kAuto}) {
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
    problem.options.gradients = Gradients::kFiltered;
    ExpectGradients(RunChunk(*head, problem), Gradients::kFiltered);
  }
}

// The rows that decide may come last, after more rows than a backend looks at together.
TEST_P(BackendConformance, AutoDecidesByAllRowsOfAChunk) {
  constexpr int64_t kPeaked = 32, kFlat = 8;
  ProblemSpec spec = Plain({kPeaked + kFlat}, 24, 300);
  spec.ignored = 0.0;
  spec.options.gradients = Gradients::kAuto;
  spec.options.filter_epsilon = 0.05f;  // a flat row drops nearly all of its mass: 0.2 on average
  spec.logit_deviation = 0.1f;
  const Problem flat = MakeProblem(spec, rng());
  for (const bool flat_rows_first : {false, true}) {
    Problem problem = flat;
    SliceData& slice = problem.slices.front();
    const int64_t begin = (flat_rows_first ? kFlat : 0) * 24;
    for (int64_t i = begin; i < begin + kPeaked * 24; ++i) {
      float& x = slice.hidden[static_cast<size_t>(i)];
      x = RoundTo(problem.hidden_dtype, 200.0f * x);
    }
    const auto head = MakeHead(backend(), problem);
    ASSERT_NE(head, nullptr);
    for (const float limit : {0.1f, 0.3f}) {
      problem.options.max_dropped_mass = limit;
      RunAndCompare(backend(), {problem});
      ExpectGradients(RunChunk(*head, problem), limit > 0.2f ? Gradients::kFiltered : Gradients::kExact);
    }
  }
}

// Rows that want no gradient drop nothing, so they have no part in the decision.
TEST_P(BackendConformance, AutoDecidesByRowsWithAGradientAlone) {
  ProblemSpec spec = Plain({20, 20}, 24, 300);
  spec.ignored = 0.0;
  spec.options.gradients = Gradients::kAuto;
  spec.options.filter_epsilon = 0.05f;
  spec.options.max_dropped_mass = 0.2f;  // flat rows drop nearly everything, peaked ones nothing
  spec.logit_deviation = 0.1f;
  for (const bool flat_counts : {false, true}) {
    Problem problem = MakeProblem(spec, rng());
    for (float& x : problem.slices[flat_counts ? 1 : 0].hidden) {
      x = RoundTo(problem.hidden_dtype, 200.0f * x);
    }
    problem.slices[1].want_grad_hidden = false;
    problem.slices[1].accumulate.assign(20, 0);
    RunAndCompare(backend(), {problem});
    const auto head = MakeHead(backend(), problem);
    ASSERT_NE(head, nullptr);
    ExpectGradients(RunChunk(*head, problem), flat_counts ? Gradients::kExact : Gradients::kFiltered);
  }
}

// A slice with a bad row fails by itself, however the gradients of the others are computed.
TEST_P(BackendConformance, NonFiniteRowFailsItsSliceAloneWithAnyGradients) {
  for (const Norm norm : {Norm::kNone, Norm::kRmsNorm}) {
    for (const auto& [gradients, limit, outcome] : kRequests) {
      ProblemSpec spec = WithGradients(Plain({10, 12, 7}, 29, 300), gradients);
      spec.config.norm = norm;
      spec.config.has_bias = true;
      spec.ignored = 0.0;
      spec.options.filter_epsilon = 0.003f;
      spec.options.max_dropped_mass = limit;
      Problem without = MakeProblem(spec, rng());
      Problem problem = without;
      without.slices[1].targets.assign(12, kIgnoredTarget);
      without = WithClearEpsilon(without);
      problem.options = without.options;
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
      const auto want = ComputeReference(without, &wanted);
      for (size_t i : {0, 2}) {
        ExpectSliceMatches(head->compute_dtype(), without, without.slices[i], want[i], run.slices[i]);
      }
      ExpectGradientsMatch(*head, wanted, MaxAbsLogit(want));
    }
  }
}

}  // namespace lossd::kernels::testing
