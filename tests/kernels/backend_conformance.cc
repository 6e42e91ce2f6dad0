#include "tests/kernels/backend_conformance.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "kernels/reference/optimizer.h"
#include "tests/kernels/tolerances.h"

namespace lossd::kernels::testing {
namespace {

using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

absl::Span<const uint8_t> AsBytes(const std::vector<float>& values) {
  return {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(float)};
}

bool AllZero(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float v) { return v == 0.0f; });
}

bool AllFinite(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); });
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

// What the chunk and its first choice say.
void ExpectGradients(const ChunkRun& run, Algorithm algorithm) {
  EXPECT_EQ(run.algorithm, algorithm);
  ASSERT_FALSE(run.choices.empty());
  EXPECT_EQ(run.choices.front().what, "gradients");
  EXPECT_EQ(run.choices.front().choice, Name(algorithm));
}

double NormOf(absl::Span<const float> values) {
  double sum = 0.0;
  for (float v : values) sum += double{v} * double{v};
  return std::sqrt(sum);
}

}  // namespace

std::string ConformanceName(const ::testing::TestParamInfo<ConformanceCase>& info) {
  return absl::StrCat(info.param.name, "_", Name(info.param.compute), "_", Name(info.param.hidden));
}

ProblemSpec BackendConformance::Plain(std::vector<int64_t> slice_rows, int64_t hidden_size,
                                      int64_t vocab_size) const {
  ProblemSpec spec;
  spec.hidden_dtype = GetParam().hidden;
  spec.config.hidden_size = hidden_size;
  spec.config.vocab_size = vocab_size;
  spec.config.compute_dtype = GetParam().compute;
  spec.config.optimizer_state = OptimizerState::kNone;
  spec.config.algorithm = GetParam().algorithm;
  spec.slice_rows = std::move(slice_rows);
  return spec;
}

ProblemSpec BackendConformance::Random(int64_t rows, int64_t hidden_size, int64_t vocab_size) {
  ProblemSpec spec = RandomSpec(rows, hidden_size, vocab_size, GetParam().hidden, GetParam().compute, rng_);
  spec.config.algorithm = GetParam().algorithm;
  return spec;
}

Problem BackendConformance::MakeProblem(ProblemSpec spec, Rng& rng) const {
  if (is_cut()) {
    const bool exact = spec.options.algorithm == Algorithm::kExact;
    spec.options.algorithm = Algorithm::kCut;
    // An epsilon of 0 would ask for the exact way; this keeps every element, too.
    spec.options.filter_epsilon = exact ? 0.0f : std::max(spec.options.filter_epsilon, 1e-30f);
  }
  return testing::MakeProblem(spec, rng);
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
  constexpr int64_t kShapes[][3] = {{1, 1, 1},       {3, 1, 7},      {8, 8, 8},     {1, 33, 65},
                                    {252, 123, 507}, {188, 31, 123}, {80, 64, 125}, {257, 127, 513},
                                    {5, 200, 1},     {130, 2, 1031}, {64, 256, 256}};
  for (const auto& [rows, hidden, vocab] : kShapes) {
    RunAndCompare(backend(), {MakeProblem(Plain({rows}, hidden, vocab), rng())});
  }
}

TEST_P(BackendConformance, EachOptionAlone) {
  const ProblemSpec plain = Plain({17, 20}, 37, 101);
  std::vector<ProblemSpec> specs(14, plain);
  specs[1].config.has_bias = true;
  specs[2].config.norm = Norm::kLayerNorm;
  specs[3].config.norm = Norm::kRmsNorm;
  specs[4].options.logit_scale = 0.125f;
  specs[5].options.softcap = 6.0f;
  specs[6].options.label_smoothing = 0.1f;
  specs[7].options.z_loss = 0.02f;
  specs[8].config.has_class_weights = specs[8].options.use_class_weights = true;
  specs[9].row_weights = true;
  specs[10].grad_loss = true;
  specs[11].grad_lse = true;
  specs[12].grad_entropy = true;
  specs[13].grad_scale = -0.37f;
  for (const ProblemSpec& spec : specs) RunAndCompare(backend(), {MakeProblem(spec, rng())});
}

TEST_P(BackendConformance, FilteredWithEachOption) {
  ProblemSpec plain = Plain({17, 20}, 37, 101);
  plain.options.algorithm = Algorithm::kFiltered;
  plain.options.filter_epsilon = 0.004f;
  std::vector<ProblemSpec> specs(16, plain);
  specs[1].config.has_bias = true;
  specs[2].config.norm = Norm::kLayerNorm;
  specs[3].config.norm = Norm::kRmsNorm;
  specs[4].options.logit_scale = -0.5f;
  specs[5].options.softcap = 6.0f;
  specs[6].options.label_smoothing = 0.1f;
  specs[7].options.z_loss = 0.02f;
  specs[8].config.has_class_weights = specs[8].options.use_class_weights = true;
  specs[8].options.label_smoothing = 0.2f;
  specs[8].config.has_bias = true;
  specs[9].row_weights = true;
  specs[10].grad_loss = true;
  specs[11].grad_lse = true;
  specs[12].grad_entropy = true;  // exact, as is the next
  specs[13].options.softcap = 6.0f;
  specs[13].options.label_smoothing = 0.1f;
  specs[14].accumulate_mask = true;
  specs[15].grad_scale = -0.37f;
  for (const ProblemSpec& spec : specs) RunAndCompare(backend(), {MakeProblem(spec, rng())});
}

TEST_P(BackendConformance, FilteredShapesThatNoTileDivides) {
  constexpr int64_t kShapes[][3] = {{1, 1, 1},       {3, 1, 7},      {8, 8, 8},     {1, 33, 65},
                                    {252, 123, 507}, {188, 31, 123}, {80, 64, 125}, {257, 127, 513},
                                    {5, 200, 1},     {130, 2, 1031}, {64, 256, 256}};
  for (const auto& [rows, hidden, vocab] : kShapes) {
    for (float epsilon : {0.0f, 0.003f, 0.9f}) {
      ProblemSpec spec = Plain({rows}, hidden, vocab);
      spec.options.algorithm = Algorithm::kFiltered;
      spec.options.filter_epsilon = epsilon;
      RunAndCompare(backend(), {MakeProblem(spec, rng())});
    }
  }
}

// Epsilon 0 keeps every element: what an algorithm that keeps lists can hold, or more.
TEST_P(BackendConformance, FilteredWithEveryClassKept) {
  ProblemSpec spec = Plain({9}, 24, 9000);
  spec.options.algorithm = Algorithm::kFiltered;
  spec.options.filter_epsilon = 0.0f;
  spec.logit_deviation = 1.0f;
  RunAndCompare(backend(), {MakeProblem(spec, rng())});
}

// Few rows, and lists as long as those of a flat softmax are.
TEST_P(BackendConformance, FilteredWithMostClassesKept) {
  ProblemSpec spec = Plain({9, 2}, 24, 600);
  spec.options.algorithm = Algorithm::kFiltered;
  spec.options.filter_epsilon = 0.001f;
  spec.logit_deviation = 0.7f;
  RunAndCompare(backend(), {MakeProblem(spec, rng())});
}

// Before its last classes a row looks as if every class had to be kept.
TEST_P(BackendConformance, FilteredRowsThatEndHigh) {
  std::vector<float> logits(40'000, 0.0f);
  std::fill(logits.end() - 8, logits.end(), 20.0f);
  Problem problem = WithLogits(logits, {5, 39'999, 20'000, 39'993});
  if (!is_cut()) problem.options.algorithm = Algorithm::kFiltered;
  problem.options.filter_epsilon = 0x1p-18f;
  RunAndCompare(backend(), {problem});
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  EXPECT_GT(RunChunk(*head, problem).slices[0].sums.dropped_mass, 0.0) << "it was not filtered";
}

TEST_P(BackendConformance, AutoFiltersWhileLittleIsDropped) {
  if (is_cut()) GTEST_SKIP() << "a head for cut does not choose";
  ProblemSpec spec = Plain({40, 9}, 24, 300);
  spec.options.algorithm = Algorithm::kAuto;
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
    ExpectGradients(run, share > 1.0 ? Algorithm::kFiltered : Algorithm::kExact);
    EXPECT_THAT(run.choices.front().reason, HasSubstr("max_dropped_mass"));
  }
}

// A backend may leave the filter out where it was long in vain, but for chunks that are to be independent,
// and comes back to it.
TEST_P(BackendConformance, AutoAfterManyFlatChunks) {
  if (is_cut()) GTEST_SKIP() << "a head for cut does not choose";
  constexpr int kMany = 60, kSoon = 40;
  ProblemSpec spec = Plain({9, 3}, 24, 300);
  spec.ignored = 0.0;
  spec.options.algorithm = Algorithm::kAuto;
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
  for (int i = 0; i < kMany; ++i) ExpectGradients(RunChunk(*head, flat), Algorithm::kExact);
  ExpectGradients(RunChunk(*head, peaked, {.independent = true}), Algorithm::kFiltered);
  ExpectGradients(RunChunk(*head, flat, {.independent = true}), Algorithm::kExact);
  for (int i = 0; i < kSoon; ++i) RunChunk(*head, peaked);
  for (int i = 0; i < 3; ++i) ExpectGradients(RunChunk(*head, peaked), Algorithm::kFiltered);
}

TEST_P(BackendConformance, NothingIsDroppedFromALossAlone) {
  ProblemSpec spec = Plain({12}, 24, 300);
  spec.options.algorithm = Algorithm::kFiltered;
  Problem problem = MakeProblem(spec, rng());
  problem.accumulate_gradients = false;
  problem.slices.front().want_grad_hidden = false;
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  const ChunkRun run = RunChunk(*head, problem);
  EXPECT_EQ(run.slices[0].sums.dropped_mass, 0.0);
  ExpectGradients(run, Algorithm::kExact);
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

// What deterministic servers rest on: results depend on the rows of a chunk and their order alone.

// Rows [begin, end) of a slice.
SliceData RowsOf(const SliceData& slice, int64_t hidden_size, int64_t begin, int64_t end) {
  SliceData part;
  part.grad_scale = slice.grad_scale;
  part.want_grad_hidden = slice.want_grad_hidden;
  const auto copy = [begin, end](const auto& from, auto& to, int64_t width) {
    if (!from.empty()) to.assign(from.begin() + begin * width, from.begin() + end * width);
  };
  copy(slice.hidden, part.hidden, hidden_size);
  copy(slice.targets, part.targets, 1);
  copy(slice.row_weights, part.row_weights, 1);
  copy(slice.accumulate, part.accumulate, 1);
  copy(slice.grad_loss, part.grad_loss, 1);
  copy(slice.grad_lse, part.grad_lse, 1);
  copy(slice.grad_entropy, part.grad_entropy, 1);
  return part;
}

// `got`, [rows, width], has the bits of `want` from row `row` on.
template <typename T>
void ExpectSameBits(const std::vector<T>& got, const std::vector<T>& want, int64_t row, int64_t rows,
                    int64_t width) {
  ASSERT_EQ(got.size(), static_cast<size_t>(rows * width));
  EXPECT_EQ(std::memcmp(got.data(), want.data() + row * width, got.size() * sizeof(T)), 0);
}

TEST_P(BackendConformance, TheCutIntoSlicesLeavesNoTrace) {
  for (const auto& [rows, hidden, vocab] :
       {std::array<int64_t, 3>{75, 33, 129}, {200, 64, 257}, {7, 24, 40}}) {
    ProblemSpec spec = Random(rows, hidden, vocab);
    spec.accumulate_mask = false;
    spec.slice_rows = {rows};
    const Problem whole = MakeProblem(spec, rng());
    const SliceData& all = whole.slices.front();
    const auto head = MakeHead(backend(), whole);
    ASSERT_NE(head, nullptr);
    const ChunkRun want = RunChunk(*head, whole);
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
      const ChunkRun got = RunChunk(*head, cut, {.grad_hidden_in_place = Chance(rng(), 0.5)});
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

TEST_P(BackendConformance, ARowsResultsDependOnItsPlaceButNotOnTheOtherRows) {
  for (const auto& [rows, hidden, vocab] :
       {std::array<int64_t, 3>{75, 33, 129}, {200, 64, 257}, {7, 24, 40}}) {
    ProblemSpec spec = Random(rows, hidden, vocab);
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
    const size_t bytes = static_cast<size_t>((end - begin) * hidden) * sizeof(float);
    EXPECT_EQ(std::memcmp(got.slices[0].grad_hidden.data() + begin * hidden,
                          want.slices[0].grad_hidden.data() + begin * hidden, bytes),
              0);
  }
}

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

TEST_P(BackendConformance, CutIsExactOrFilteredWhateverTheHeadIsFor) {
  for (const float epsilon : {0.0f, 0.003f}) {
    ProblemSpec spec = Plain({40, 9}, 24, 300);
    spec.options.algorithm = Algorithm::kCut;
    spec.options.filter_epsilon = epsilon;
    RunAndCompare(backend(), {testing::MakeProblem(spec, rng())});
  }
}

TEST_P(BackendConformance, AHeadForCutComputesNothingElse) {
  ProblemSpec spec = Plain({4}, 8, 30);
  spec.config.algorithm = Algorithm::kCut;
  spec.options.algorithm = Algorithm::kCut;
  Problem problem = testing::MakeProblem(spec, rng());
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  for (const Algorithm other : {Algorithm::kExact, Algorithm::kFiltered, Algorithm::kAuto}) {
    problem.options.algorithm = other;
    const absl::Status refused = RunChunk(*head, problem).results;
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(refused.message()), HasSubstr("algorithm must be cut"));
    EXPECT_THAT(std::string(refused.message()), HasSubstr(std::string(Name(other))));
  }
  ExpectZeroGradients(*head);
}

TEST_P(BackendConformance, AHeadKeepsToItsOwnWorkspaceLimit) {
  HeadConfig config = Plain({1}, 24, 5000).config;
  for (const int64_t limit : {int64_t{8} << 20, int64_t{64} << 20}) {
    config.workspace_bytes = limit;
    const auto plan = backend().PlanHead(config);
    ASSERT_TRUE(plan.ok()) << plan.status();
    constexpr int64_t kPages = int64_t{4} << 20;  // two buffers may be rounded up
    EXPECT_LE((*plan)[MemoryKind::kWorkspace], is_cut() ? limit : limit + kPages);
  }
  config.workspace_bytes = 10;
  EXPECT_FALSE(backend().PlanHead(config).ok());
  EXPECT_FALSE(backend().CreateHead(config).ok());
  config.workspace_bytes = -1;
  EXPECT_EQ(backend().PlanHead(config).status().code(), absl::StatusCode::kInvalidArgument);
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

// A forward pass that keeps its hidden states, other work in between, and a backward pass from what was kept
// give the bits of a direct computation.
TEST_P(BackendConformance, RetainedRowsGiveTheSameBits) {
  const Problem problem = MakeProblem(Random(70, 45, 210), rng());
  const auto direct = MakeHead(backend(), problem);
  const auto deferred = MakeHead(backend(), problem);
  ASSERT_TRUE(direct != nullptr && deferred != nullptr);
  const ChunkRun want = RunChunk(*direct, problem);
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

  const ChunkRun got = RunChunk(*deferred, problem, {.retained = retained->get(), .take_retained = true});
  ASSERT_TRUE(got.done.ok()) << got.done;
  for (size_t i = 0; i < problem.slices.size(); ++i) {
    EXPECT_EQ(want.slices[i].loss, got.slices[i].loss);
    EXPECT_EQ(want.slices[i].grad_hidden, got.slices[i].grad_hidden);
  }
  EXPECT_EQ(AllGradients(*direct), AllGradients(*deferred));
}

TEST_P(BackendConformance, RetainedMemoryIsCountedAndBounded) {
  const int64_t before = backend().memory().current[MemoryKind::kRetained];
  const Problem problem = MakeProblem(Plain({5}, 16, 9), rng());
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  {
    auto retained = backend().AllocateRetained(RetainedBytes(problem) - 4);
    ASSERT_TRUE(retained.ok()) << retained.status();
    EXPECT_EQ((*retained)->size(), RetainedBytes(problem) - 4);
    EXPECT_GE(backend().memory().current[MemoryKind::kRetained] - before, (*retained)->size());
    EXPECT_EQ(RunChunk(*head, problem, {.retained = retained->get()}).results.code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(RunChunk(*head, problem, {.retained = retained->get(), .take_retained = true}).results.code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(backend().memory().current[MemoryKind::kRetained], before);
  EXPECT_EQ(backend().AllocateRetained(-1).status().code(), absl::StatusCode::kInvalidArgument);
  ExpectZeroGradients(*head);
}

TEST_P(BackendConformance, NewHeadIsZeroButForGainAndClassWeights) {
  HeadConfig config = Plain({1}, 7, 9).config;
  config.has_bias = config.has_class_weights = true;
  config.norm = Norm::kLayerNorm;
  config.optimizer_state = OptimizerState::kAdam;
  auto head = backend().CreateHead(config);
  ASSERT_TRUE(head.ok()) << head.status();
  for (Param param : kAllParams) {
    for (Role role : {Role::kValue, Role::kGradient, Role::kMoment1, Role::kMoment2}) {
      if (!HasTensor(config, {param, role})) continue;
      const bool one = role == Role::kValue && (param == Param::kNormGain || param == Param::kClassWeights);
      const std::vector<float> values = ReadAll(**head, {param, role});
      EXPECT_EQ(values, std::vector<float>(values.size(), one ? 1.0f : 0.0f)) << Name(param) << Name(role);
    }
  }
}

TEST_P(BackendConformance, TensorsRoundTripInRowRanges) {
  HeadConfig config = Plain({1}, 13, 29).config;
  config.optimizer_state = OptimizerState::kAdam;
  auto head = backend().CreateHead(config);
  ASSERT_TRUE(head.ok()) << head.status();
  for (Role role : {Role::kValue, Role::kGradient, Role::kMoment1, Role::kMoment2}) {
    const TensorId id{Param::kWeight, role};
    std::vector<float> want(29 * 13);
    for (float& v : want) v = Uniform(rng(), -3.0f, 3.0f);
    for (int64_t row = 0; row < 29; row += 10) {
      const int64_t rows = std::min<int64_t>(10, 29 - row);
      const absl::Status status = (*head)->WriteTensor(
          id, row, rows, DType::kFloat32,
          AsBytes(want).subspan(static_cast<size_t>(row) * 52, static_cast<size_t>(rows) * 52));
      ASSERT_TRUE(status.ok()) << status;
    }
    EXPECT_EQ(ReadAll(**head, id), want);
    for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      std::vector<uint8_t> bytes(7 * 13 * 2);
      ASSERT_TRUE((*head)->ReadTensor(id, 4, 7, dtype, absl::MakeSpan(bytes)).ok());
      EXPECT_EQ(bytes, Encode(dtype, absl::MakeConstSpan(want).subspan(4 * 13, 7 * 13)));
    }
  }
  const std::vector<float> rows = {0.1f, 1e-7f, 65504.0f, -3.3f, 2.0f, 0.0f, -0.0f,
                                   5.0f, 6.0f,  7.0f,     8.0f,  9.0f, 10.0f};
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const std::vector<uint8_t> bytes = Encode(dtype, rows);
    ASSERT_TRUE((*head)->WriteTensor({Param::kWeight, Role::kValue}, 28, 1, dtype, bytes).ok());
    const std::vector<float> all = ReadAll(**head, {Param::kWeight, Role::kValue});
    EXPECT_EQ(std::vector<float>(all.end() - 13, all.end()), Decode(dtype, bytes));
  }
}

TEST_P(BackendConformance, EveryTensorReadsInAnyRangeAndDType) {
  HeadConfig config = Plain({1}, 37, 53).config;
  config.has_bias = config.has_class_weights = true;
  config.norm = Norm::kLayerNorm;
  config.optimizer_state = OptimizerState::kAdam;
  auto head = backend().CreateHead(config);
  ASSERT_TRUE(head.ok()) << head.status();
  for (Param param : kAllParams) {
    for (Role role : {Role::kValue, Role::kGradient, Role::kMoment1, Role::kMoment2}) {
      const TensorId id{param, role};
      if (!HasTensor(config, id)) continue;
      const TensorShape shape = ShapeOf(config, param);
      std::vector<float> values(static_cast<size_t>(shape.elements()));
      for (float& v : values) v = Uniform(rng(), -3.0f, 3.0f);
      ASSERT_TRUE((*head)->WriteTensor(id, 0, shape.rows, DType::kFloat32, AsBytes(values)).ok());
      for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
        const int64_t begin = UniformInt(rng(), 0, shape.rows);
        const int64_t rows = UniformInt(rng(), 0, shape.rows - begin);
        const auto want = absl::MakeConstSpan(values).subspan(static_cast<size_t>(begin * shape.cols),
                                                              static_cast<size_t>(rows * shape.cols));
        std::vector<uint8_t> got(want.size() * SizeOf(dtype), 0xcd);
        ASSERT_TRUE((*head)->ReadTensor(id, begin, rows, dtype, absl::MakeSpan(got)).ok());
        EXPECT_EQ(got, Encode(dtype, want))
            << Name(param) << " " << Name(role) << " rows " << begin << " + " << rows;
      }
    }
  }
}

TEST_P(BackendConformance, AddGradientAddsScaledRows) {
  HeadConfig config = Plain({1}, 37, 53).config;
  config.has_bias = true;
  config.norm = Norm::kLayerNorm;
  auto head = backend().CreateHead(config);
  ASSERT_TRUE(head.ok()) << head.status();
  for (Param param : {Param::kWeight, Param::kBias, Param::kNormGain, Param::kNormShift}) {
    const TensorShape shape = ShapeOf(config, param);
    std::vector<float> want(static_cast<size_t>(shape.elements()), 0.0f);
    for (int round = 0; round < 12; ++round) {
      const DType dtype = std::vector<DType>{DType::kFloat32, DType::kFloat16, DType::kBFloat16}[round % 3];
      const float scale = round < 3 ? 1.0f : Uniform(rng(), -4.0f, 4.0f);
      const int64_t begin = UniformInt(rng(), 0, shape.rows);
      const int64_t rows = UniformInt(rng(), 0, shape.rows - begin);
      std::vector<float> values(static_cast<size_t>(rows * shape.cols));
      for (float& v : values) v = Uniform(rng(), -3.0f, 3.0f);
      const std::vector<uint8_t> bytes = Encode(dtype, values);
      const absl::Status added = (*head)->AddGradient(param, begin, rows, dtype, scale, bytes);
      ASSERT_TRUE(added.ok()) << added;
      const std::vector<float> sent = Decode(dtype, bytes);
      for (size_t i = 0; i < sent.size(); ++i) {
        const volatile float product = scale * sent[i];  // rounded before it is added
        want[static_cast<size_t>(begin * shape.cols) + i] += product;
      }
    }
    EXPECT_EQ(ReadAll(**head, {param, Role::kGradient}), want) << Name(param);
  }
}

TEST_P(BackendConformance, AddedGradientsAndChunksAddUp) {
  ProblemSpec spec = Plain({24}, 31, 57);
  spec.config.has_bias = true;
  const Problem problem = MakeProblem(spec, rng());
  const auto alone = MakeHead(backend(), problem);
  const auto both = MakeHead(backend(), problem);
  ASSERT_NE(alone, nullptr);
  ASSERT_NE(both, nullptr);
  const std::vector<float> one(31, 1.0f);
  for (int step = 1; step <= 2; ++step) {  // the second one starts where a step zeroed the gradients
    ASSERT_TRUE(both->AddGradient(Param::kWeight, 56, 1, DType::kFloat32, 0.5f, AsBytes(one)).ok());
    ASSERT_TRUE(RunChunk(*alone, problem).done.ok());
    ASSERT_TRUE(RunChunk(*both, problem).done.ok());
    std::vector<float> want = ReadGradient(*alone, Param::kWeight);
    for (size_t i = want.size() - 31; i < want.size(); ++i) want[i] += 0.5f;
    const std::vector<float> got = ReadGradient(*both, Param::kWeight);
    for (size_t i = 0; i < want.size(); ++i)
      ASSERT_NEAR(got[i], want[i], 1e-6 + 1e-6 * std::fabs(want[i])) << i;
    const OptimizerOptions still{.kind = OptimizerOptions::Kind::kSgd, .learning_rate = 0.0};
    ASSERT_TRUE(alone->ApplyStep(still, step).ok());
    ASSERT_TRUE(both->ApplyStep(still, step).ok());
  }
}

TEST_P(BackendConformance, AddGradientRefusesWhatThereIsNot) {
  HeadConfig config = Plain({1}, 4, 6).config;
  config.has_class_weights = true;
  auto head = backend().CreateHead(config);
  ASSERT_TRUE(head.ok()) << head.status();
  const std::vector<uint8_t> bytes(6 * 4 * 4);
  const auto add = [&](HeadKernels& to, Param param, int64_t begin, int64_t rows, size_t size) {
    return to.AddGradient(param, begin, rows, DType::kFloat32, 1.0f, absl::MakeConstSpan(bytes).first(size))
        .code();
  };
  EXPECT_EQ(add(**head, Param::kWeight, 0, 6, 96), absl::StatusCode::kOk);
  EXPECT_EQ(add(**head, Param::kWeight, 6, 0, 0), absl::StatusCode::kOk);
  EXPECT_EQ(add(**head, Param::kWeight, 0, 6, 92), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(add(**head, Param::kWeight, 5, 2, 32), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(add(**head, Param::kBias, 0, 6, 24), absl::StatusCode::kNotFound);
  EXPECT_EQ(add(**head, Param::kClassWeights, 0, 6, 24), absl::StatusCode::kNotFound);
  config.trainable = false;
  auto frozen = backend().CreateHead(config);
  ASSERT_TRUE(frozen.ok()) << frozen.status();
  EXPECT_EQ(add(**frozen, Param::kWeight, 0, 6, 96), absl::StatusCode::kNotFound);
}

TEST_P(BackendConformance, TensorAccessRefusesBadRanges) {
  const HeadConfig config = Plain({1}, 4, 6).config;
  auto head = backend().CreateHead(config);
  ASSERT_TRUE(head.ok()) << head.status();
  const TensorId weight{Param::kWeight, Role::kValue};
  std::vector<uint8_t> bytes(6 * 4 * 4);
  const auto read = [&](TensorId id, int64_t begin, int64_t rows, size_t size) {
    return (*head)
        ->ReadTensor(id, begin, rows, DType::kFloat32, absl::MakeSpan(bytes).subspan(0, size))
        .code();
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(read(weight, 0, 6, 96), absl::StatusCode::kOk);
  EXPECT_EQ(read(weight, 6, 0, 0), absl::StatusCode::kOk);
  EXPECT_EQ(read(weight, 0, 6, 92), kInvalid);
  EXPECT_EQ(read(weight, 5, 2, 32), kInvalid);
  EXPECT_EQ(read(weight, -1, 2, 32), kInvalid);
  EXPECT_EQ(read(weight, 1, -1, 0), kInvalid);
  EXPECT_EQ(read(weight, std::numeric_limits<int64_t>::max(), 1, 16), kInvalid);
  EXPECT_EQ(read(weight, 1, std::numeric_limits<int64_t>::max(), 16), kInvalid);
  EXPECT_EQ(read({Param::kBias, Role::kValue}, 0, 6, 24), absl::StatusCode::kNotFound);
  EXPECT_EQ(
      (*head)->WriteTensor(weight, 3, 4, DType::kFloat32, absl::MakeConstSpan(bytes).subspan(0, 64)).code(),
      kInvalid);
  EXPECT_TRUE(AllZero(ReadAll(**head, weight)));
}

TEST_P(BackendConformance, GradNormCoversEveryParameter) {
  ProblemSpec spec = Plain({24}, 31, 57);
  spec.config.has_bias = true;
  spec.config.norm = Norm::kLayerNorm;
  const Problem problem = MakeProblem(spec, rng());
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  EXPECT_EQ(*head->GradNorm(), 0.0);
  ASSERT_TRUE(RunChunk(*head, problem).done.ok());
  double squares = 0.0;
  for (const std::vector<float>& gradient : AllGradients(*head)) squares += std::pow(NormOf(gradient), 2);
  EXPECT_NEAR(*head->GradNorm(), std::sqrt(squares), 1e-9 * std::sqrt(squares));
  ASSERT_TRUE(
      head->WriteTensor({Param::kBias, Role::kGradient}, 5, 1, DType::kFloat32, AsBytes({kInf})).ok());
  EXPECT_FALSE(std::isfinite(*head->GradNorm()));
  ASSERT_TRUE(head->ZeroGradients().ok());
  ExpectZeroGradients(*head);
}

// Hyper-parameters at random, of every kind of optimizer.
OptimizerOptions RandomOptimizer(Rng& rng) {
  using Kind = OptimizerOptions::Kind;
  OptimizerOptions options;
  options.kind = Chance(rng, 0.5) ? Kind::kAdamW : Kind::kSgd;
  options.learning_rate = std::pow(10.0, Uniform(rng, -4.0f, -1.0f));
  options.weight_decay = Chance(rng, 0.3) ? 0.0 : Uniform(rng, 0.0f, 0.5f);
  options.decay_vectors = Chance(rng, 0.5);
  options.grad_multiplier = Uniform(rng, -2.0f, 2.0f);
  if (options.kind == Kind::kAdamW) {
    options.beta1 = Uniform(rng, 0.0f, 0.99f);
    options.beta2 = Uniform(rng, 0.5f, 0.9999f);
    options.epsilon = std::pow(10.0, Uniform(rng, -9.0f, -2.0f));
  } else {
    options.momentum = Chance(rng, 0.2) ? 0.0 : Uniform(rng, 0.1f, 0.99f);
    options.nesterov = options.momentum > 0 && Chance(rng, 0.5);
    options.dampening = options.nesterov ? 0.0 : Uniform(rng, 0.0f, 0.9f);
  }
  return options;
}

// Runs both for 25 steps on fresh gradients and compares every parameter and moment.
void ExpectSameUpdates(Backend& backend, const Problem& problem, const OptimizerOptions& options, Rng& rng) {
  struct Parameter {
    std::vector<double> values;
    reference::OptimizerMoments moments;
  };
  const auto head = MakeHead(backend, problem);
  ASSERT_NE(head, nullptr);
  std::map<Param, Parameter> parameters;
  for (Param param : {Param::kWeight, Param::kBias, Param::kNormGain, Param::kNormShift}) {
    parameters[param].values.assign(problem.Values(param).begin(), problem.Values(param).end());
  }
  for (int64_t update = 1; update <= 25; ++update) {
    for (auto& [param, want] : parameters) {
      std::vector<float> gradient(want.values.size());
      for (float& g : gradient) g = Uniform(rng, -1.0f, 1.0f);
      const TensorId id{param, Role::kGradient};
      ASSERT_TRUE(
          head->WriteTensor(id, 0, ShapeOf(head->config(), param).rows, DType::kFloat32, AsBytes(gradient))
              .ok());
      reference::ApplyUpdate(options, update, param != Param::kWeight, {gradient.begin(), gradient.end()},
                             want.values, want.moments);
    }
    ASSERT_TRUE(head->ApplyStep(options, update).ok());
  }
  const auto compare = [&](TensorId id, const std::vector<double>& want) {
    const std::vector<float> got = ReadAll(*head, id);
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_NEAR(got[i], want[i], 3e-6 * (1.0 + std::fabs(want[i])))
          << Name(id.param) << " " << Name(id.role) << " " << i;
    }
  };
  for (const auto& [param, want] : parameters) {
    compare({param, Role::kValue}, want.values);
    if (RequiredState(options) >= OptimizerState::kMomentum)
      compare({param, Role::kMoment1}, want.moments.moment1);
    if (RequiredState(options) == OptimizerState::kAdam)
      compare({param, Role::kMoment2}, want.moments.moment2);
  }
  ExpectZeroGradients(*head);
}

TEST_P(BackendConformance, OptimizersFollowTheReferenceOver25Steps) {
  using Kind = OptimizerOptions::Kind;
  std::vector<OptimizerOptions> cases = {
      {.learning_rate = 1e-2},
      {.learning_rate = 1e-2, .weight_decay = 0.1, .grad_multiplier = 0.25, .beta1 = 0.8, .beta2 = 0.95},
      {.learning_rate = 1e-2, .weight_decay = 0.1, .decay_vectors = true, .epsilon = 1e-4},
      {.learning_rate = 1e-2, .epsilon = 0.0},
      {.kind = Kind::kSgd, .learning_rate = 0.1},
      {.kind = Kind::kSgd, .learning_rate = 0.1, .weight_decay = 0.02, .grad_multiplier = -0.5},
      {.kind = Kind::kSgd, .learning_rate = 0.1, .weight_decay = 0.02, .momentum = 0.9, .dampening = 0.3},
      {.kind = Kind::kSgd, .learning_rate = 0.1, .decay_vectors = true, .momentum = 0.9, .nesterov = true},
  };
  for (int i = 0; i < 8; ++i) cases.push_back(RandomOptimizer(rng()));
  for (size_t i = 0; i < cases.size(); ++i) {
    const OptimizerOptions& o = cases[i];
    SCOPED_TRACE(absl::StrCat("case ", i, ": kind ", static_cast<int>(o.kind), " lr ", o.learning_rate,
                              " decay ", o.weight_decay, " multiplier ", o.grad_multiplier, " betas ",
                              o.beta1, " ", o.beta2, " epsilon ", o.epsilon, " momentum ", o.momentum,
                              " dampening ", o.dampening, " nesterov ", o.nesterov));
    ProblemSpec spec = Plain({1}, 11, 23);
    spec.config.has_bias = true;
    spec.config.norm = Norm::kLayerNorm;
    spec.config.optimizer_state = OptimizerState::kAdam;
    ASSERT_NO_FATAL_FAILURE(ExpectSameUpdates(backend(), MakeProblem(spec, rng()), o, rng()));
  }
}

TEST_P(BackendConformance, WithEpsilonZeroAParameterWithoutGradientStays) {
  const auto head = MakeHead(backend(), [&] {
    ProblemSpec spec = Plain({1}, 5, 9);
    spec.config.optimizer_state = OptimizerState::kAdam;
    return MakeProblem(spec, rng());
  }());
  ASSERT_NE(head, nullptr);
  const std::vector<float> before = ReadAll(*head, {Param::kWeight, Role::kValue});
  ASSERT_TRUE(head->ApplyStep({.learning_rate = 0.1, .epsilon = 0.0}, 1).ok());
  EXPECT_EQ(ReadAll(*head, {Param::kWeight, Role::kValue}), before);
}

// The step changes what the next chunk is computed with.
TEST_P(BackendConformance, StepRefreshesTheComputeWeights) {
  ProblemSpec spec = Plain({20}, 17, 41);
  spec.ignored = 0.0;
  Problem problem = MakeProblem(spec, rng());
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  const double before = RunChunk(*head, problem).slices[0].sums.loss;
  ASSERT_TRUE(head->ApplyStep({.kind = OptimizerOptions::Kind::kSgd, .learning_rate = 0.05}, 1).ok());
  const double after = RunChunk(*head, problem).slices[0].sums.loss;
  EXPECT_LT(after, before - 0.1);
}

TEST_P(BackendConformance, StepRefusesWhatTheHeadCannotDo) {
  HeadConfig config = Plain({1}, 3, 4).config;
  config.optimizer_state = OptimizerState::kMomentum;
  auto head = backend().CreateHead(config);
  ASSERT_TRUE(head.ok()) << head.status();
  using Kind = OptimizerOptions::Kind;
  EXPECT_EQ((*head)->ApplyStep({.kind = Kind::kAdamW}, 1).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ((*head)->ApplyStep({.kind = Kind::kSgd, .learning_rate = -1.0}, 1).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*head)->ApplyStep({.kind = Kind::kSgd}, 0).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE((*head)->ApplyStep({.kind = Kind::kSgd, .momentum = 0.9}, 1).ok());
}

TEST_P(BackendConformance, PlanIsWhatAHeadHolds) {
  for (int i = 0; i < 8; ++i) {
    HeadConfig config = Random(1, UniformInt(rng(), 1, 90), UniformInt(rng(), 1, 300)).config;
    config.optimizer_state = static_cast<OptimizerState>(UniformInt(rng(), 0, 2));
    config.trainable = Chance(rng(), 0.7);
    const MemoryBytes before = backend().memory().current;
    const auto plan = backend().PlanHead(config);
    ASSERT_TRUE(plan.ok()) << plan.status();
    {
      auto head = backend().CreateHead(config);
      ASSERT_TRUE(head.ok()) << head.status();
      EXPECT_GE((*head)->chunk_rows(), 1);
      EXPECT_EQ((*head)->config(), config);
      EXPECT_GE(plan->by_kind[0], config.vocab_size * config.hidden_size * 4);
      for (size_t kind = 0; kind < kMemoryKinds; ++kind) {
        EXPECT_EQ((*head)->memory().by_kind[kind], plan->by_kind[kind]);
        EXPECT_EQ(backend().memory().current.by_kind[kind] - before.by_kind[kind], plan->by_kind[kind]);
      }
      EXPECT_GE(backend().memory().peak_total, backend().memory().current.Total());
    }
    EXPECT_EQ(backend().memory().current.by_kind, before.by_kind);
  }
}

TEST_P(BackendConformance, RefusesBadHeads) {
  HeadConfig config = Plain({1}, 0, 4).config;
  EXPECT_EQ(backend().PlanHead(config).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(backend().CreateHead(config).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_P(BackendConformance, SaysWhatItChose) {
  Problem problem = MakeProblem(Plain({12}, 24, 300), rng());
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  const std::vector<Choice> of_head = head->Describe();
  EXPECT_FALSE(of_head.empty());
  EXPECT_EQ(of_head.front().what, "chunk");
  EXPECT_THAT(of_head.front().choice, HasSubstr(absl::StrCat(head->chunk_rows())));
  for (const Choice& choice : of_head) {
    EXPECT_NE(choice.what, "");
    EXPECT_NE(choice.choice, "");
    EXPECT_LE(choice.workspace_bytes, head->memory()[MemoryKind::kWorkspace]) << choice.what;
  }
  const ChunkRun exact = RunChunk(*head, problem);
  ExpectGradients(exact, Algorithm::kExact);
  EXPECT_EQ(RunChunk(*head, problem).choices, exact.choices);
  if (!is_cut()) problem.options.algorithm = Algorithm::kFiltered;
  problem.options.filter_epsilon = 0x1p-12f;
  ExpectGradients(RunChunk(*head, problem), Algorithm::kFiltered);
  problem.options.label_smoothing = -1.0f;
  EXPECT_TRUE(RunChunk(*head, problem).choices.empty()) << "it was refused";
}

TEST_P(BackendConformance, StagingIsCountedAndAligned) {
  const int64_t before = backend().memory().current[MemoryKind::kStaging];
  {
    auto staging = backend().AllocateStaging(1001);
    ASSERT_TRUE(staging.ok()) << staging.status();
    EXPECT_EQ((*staging)->bytes().size(), 1001u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>((*staging)->bytes().data()) % 64, 0u);
    std::fill((*staging)->bytes().begin(), (*staging)->bytes().end(), uint8_t{7});
    EXPECT_GE(backend().memory().current[MemoryKind::kStaging] - before, 1001);
  }
  EXPECT_EQ(backend().memory().current[MemoryKind::kStaging], before);
  EXPECT_EQ(backend().AllocateStaging(-1).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace lossd::kernels::testing
