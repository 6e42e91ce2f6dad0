// SPDX-License-Identifier: Apache-2.0
// Conformance tests of backends (backend_conformance.h) about numbers: row results, gradients of every kind,
// gradients of entropies, and equal bits.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/chunk_run.h"
#include "tests/kernels/comparison.h"

namespace lossd::kernels::testing {

// ---- Row results ----
// The results of a row against double precision on the same inputs: within 1e-4 whatever the row shares its
// chunk with, the dtype, the options and the way that the chunk takes.

namespace {

constexpr float kDeviations[] = {3.0f, 22.0f};  // of logits: the largest of some 500 are 10 and 70

// Hidden states that the compute dtype represents too, and no larger logits than 100.
Problem WithExactInputs(Problem problem) {
  const double scale = std::fabs(double{problem.options.logit_scale});
  for (SliceData& slice : problem.slices) {
    for (float& x : slice.hidden) {
      x = RoundTo(problem.hidden_dtype, RoundTo(problem.config.compute_dtype, x));
    }
  }
  double largest = 1.0;
  for (const SliceData& slice : problem.slices) {
    const reference::Result want =
        reference::Compute(ReferenceHead(problem), problem.options, ReferenceRows(slice), nullptr);
    for (const double z : want.max_abs_logit) largest = std::max(largest, z);
  }
  if (largest > 100.0 && scale > 0.0) problem.options.logit_scale *= static_cast<float>(99.0 / largest);
  return problem;
}

// How much more than its logits the loss of a row may be off.
double LossFactor(const Problem& problem, const SliceData& slice, const reference::Result& want, size_t row) {
  double weight = 1.0;
  if (problem.options.use_class_weights) {
    for (const float u : problem.class_weights) weight = std::max(weight, double{u});
  }
  const double row_weight = slice.row_weights.empty() ? 1.0 : double{slice.row_weights[row]};
  return std::max(1.0,
                  row_weight * (weight + 2.0 * double{problem.options.z_loss} * std::fabs(want.lse[row])));
}

// What the rows of a slice should have; it does not depend on how gradients are computed.
struct Truth {
  reference::Result rows;
  std::vector<double> p;  // [rows, V]
};

Truth TruthOf(const Problem& problem, const SliceData& slice) {
  LossOptions options = problem.options;
  options.gradients = Gradients::kExact;
  const reference::Head head = ReferenceHead(problem);
  return {reference::Compute(head, options, ReferenceRows(slice), nullptr),
          reference::Probabilities(head, options, ReferenceRows(slice))};
}

void ExpectPreciseSlice(const Problem& problem, const SliceData& slice, const Truth& truth,
                        const SliceOutputs& got) {
  const reference::Result& want = truth.rows;
  const auto vocab = static_cast<size_t>(problem.config.vocab_size);
  for (size_t row = 0; row < slice.targets.size(); ++row) {
    if (slice.targets[row] == kIgnoredTarget) continue;
    SCOPED_TRACE(absl::StrCat("row ", row, ", largest logit ", want.max_abs_logit[row]));
    EXPECT_NEAR(got.loss[row], want.loss[row], kRowTolerance * LossFactor(problem, slice, want, row));
    EXPECT_NEAR(got.lse[row], want.lse[row], kRowTolerance);
    EXPECT_NEAR(got.target_logprob[row], want.target_logprob[row], kRowTolerance);
    EXPECT_NEAR(got.entropy[row], want.entropy[row], kRowTolerance);
    ASSERT_GE(got.argmax[row], 0);
    ASSERT_LT(got.argmax[row], problem.config.vocab_size);
    if (got.argmax[row] == want.argmax[row]) continue;
    const double found = truth.p[row * vocab + static_cast<size_t>(got.argmax[row])];
    const double largest = truth.p[row * vocab + static_cast<size_t>(want.argmax[row])];
    EXPECT_GE(std::log(found), std::log(largest) - kRowTolerance) << "argmax " << got.argmax[row];
  }
}

// Each way to gradients, and none at all.
std::vector<Problem> EachWay(Problem problem) {
  std::vector<Problem> all;
  for (const Gradients gradients :
       {Gradients::kExact, Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
    problem.options.gradients = gradients;
    all.push_back(problem);
  }
  problem.options.gradients = Gradients::kExact;
  problem.accumulate_gradients = false;
  for (SliceData& slice : problem.slices) slice.want_grad_hidden = false;
  all.push_back(std::move(problem));
  return all;
}

void ExpectPreciseRows(Backend& backend, const Problem& made) {
  const Problem problem = WithExactInputs(made);
  const auto head = MakeHead(backend, problem);
  ASSERT_NE(head, nullptr);
  std::vector<Truth> truths;
  for (const SliceData& slice : problem.slices) truths.push_back(TruthOf(problem, slice));
  for (const Problem& way : EachWay(problem)) {
    SCOPED_TRACE(Describe(way));
    const ChunkRun run = RunChunk(*head, way);
    ASSERT_TRUE(run.done.ok()) << run.done;
    for (size_t i = 0; i < way.slices.size(); ++i) {
      ExpectPreciseSlice(way, way.slices[i], truths[i], run.slices[i]);
    }
  }
}

// lse of one row of a plain problem, its dot products rounded to a dtype as torch does.
double LseOf(const Problem& problem, const SliceData& slice, size_t row, DType rounded) {
  const auto d = static_cast<size_t>(problem.config.hidden_size);
  const auto vocab = static_cast<size_t>(problem.config.vocab_size);
  const double cap = double{problem.options.softcap};
  std::vector<double> z(vocab, 0.0);
  for (size_t v = 0; v < vocab; ++v) {
    double sum = problem.bias.empty() ? 0.0 : double{problem.bias[v]};
    for (size_t i = 0; i < d; ++i)
      sum += double{slice.hidden[row * d + i]} * double{problem.weight[v * d + i]};
    const double dot = rounded == DType::kFloat32 ? sum : double{RoundTo(rounded, static_cast<float>(sum))};
    z[v] = cap > 0.0 ? cap * std::tanh(dot / cap) : dot;
  }
  const double top = *std::max_element(z.begin(), z.end());
  double total = 0.0;
  for (const double logit : z) total += std::exp(logit - top);
  return top + std::log(total);
}

// The rows [begin, end) of a slice.
SliceData Some(const SliceData& all, int64_t hidden_size, int64_t begin, int64_t end) {
  SliceData some = all;
  some.hidden = {all.hidden.begin() + begin * hidden_size, all.hidden.begin() + end * hidden_size};
  some.targets = {all.targets.begin() + begin, all.targets.begin() + end};
  some.first_row += begin;
  return some;
}

}  // namespace

TEST_P(BackendConformance, RowResultsAreThoseOfDoubles) {
  for (const float deviation : kDeviations) {
    for (ProblemSpec spec : EachOptionAlone(Plain({9, 28}, 136, 517))) {
      if (spec.config.norm != Norm::kNone) continue;  // it is the norm that rounds then
      spec.logit_deviation = deviation;
      ExpectPreciseRows(backend(), MakeProblem(spec, rng()));
    }
  }
}

// A tanh that is formed by subtraction is off by a constant, which the cap multiplies.
TEST_P(BackendConformance, RowResultsUnderASoftcapAreThoseOfDoubles) {
  for (const float softcap : {20.0f, 101.0f, 150.0f, 220.0f, 400.0f, 1000.0f, 1e5f}) {
    ProblemSpec spec = Plain({21}, 136, 517);
    spec.logit_deviation = 25.0f;
    spec.options.softcap = softcap;
    ExpectPreciseRows(backend(), MakeProblem(spec, rng()));
  }
}

TEST_P(BackendConformance, RowResultsOfRandomOptionsAreThoseOfDoubles) {
  constexpr int64_t kShapes[][3] = {{1, 64, 333}, {8, 129, 1001}, {136, 72, 257}, {300, 40, 2049}};
  for (const auto& [rows, hidden, vocab] : kShapes) {
    for (const float deviation : kDeviations) {
      ProblemSpec spec = Random(rows, hidden, vocab);
      spec.config.norm = Norm::kNone;
      spec.logit_deviation = deviation;
      ExpectPreciseRows(backend(), MakeProblem(spec, rng()));
    }
  }
}

// The criterion of CCE's own tests: row by row, an error of at most that of torch in the same dtype plus
// 1e-5.
TEST_P(BackendConformance, LseIsAtMostTorchsErrorOff) {
  constexpr int64_t kShapes[][3] = {{256, 128, 512}, {252, 128, 507}, {252, 123, 507}};
  for (const auto& [rows, hidden, vocab] : kShapes) {
    for (const float softcap : {0.0f, 20.0f}) {
      for (const bool bias : {false, true}) {
        ProblemSpec spec = Plain({rows}, hidden, vocab);
        spec.config.has_bias = bias;
        spec.options.softcap = softcap;
        const float length = std::sqrt(static_cast<float>(hidden));
        spec.logit_deviation = length;  // of weights 1
        spec.ignored = 0.0;
        Problem problem = MakeProblem(spec, rng());
        SliceData& slice = problem.slices.front();
        for (float& x : slice.hidden) x /= length;
        problem = WithExactInputs(std::move(problem));
        const auto peaked =
            static_cast<size_t>(rows / 2 * hidden);  // half of the rows are rows of the weight
        std::copy(slice.hidden.begin(), slice.hidden.begin() + static_cast<std::ptrdiff_t>(peaked),
                  problem.weight.begin());
        SCOPED_TRACE(Describe(problem));
        const auto head = MakeHead(backend(), problem);
        ASSERT_NE(head, nullptr);
        const ChunkRun run = RunChunk(*head, problem);
        ASSERT_TRUE(run.done.ok()) << run.done;
        for (size_t row = 0; row < slice.targets.size(); ++row) {
          const double want = LseOf(problem, slice, row, DType::kFloat32);
          const double torch = std::fabs(LseOf(problem, slice, row, GetParam().compute) - want);
          EXPECT_NEAR(run.slices.front().lse[row], want, torch + 1e-5) << "row " << row;
        }
      }
    }
  }
}

// Alone, among a few, among many.
TEST_P(BackendConformance, RowResultsDoNotDependOnTheChunk) {
  constexpr int64_t kHidden = 136, kRows = 300;
  ProblemSpec spec = Plain({kRows}, kHidden, 1033);
  spec.logit_deviation = 22.0f;
  spec.ignored = 0.0;
  for (const Problem& whole : EachWay(WithExactInputs(MakeProblem(spec, rng())))) {
    SCOPED_TRACE(Describe(whole));
    const SliceData& all = whole.slices.front();
    const auto head = MakeHead(backend(), whole);
    ASSERT_NE(head, nullptr);
    const ChunkRun among_all = RunChunk(*head, whole);
    ASSERT_TRUE(among_all.done.ok()) << among_all.done;
    const SliceOutputs& want = among_all.slices.front();
    for (const int64_t size : {1, 8, 131}) {
      const int64_t begin = UniformInt(rng(), 0, kRows - size);
      Problem part = whole;
      part.slices = {Some(all, kHidden, begin, begin + size)};
      const ChunkRun run = RunChunk(*head, part);
      ASSERT_TRUE(run.done.ok()) << run.done;
      const SliceOutputs& got = run.slices.front();
      for (int64_t row = 0; row < size; ++row) {
        const auto here = static_cast<size_t>(row), there = static_cast<size_t>(begin + row);
        EXPECT_NEAR(got.loss[here], want.loss[there], 2.0 * kRowTolerance) << size;
        EXPECT_NEAR(got.lse[here], want.lse[there], 2.0 * kRowTolerance) << size;
        EXPECT_NEAR(got.entropy[here], want.entropy[there], 2.0 * kRowTolerance) << size;
        EXPECT_NEAR(got.target_logprob[here], want.target_logprob[there], 2.0 * kRowTolerance) << size;
      }
    }
  }
}

// ---- Gradients of every kind ----
// Gradients of every kind on one head, and what `auto` decides.

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

// ---- Gradients of entropies ----
// Gradients of entropies, as an entropy bonus in reinforcement learning has them: rows with and without one
// in the same chunk, of any sign, with every other option.

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

// ---- Equal bits ----
// What deterministic servers rest on: results depend on the rows of a chunk and their order alone, to the
// bit; on how they are cut into slices they do not in independent chunks, which is what such servers send.

namespace {

constexpr int64_t kShapes[][3] = {{75, 33, 129}, {200, 64, 257}, {7, 24, 40}};  // rows, D, V

// Rows [begin, end) of a slice.
SliceData RowsOf(const SliceData& slice, int64_t hidden_size, int64_t begin, int64_t end) {
  SliceData part;
  part.grad_scale = slice.grad_scale;
  part.want_grad_hidden = slice.want_grad_hidden;
  const auto copy = [begin, end](const auto& from, auto& to, int64_t width) {
    if (!from.empty()) to.assign(from.begin() + begin * width, from.begin() + end * width);
  };
  part.sample_seed = slice.sample_seed;
  part.first_row = slice.first_row + begin;
  copy(slice.hidden, part.hidden, hidden_size);
  copy(slice.targets, part.targets, 1);
  copy(slice.row_weights, part.row_weights, 1);
  copy(slice.accumulate, part.accumulate, 1);
  copy(slice.grad_loss, part.grad_loss, 1);
  copy(slice.grad_lse, part.grad_lse, 1);
  copy(slice.grad_entropy, part.grad_entropy, 1);
  copy(slice.advantages, part.advantages, 1);
  copy(slice.old_logprobs, part.old_logprobs, 1);
  copy(slice.ref_logprobs, part.ref_logprobs, 1);
  part.target_count = slice.target_count;
  copy(slice.target_classes, part.target_classes, slice.target_count);
  copy(slice.target_weights, part.target_weights, slice.target_count);
  // Gradients have other bits where single classes are wanted.
  part.class_count = slice.class_count;
  part.shared_classes = slice.shared_classes;
  part.top_k = slice.top_k;
  if (slice.shared_classes) {
    part.classes = slice.classes;
  } else {
    copy(slice.classes, part.classes, slice.class_count);
  }
  return part;
}

// `got`, [rows, width], has the bits of `want` from row `row` on.
template <typename T>
void ExpectSameBits(const std::vector<T>& got, const std::vector<T>& want, int64_t row, int64_t rows,
                    int64_t width) {
  ASSERT_EQ(got.size(), static_cast<size_t>(rows * width));
  EXPECT_EQ(std::memcmp(got.data(), want.data() + row * width, got.size() * sizeof(T)), 0);
}

}  // namespace

TEST_P(BackendConformance, SameChunkSameBits) {
  const Problem problem = MakeProblem(Random(70, 45, 210), rng());
  std::vector<ChunkRun> runs;
  std::vector<std::vector<std::vector<float>>> gradients;
  for (int i = 0; i < 2; ++i) {
    const auto head = MakeHead(backend(), problem);
    ASSERT_NE(head, nullptr);
    runs.push_back(RunChunk(*head, problem));
    gradients.push_back(AllGradients(*head));
  }
  EXPECT_EQ(gradients[0], gradients[1]);
  for (size_t i = 0; i < problem.slices.size(); ++i) {
    EXPECT_EQ(runs[0].slices[i].loss, runs[1].slices[i].loss);
    EXPECT_EQ(runs[0].slices[i].grad_hidden, runs[1].slices[i].grad_hidden);
  }
}

TEST_P(BackendConformance, TheCutIntoSlicesLeavesNoTrace) {
  for (const auto& [rows, hidden, vocab] : kShapes) {
    ProblemSpec spec = Random(rows, hidden, vocab);
    spec.accumulate_mask = false;
    spec.slice_rows = {rows};
    const Problem whole = MakeProblem(spec, rng());
    const SliceData& all = whole.slices.front();
    const auto head = MakeHead(backend(), whole);
    ASSERT_NE(head, nullptr);
    const ChunkRun want = RunChunk(*head, whole, {.independent = true});
    ASSERT_TRUE(want.done.ok()) << want.done;
    const auto gradients = AllGradients(*head);
    for (int repeat = 0; repeat < 3; ++repeat) {
      ASSERT_TRUE(head->ZeroGradients().ok());
      Problem cut = whole;
      cut.slices.clear();
      std::vector<int64_t> begins;
      for (int64_t row = 0; row < all.rows();) {
        const int64_t end = UniformInt(rng(), row + 1, all.rows());
        const bool empty = std::all_of(all.targets.begin() + row, all.targets.begin() + end,
                                       [](int32_t t) { return t == kIgnoredTarget; });
        if (!empty) {  // rows without target may be missing
          cut.slices.push_back(RowsOf(all, hidden, row, end));
          begins.push_back(row);
        }
        row = end;
      }
      const ChunkRun got =
          RunChunk(*head, cut, {.grad_hidden_in_place = Chance(rng(), 0.5), .independent = true});
      ASSERT_TRUE(got.done.ok()) << got.done;
      EXPECT_EQ(AllGradients(*head), gradients);
      for (size_t i = 0; i < begins.size(); ++i) {
        const int64_t n = cut.slices[i].rows();
        ExpectSameBits(got.slices[i].loss, want.slices[0].loss, begins[i], n, 1);
        ExpectSameBits(got.slices[i].lse, want.slices[0].lse, begins[i], n, 1);
        ExpectSameBits(got.slices[i].argmax, want.slices[0].argmax, begins[i], n, 1);
        ExpectSameBits(got.slices[i].grad_hidden, want.slices[0].grad_hidden, begins[i], n, hidden);
      }
    }
  }
}

// What `auto` decides depends on all rows of a chunk, so here it has only one thing to decide.
TEST_P(BackendConformance, ARowsResultsDependOnItsPlaceButNotOnTheOtherRows) {
  for (const auto& [rows, hidden, vocab] : kShapes) {
    ProblemSpec spec = Random(rows, hidden, vocab);
    spec.options.max_gradient_error = 1e6f;
    spec.accumulate_mask = false;
    spec.slice_rows = {rows};
    const Problem whole = MakeProblem(spec, rng());
    const auto head = MakeHead(backend(), whole);
    ASSERT_NE(head, nullptr);
    const ChunkRun want = RunChunk(*head, whole);
    ASSERT_TRUE(want.done.ok()) << want.done;
    const auto gradients = AllGradients(*head);
    Problem repeat = whole;
    SliceData& slice = repeat.slices.front();
    slice.accumulate.assign(static_cast<size_t>(rows), 0);
    const int64_t begin = UniformInt(rng(), 0, rows - 1);
    const int64_t end = UniformInt(rng(), begin + 1, rows);
    std::fill(slice.hidden.begin(), slice.hidden.begin() + begin * hidden, 0.0f);
    std::fill(slice.hidden.begin() + end * hidden, slice.hidden.end(), 0.0f);
    const ChunkRun got = RunChunk(*head, repeat);
    ASSERT_TRUE(got.done.ok()) << got.done;
    EXPECT_EQ(AllGradients(*head), gradients);  // nothing was added
    for (int64_t row = begin; row < end; ++row) {
      const auto i = static_cast<size_t>(row);
      EXPECT_EQ(got.slices[0].loss[i], want.slices[0].loss[i]) << row;
      EXPECT_EQ(got.slices[0].lse[i], want.slices[0].lse[i]) << row;
    }
    // Rows that became flat may take so much room that all of the chunk is sampled with another threshold.
    if (got.sample_threshold != want.sample_threshold) continue;
    const size_t bytes = static_cast<size_t>((end - begin) * hidden) * sizeof(float);
    EXPECT_EQ(std::memcmp(got.slices[0].grad_hidden.data() + begin * hidden,
                          want.slices[0].grad_hidden.data() + begin * hidden, bytes),
              0);
  }
}

// A forward pass that keeps its hidden states, other work in between, and a backward pass from what was kept
// give the bits of a direct computation.
TEST_P(BackendConformance, RetainedRowsGiveTheSameBits) {
  const Problem problem = MakeProblem(Random(70, 45, 210), rng());
  const auto direct = MakeHead(backend(), problem);
  const auto deferred = MakeHead(backend(), problem);
  ASSERT_TRUE(direct != nullptr && deferred != nullptr);
  const ChunkRun want = RunChunk(*direct, problem, {.independent = true});
  auto retained = backend().AllocateRetained(RetainedBytes(problem));
  ASSERT_TRUE(retained.ok()) << retained.status();

  Problem forward = problem;
  forward.accumulate_gradients = false;
  for (SliceData& slice : forward.slices) slice.want_grad_hidden = false;
  ASSERT_TRUE(RunChunk(*deferred, forward, {.retained = retained->get()}).done.ok());
  Problem other = MakeProblem(Random(33, 45, 210), rng());
  other.config = problem.config;
  other.options = problem.options;
  other.accumulate_gradients = false;
  ASSERT_TRUE(RunChunk(*deferred, other).done.ok());

  const ChunkRun got =
      RunChunk(*deferred, problem, {.retained = retained->get(), .take_retained = true, .independent = true});
  ASSERT_TRUE(got.done.ok()) << got.done;
  for (size_t i = 0; i < problem.slices.size(); ++i) {
    EXPECT_EQ(want.slices[i].loss, got.slices[i].loss);
    EXPECT_EQ(want.slices[i].grad_hidden, got.slices[i].grad_hidden);
  }
  EXPECT_EQ(AllGradients(*direct), AllGradients(*deferred));
}

}  // namespace lossd::kernels::testing
