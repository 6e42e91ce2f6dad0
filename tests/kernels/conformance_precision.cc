// SPDX-License-Identifier: Apache-2.0
// The results of a row against double precision on the same inputs: within 1e-4 whatever the row shares its
// chunk with, the dtype, the options and the way that the chunk takes.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/comparison.h"
#include "tests/kernels/tolerances.h"

namespace lossd::kernels::testing {
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

}  // namespace lossd::kernels::testing
