// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/backend_conformance.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/kernels/comparison.h"

namespace lossd::kernels::testing {

std::string ConformanceName(const ::testing::TestParamInfo<ConformanceCase>& info) {
  return absl::StrCat(info.param.name, "_", Name(info.param.compute), "_", Name(info.param.hidden));
}

void PrintTo(const ConformanceCase& c, std::ostream* out) {
  *out << c.name << ", compute " << Name(c.compute) << ", hidden " << Name(c.hidden) << ", logits "
       << Name(c.logits);
}

absl::Span<const uint8_t> AsBytes(const std::vector<float>& values) {
  return {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(float)};
}

bool AllZero(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float v) { return v == 0.0f; });
}

bool AllFinite(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); });
}

double NormOf(absl::Span<const float> values) {
  double sum = 0.0;
  for (float v : values) sum += double{v} * double{v};
  return std::sqrt(sum);
}

std::vector<std::vector<float>> AllGradients(HeadKernels& head) {
  std::vector<std::vector<float>> gradients;
  for (Param param : kAllParams) {
    if (HasTensor(head.config(), {param, Role::kGradient})) gradients.push_back(ReadGradient(head, param));
  }
  return gradients;
}

void ExpectZeroGradients(HeadKernels& head) {
  for (const std::vector<float>& gradient : AllGradients(head)) EXPECT_TRUE(AllZero(gradient));
}

void ExpectGradients(const ChunkRun& run, Gradients gradients) {
  EXPECT_EQ(run.gradients, gradients);
  ASSERT_FALSE(run.choices.empty());
  EXPECT_EQ(run.choices.front().what, "gradients");
  EXPECT_EQ(run.choices.front().choice, Name(gradients));
}

ProblemSpec BackendConformance::Plain(std::vector<int64_t> slice_rows, int64_t hidden_size,
                                      int64_t vocab_size) const {
  ProblemSpec spec;
  spec.hidden_dtype = GetParam().hidden;
  spec.config.hidden_size = hidden_size;
  spec.config.vocab_size = vocab_size;
  spec.config.compute_dtype = GetParam().compute;
  spec.config.optimizer_state = OptimizerState::kNone;
  spec.config.logits = GetParam().logits;
  SplitHead(spec.config);
  spec.auto_samples_uniform = GetParam().auto_samples_uniform;
  spec.exact_distilled = GetParam().exact_distilled;
  spec.class_parts = spec.config.split == Split::kVocabulary ? GetParam().places() : 1;
  spec.slice_rows = std::move(slice_rows);
  return spec;
}

ProblemSpec BackendConformance::Random(int64_t rows, int64_t hidden_size, int64_t vocab_size) {
  ProblemSpec spec = RandomSpec(rows, hidden_size, vocab_size, GetParam().hidden, GetParam().compute, rng_);
  spec.config.logits = GetParam().logits;
  SplitHead(spec.config);
  spec.auto_samples_uniform = GetParam().auto_samples_uniform;
  spec.exact_distilled = GetParam().exact_distilled;
  spec.class_parts = spec.config.split == Split::kVocabulary ? GetParam().places() : 1;
  return spec;
}

void BackendConformance::SplitHead(HeadConfig& config) const {
  config.split = config.vocab_size < GetParam().places() ? Split::kRows : GetParam().split;
  if (config.split != Split::kVocabulary) return;
  config.shares = GetParam().shares;
  config.replicas = GetParam().replicas;
}

Problem BackendConformance::WithLogits(const std::vector<float>& logits,
                                       const std::vector<int32_t>& targets) {
  constexpr int64_t kHidden = 24;
  ProblemSpec spec =
      Plain({static_cast<int64_t>(targets.size())}, kHidden, static_cast<int64_t>(logits.size()));
  spec.logit_deviation = 0.25f;
  Problem problem = MakeProblem(spec, rng_);
  for (size_t v = 0; v < logits.size(); ++v) problem.weight[v * kHidden] = logits[v];
  SliceData& slice = problem.slices.front();
  slice.targets = targets;
  for (size_t n = 0; n < targets.size(); ++n) {
    float* const x = &slice.hidden[n * kHidden];
    x[0] = 1.0f;
    for (int64_t i = 1; i < kHidden; ++i) x[i] = RoundTo(problem.hidden_dtype, x[i] * 0.01f);
  }
  return problem;
}

TEST_P(BackendConformance, ShapesThatNoTileDivides) {
  for (const auto& [rows, hidden, vocab] : kOddShapes) {
    RunAndCompare(backend(), {MakeProblem(Plain({rows}, hidden, vocab), rng())});
  }
}

TEST_P(BackendConformance, EachOptionAlone) {
  for (const ProblemSpec& spec : EachOptionAlone(Plain({17, 20}, 37, 101))) {
    RunAndCompare(backend(), {MakeProblem(spec, rng())});
  }
}

TEST_P(BackendConformance, RandomCombinationsOverSeveralChunks) {
  constexpr int64_t kShapes[][3] = {{40, 24, 61}, {31, 47, 123}, {9, 129, 67}, {70, 16, 257}};
  for (int repeat = 0; repeat < 6; ++repeat) {
    for (const auto& [rows, hidden, vocab] : kShapes) {
      const ProblemSpec spec = Random(rows, hidden, vocab);
      std::vector<Problem> chunks = {MakeProblem(spec, rng())};
      for (int64_t more = UniformInt(rng(), 0, 2); more > 0; --more) {
        Problem next = chunks.front();
        next.slices = {MakeSlice(spec, UniformInt(rng(), 1, rows), rng())};
        next.slices.front().want_grad_hidden = Chance(rng(), 0.5);
        chunks.push_back(std::move(next));
      }
      RunAndCompare(backend(), chunks);
    }
  }
}

TEST_P(BackendConformance, GradHiddenMayOverwriteHidden) {
  RunAndCompare(backend(), {MakeProblem(Random(60, 33, 129), rng())}, {.grad_hidden_in_place = true});
}

TEST_P(BackendConformance, RowOutputsMayBeNull) {
  RunAndCompare(backend(), {MakeProblem(Random(20, 24, 50), rng())}, {.want_row_outputs = false});
}

TEST_P(BackendConformance, SomeSlicesWantNoGradHidden) {
  Problem problem = MakeProblem(Random(64, 40, 77), rng());
  problem.slices = {MakeSlice(Plain({1}, 40, 77), 9, rng()), MakeSlice(Plain({1}, 40, 77), 5, rng()),
                    MakeSlice(Plain({1}, 40, 77), 14, rng())};
  problem.slices[1].want_grad_hidden = false;
  RunAndCompare(backend(), {problem});
}

TEST_P(BackendConformance, FrozenInputStillTrainsTheHead) {
  for (Norm norm : {Norm::kNone, Norm::kLayerNorm, Norm::kRmsNorm}) {
    ProblemSpec spec = Plain({30}, 21, 90);
    spec.config.norm = norm;
    spec.config.has_bias = true;
    Problem problem = MakeProblem(spec, rng());
    problem.slices.front().want_grad_hidden = false;
    RunAndCompare(backend(), {problem});
  }
}

TEST_P(BackendConformance, WithoutAccumulationNoGradientMoves) {
  for (Norm norm : {Norm::kNone, Norm::kLayerNorm}) {
    ProblemSpec spec = Plain({30, 4}, 21, 90);
    spec.config.norm = norm;
    spec.config.has_bias = true;
    Problem problem = MakeProblem(spec, rng());
    problem.accumulate_gradients = false;
    problem.slices.back().want_grad_hidden = false;  // loss only
    const auto head = MakeHead(backend(), problem);
    ASSERT_NE(head, nullptr);
    const std::vector<reference::Result> want = ComputeReference(problem, nullptr);
    const ChunkRun got = RunChunk(*head, problem);
    ASSERT_TRUE(got.done.ok()) << got.done;
    for (size_t i = 0; i < want.size(); ++i) {
      ExpectSliceMatches(head->compute_dtype(), problem, problem.slices[i], want[i], got.slices[i]);
    }
    ExpectZeroGradients(*head);
  }
}

TEST_P(BackendConformance, FrozenHeadHoldsNoGradients) {
  ProblemSpec spec = Plain({30}, 21, 90);
  spec.config.trainable = false;
  Problem problem = MakeProblem(spec, rng());
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  EXPECT_EQ(head->memory()[MemoryKind::kGradients], 0);
  EXPECT_EQ(head->memory()[MemoryKind::kOptimizer], 0);
  EXPECT_EQ(RunChunk(*head, problem).results.code(), absl::StatusCode::kInvalidArgument);
  problem.accumulate_gradients = false;
  RunAndCompare(backend(), {problem});
  EXPECT_EQ(head->ApplyStep({.kind = OptimizerOptions::Kind::kSgd}, 1).code(),
            absl::StatusCode::kFailedPrecondition);
  std::vector<uint8_t> bytes(90 * 21 * 4);
  EXPECT_EQ(head->ReadTensor({Param::kWeight, Role::kGradient}, 0, 90, DType::kFloat32, absl::MakeSpan(bytes))
                .code(),
            absl::StatusCode::kNotFound);
}

TEST_P(BackendConformance, AllRowsIgnoredGiveExactZeros) {
  ProblemSpec spec = Random(40, 24, 61);
  spec.ignored = 1.0;
  RunAndCompare(backend(), {MakeProblem(spec, rng())});
}

TEST_P(BackendConformance, EmptyChunksAndSlices) {
  ProblemSpec spec = Plain({0, 5, 0, 3, 0}, 16, 33);
  RunAndCompare(backend(), {MakeProblem(spec, rng())});
  spec.slice_rows = {0};
  RunAndCompare(backend(), {MakeProblem(spec, rng())});
  spec.slice_rows = {};
  RunAndCompare(backend(), {MakeProblem(spec, rng())});
}

TEST_P(BackendConformance, RowWeightZeroGivesExactZeros) {
  ProblemSpec spec = Plain({12}, 19, 45);
  spec.config.has_bias = true;
  spec.config.norm = Norm::kLayerNorm;
  spec.options = {.softcap = 10.0f, .label_smoothing = 0.1f, .z_loss = 0.01f};
  spec.ignored = 0.0;
  Problem problem = MakeProblem(spec, rng());
  problem.slices.front().row_weights.assign(12, 0.0f);
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  const ChunkRun run = RunChunk(*head, problem);
  ASSERT_TRUE(run.done.ok()) << run.done;
  EXPECT_TRUE(AllZero(run.slices[0].grad_hidden));
  EXPECT_TRUE(AllZero(run.slices[0].loss));
  EXPECT_EQ(run.slices[0].sums.loss, 0.0);
  EXPECT_EQ(run.slices[0].sums.valid_rows, 12);
  EXPECT_GT(NormOf(run.slices[0].lse), 0.0);
  ExpectZeroGradients(*head);
}

TEST_P(BackendConformance, OneSidedLogits) {
  std::vector<float> one_high(125, -15.0f);
  one_high[77] = 3.0f;
  RunAndCompare(backend(), {WithLogits(one_high, {77, 0, 124})});
  RunAndCompare(backend(), {WithLogits(std::vector<float>(125, -20.0f), {0, 60, 124})});
  RunAndCompare(backend(), {WithLogits(std::vector<float>(33, -20.0f), {5})});
}

TEST_P(BackendConformance, CommonOffsetOfAThousand) {
  std::vector<float> logits(65);
  for (size_t v = 0; v < logits.size(); ++v) logits[v] = 1000.0f + static_cast<float>(8 * (v % 4));
  RunAndCompare(backend(), {WithLogits(logits, {0, 1, 2, 3})});
  for (float& z : logits) z -= 2000.0f;
  RunAndCompare(backend(), {WithLogits(logits, {0, 1, 2, 3})});
}

// They leave the logits as they are, but for what a tanh near 0 loses if it is formed by subtraction.
TEST_P(BackendConformance, SoftcapsFarAboveTheLogits) {
  for (float softcap : {1e4f, 1e6f, 1e8f, 1e30f}) {
    ProblemSpec spec = Plain({40}, 37, 300);
    spec.options.softcap = softcap;
    RunAndCompare(backend(), {MakeProblem(spec, rng())});
  }
}

// A target 89 nats and more below lse: its probability underflows, its loss does not.
TEST_P(BackendConformance, TargetFarBelowTheRest) {
  for (float gap : {80.0f, 88.0f, 89.0f, 96.0f, 104.0f, 120.0f, 200.0f}) {
    std::vector<float> logits(130, 0.0f);
    logits[129] = -gap;
    logits[3] = 1.0f;
    RunAndCompare(backend(), {WithLogits(logits, {129, 3})});
  }
}

// p_y - 1 is 1e-2 ... 1e-7 here: formed by subtraction it would lose most of its digits.
TEST_P(BackendConformance, ConfidentRowsKeepTheirGradient) {
  for (float gap : {11.0f, 15.5f, 17.75f, 22.0f}) {
    std::vector<float> logits(511, 0.0f);
    logits[200] = gap;
    Problem problem = WithLogits(logits, {200});
    problem.slices.front().grad_scale = 1024.0f;  // keeps 16-bit gradients away from underflow
    RunAndCompare(backend(), {problem});
  }
}

TEST_P(BackendConformance, TargetsOnTileEdges) {
  ProblemSpec spec = Plain({16}, 48, 513);
  Problem problem = MakeProblem(spec, rng());
  problem.slices.front().targets = {0,   1,   15,  16,  63,  64,  127, 128,
                                    255, 256, 319, 383, 384, 511, 512, kIgnoredTarget};
  RunAndCompare(backend(), {problem});
}

// Blocks of classes begin at multiples of 256.
TEST_P(BackendConformance, TargetsOnTheEdgesOfBlocksOfClasses) {
  for (const int64_t vocab : {769, 1027, 2048}) {
    ProblemSpec spec = Plain({12}, 40, vocab);
    spec.config.has_bias = true;
    spec.options.label_smoothing = vocab == 1027 ? 0.1f : 0.0f;
    Problem problem = MakeProblem(spec, rng());
    const auto last = static_cast<int32_t>(vocab - 1);
    problem.slices.front().targets = {0, 7, 8, 255, 256, 257, 511, 512, 767, 768, last, last - 1};
    RunAndCompare(backend(), {problem});
  }
}

TEST_P(BackendConformance, ArgmaxIsTheSmallestOfTheLargest) {
  std::vector<float> logits(70, -4.0f);
  logits[11] = logits[40] = logits[69] = 2.0f;
  Problem problem = WithLogits(logits, {11, 40});
  for (size_t v = 0; v < logits.size(); ++v) {
    for (size_t i = 1; i < 24; ++i) problem.weight[v * 24 + i] = 0.0f;  // exact ties
  }
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  const ChunkRun run = RunChunk(*head, problem);
  ASSERT_TRUE(run.done.ok()) << run.done;
  EXPECT_EQ(run.slices[0].argmax, (std::vector<int32_t>{11, 11}));
  EXPECT_EQ(run.slices[0].sums.correct_rows, 1);
}

}  // namespace lossd::kernels::testing
