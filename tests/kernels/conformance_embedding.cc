// SPDX-License-Identifier: Apache-2.0
// Conformance tests of backends (backend_conformance.h) about chunks whose rows are rows of the weight
// (LossOptions::embedding): rows that go out, compared with the weight, and gradients of rows that come in,
// compared with their sums in double precision.
//
// Tolerance of a sum: each product is rounded to fp32, and each of its n terms and what was there before may
// be added with a rounding, so |got - want| <= (n + 4) 2^-24 of the sum of absolute terms.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/chunk_run.h"
#include "tests/kernels/comparison.h"

namespace lossd::kernels::testing {
namespace {

using ::testing::HasSubstr;

// How far gradients of a loss are from those of the same chunk that is added to something else, or in another
// order, relative to the largest.
constexpr double kLossOrder = 1e-5;

const RunOptions kWithoutRowOutputs = {.want_row_outputs = false};

// A few ids of many rows and many ids of few, as text has.
void DrawIds(Problem& problem, Rng& rng) {
  for (SliceData& slice : problem.slices) {
    for (int32_t& id : slice.targets) {
      const double u = double{Uniform(rng, 0.0f, 1.0f)};
      const auto drawn = static_cast<int64_t>(static_cast<double>(problem.config.vocab_size) * u * u * u * u);
      if (id != kIgnoredTarget) {
        id = static_cast<int32_t>(std::clamp<int64_t>(drawn, 0, problem.config.vocab_size - 1));
      }
    }
  }
}

// Weights that no 16-bit type represents.
void MakeFine(Problem& problem, Rng& rng) {
  for (float& w : problem.weight) w *= 1.0f + Uniform(rng, 0.0f, 1e-3f);
}

// The problem's ids ask for rows.
Problem LookUp(Problem problem) {
  problem.options = {.embedding = Embedding::kRows};
  problem.accumulate_gradients = false;
  for (SliceData& slice : problem.slices) {
    slice.want_grad_hidden = true;
    slice.accumulate.clear();
    slice.grad_scale = 1.0f;
  }
  return problem;
}

// Its hidden states are gradients of the rows of its ids.
Problem RowGradients(Problem problem) {
  problem.options = {.embedding = Embedding::kGradients};
  for (SliceData& slice : problem.slices) slice.want_grad_hidden = false;
  return problem;
}

int64_t CountIds(const SliceData& slice) {
  return slice.rows() - std::count(slice.targets.begin(), slice.targets.end(), kIgnoredTarget);
}

bool IsRoundedOnce(float got, float weight, DType compute, DType hidden) {
  const float fine = RoundTo(hidden, weight), of_copy = RoundTo(hidden, RoundTo(compute, weight));
  if (std::isnan(weight)) return std::isnan(got);
  return got == fine || got == of_copy;
}

// `problem` asked for rows of `weight` [V, D].
void ExpectRowsOf(const HeadKernels& head, const std::vector<float>& weight, const Problem& problem,
                  const ChunkRun& run) {
  ASSERT_TRUE(run.results.ok()) << run.results;
  ASSERT_TRUE(run.done.ok()) << run.done;
  const auto d = static_cast<size_t>(problem.config.hidden_size);
  for (size_t i = 0; i < problem.slices.size(); ++i) {
    const SliceData& slice = problem.slices[i];
    const SliceOutputs& got = run.slices[i];
    EXPECT_EQ(got.first_nonfinite_row, -1) << "slice " << i;
    EXPECT_EQ(got.sums.valid_rows, CountIds(slice)) << "slice " << i;
    ASSERT_EQ(got.grad_hidden.size(), slice.targets.size() * d);
    for (size_t row = 0; row < slice.targets.size(); ++row) {
      const int32_t id = slice.targets[row];
      for (size_t j = 0; j < d; ++j) {
        const float value = got.grad_hidden[row * d + j];
        const float want = id == kIgnoredTarget ? 0.0f : weight[static_cast<size_t>(id) * d + j];
        ASSERT_TRUE(IsRoundedOnce(value, want, head.compute_dtype(), problem.hidden_dtype))
            << "slice " << i << " row " << row << " id " << id << " column " << j << ": got " << value
            << ", want " << want;
      }
    }
  }
}

void RunLookUp(Backend& backend, const Problem& problem) {
  SCOPED_TRACE(Describe(problem));
  const auto head = MakeHead(backend, problem);
  ASSERT_NE(head, nullptr);
  const ChunkRun run = RunChunk(*head, problem, kWithoutRowOutputs);
  ExpectRowsOf(*head, problem.weight, problem, run);
  ASSERT_FALSE(run.choices.empty());
  EXPECT_EQ(run.choices.front().what, "embedding rows");
  if (problem.config.trainable) ExpectZeroGradients(*head);
}

// What should be in the gradient of the weight.
class WantedGradient {
 public:
  // From what is there now.
  explicit WantedGradient(HeadKernels& head)
      : cols_(static_cast<size_t>(head.config().hidden_size)),
        rows_of_(static_cast<size_t>(head.config().vocab_size), 0) {
    for (const float g : ReadGradient(head, Param::kWeight)) {
      sum_.push_back(double{g});
      size_.push_back(std::fabs(double{g}));
    }
  }

  // The slices of a chunk that have not failed.
  void Add(const Problem& problem, const std::vector<size_t>& failed = {}) {
    for (size_t i = 0; i < problem.slices.size(); ++i) {
      if (std::find(failed.begin(), failed.end(), i) == failed.end()) AddSlice(problem.slices[i]);
    }
  }

  // slack: what else an element may be off, relative to the largest.
  void Expect(HeadKernels& head, double slack = 0.0) const {
    const double largest = *std::max_element(size_.begin(), size_.end());
    const std::vector<float> got = ReadGradient(head, Param::kWeight);
    ASSERT_EQ(got.size(), sum_.size());
    for (size_t i = 0; i < got.size(); ++i) {
      const double tolerance = (rows_of_[i / cols_] + 4) * 0x1p-24 * size_[i] + slack * largest + 0x1p-140;
      ASSERT_NEAR(double{got[i]}, sum_[i], size_[i] == 0.0 && slack == 0.0 ? 0.0 : tolerance)
          << "class " << i / cols_ << " column " << i % cols_ << " of " << rows_of_[i / cols_] << " rows";
    }
  }

 private:
  void AddSlice(const SliceData& slice) {
    for (size_t row = 0; row < slice.targets.size(); ++row) {
      const int32_t id = slice.targets[row];
      if (id == kIgnoredTarget || (!slice.accumulate.empty() && slice.accumulate[row] == 0)) continue;
      rows_of_[static_cast<size_t>(id)] += 1;
      for (size_t j = 0; j < cols_; ++j) {
        const double term = double{slice.grad_scale} * double{slice.hidden[row * cols_ + j]};
        sum_[static_cast<size_t>(id) * cols_ + j] += term;
        size_[static_cast<size_t>(id) * cols_ + j] += std::fabs(term);
      }
    }
  }

  const size_t cols_;
  std::vector<double> sum_, size_;  // [V, D]
  std::vector<int> rows_of_;        // [V]
};

void ExpectAdded(const Problem& problem, const ChunkRun& run) {
  ASSERT_TRUE(run.results.ok()) << run.results;
  ASSERT_TRUE(run.done.ok()) << run.done;
  ASSERT_FALSE(run.choices.empty());
  EXPECT_EQ(run.choices.front().what, "embedding gradients");
  for (size_t i = 0; i < problem.slices.size(); ++i) {
    EXPECT_EQ(run.slices[i].first_nonfinite_row, -1) << "slice " << i;
    EXPECT_EQ(run.slices[i].sums.valid_rows, CountIds(problem.slices[i])) << "slice " << i;
    EXPECT_EQ(run.slices[i].sums.loss, 0.0);
  }
}

void RunGradients(Backend& backend, const std::vector<Problem>& chunks) {
  SCOPED_TRACE(Describe(chunks.front()));
  const auto head = MakeHead(backend, chunks.front());
  ASSERT_NE(head, nullptr);
  WantedGradient want(*head);
  for (const Problem& chunk : chunks) {
    const ChunkRun run = RunChunk(*head, chunk, kWithoutRowOutputs);
    ExpectAdded(chunk, run);
    want.Add(chunk);
  }
  want.Expect(*head);
  for (const Param param : {Param::kBias, Param::kNormGain, Param::kNormShift}) {
    if (!HasTensor(head->config(), {param, Role::kGradient})) continue;
    EXPECT_TRUE(AllZero(ReadGradient(*head, param))) << Name(param);
  }
}

// Slices that fill a chunk of the head, or 1,200 rows of it.
std::vector<SliceData> FillingSlices(const HeadKernels& head, const ProblemSpec& spec, Rng& rng) {
  std::vector<SliceData> slices;
  for (int64_t left = std::min<int64_t>(head.chunk_rows(), 1200); left > 0;) {
    const int64_t rows = std::min({left, head.slice_rows(), UniformInt(rng, 60, 140)});
    slices.push_back(MakeSlice(spec, rows, rng));
    left -= rows;
  }
  return slices;
}

}  // namespace

// ---- Rows that go out ----

TEST_P(BackendConformance, EmbeddingRowsAreThoseOfTheWeight) {
  for (const auto& [rows, hidden, vocab] : kOddShapes) {
    Problem problem = MakeProblem(Plain({rows, (rows + 1) / 2}, hidden, vocab), rng());
    MakeFine(problem, rng());
    RunLookUp(backend(), LookUp(std::move(problem)));
  }
}

// They pass by whatever else a head has.
TEST_P(BackendConformance, EmbeddingRowsOfEveryKindOfHead) {
  for (const Norm norm : {Norm::kNone, Norm::kLayerNorm, Norm::kRmsNorm}) {
    for (const bool trainable : {true, false}) {
      ProblemSpec spec = Plain({31, 1, 12}, norm == Norm::kNone ? 136 : 45, 203);
      spec.config.norm = norm;
      spec.config.trainable = trainable;
      spec.config.has_bias = spec.config.has_class_weights = true;
      Problem problem = MakeProblem(spec, rng());
      MakeFine(problem, rng());
      DrawIds(problem, rng());
      RunLookUp(backend(), LookUp(std::move(problem)));
    }
  }
}

TEST_P(BackendConformance, EmbeddingRowsOfIgnoredIdsAreZero) {
  Problem problem = MakeProblem(Plain({9, 5, 14}, 24, 61), rng());
  problem.slices[1].targets.assign(5, kIgnoredTarget);
  RunLookUp(backend(), LookUp(problem));
  for (SliceData& slice : problem.slices) slice.targets.assign(slice.targets.size(), kIgnoredTarget);
  RunLookUp(backend(), LookUp(problem));
}

// A weight that is not finite is a row as any other.
TEST_P(BackendConformance, EmbeddingRowsMayHoldAnything) {
  Problem problem = MakeProblem(Plain({20}, 40, 7), rng());
  problem.weight[3 * 40 + 5] = kInf;
  problem.weight[3 * 40 + 6] = -kInf;
  problem.weight[4 * 40] = kNan;
  problem.slices[0].targets[0] = 3;
  problem.slices[0].targets[19] = 4;
  RunLookUp(backend(), LookUp(std::move(problem)));
}

TEST_P(BackendConformance, EmbeddingRowsOfFullChunks) {
  for (const int64_t hidden : {int64_t{24}, int64_t{37}}) {
    const ProblemSpec spec = Plain({1}, hidden, 301);
    Problem problem = MakeProblem(spec, rng());
    MakeFine(problem, rng());
    const auto head = MakeHead(backend(), problem);
    ASSERT_NE(head, nullptr);
    problem.slices = FillingSlices(*head, spec, rng());
    problem = LookUp(std::move(problem));
    ExpectRowsOf(*head, problem.weight, problem, RunChunk(*head, problem, kWithoutRowOutputs));
  }
}

// ---- Gradients that come in ----

TEST_P(BackendConformance, EmbeddingGradientsAddUp) {
  for (const auto& [rows, hidden, vocab] : kOddShapes) {
    const ProblemSpec spec = Plain({rows, (rows + 2) / 3}, hidden, vocab);
    std::vector<Problem> chunks = {MakeProblem(spec, rng())};
    DrawIds(chunks.front(), rng());
    Problem next = chunks.front();
    next.slices = {MakeSlice(spec, rows, rng())};
    chunks.push_back(next);
    for (Problem& chunk : chunks) chunk = RowGradients(std::move(chunk));
    RunGradients(backend(), chunks);
  }
}

TEST_P(BackendConformance, EmbeddingGradientsOfEveryKindOfHead) {
  for (const Norm norm : {Norm::kNone, Norm::kLayerNorm, Norm::kRmsNorm}) {
    ProblemSpec spec = Plain({31, 1, 52}, norm == Norm::kNone ? 136 : 45, 203);
    spec.config.norm = norm;
    spec.config.has_bias = spec.config.has_class_weights = true;
    spec.accumulate_mask = true;
    spec.grad_scale = 0.37f;
    Problem problem = MakeProblem(spec, rng());
    problem.slices[1].grad_scale = -1.5f;
    problem.slices[2].accumulate.clear();
    DrawIds(problem, rng());
    RunGradients(backend(), {RowGradients(std::move(problem))});
  }
}

// One id has nearly all rows, of several slices, and another some.
TEST_P(BackendConformance, EmbeddingGradientsOfOneIdManyTimes) {
  for (const int64_t hidden : {int64_t{1}, int64_t{40}, int64_t{300}}) {
    Problem problem = MakeProblem(Plain({150, 101, 3}, hidden, 50), rng());
    for (SliceData& slice : problem.slices) {
      for (int32_t& id : slice.targets) {
        if (id != kIgnoredTarget) id = Chance(rng(), 0.8) ? 49 : Chance(rng(), 0.5) ? 7 : id;
      }
    }
    RunGradients(backend(), {RowGradients(std::move(problem))});
  }
}

TEST_P(BackendConformance, EmbeddingGradientsOfFullChunks) {
  for (const int64_t hidden : {int64_t{24}, int64_t{37}}) {
    const ProblemSpec spec = Plain({1}, hidden, 301);
    Problem problem = MakeProblem(spec, rng());
    const auto head = MakeHead(backend(), problem);
    ASSERT_NE(head, nullptr);
    WantedGradient want(*head);
    for (int chunk = 0; chunk < 2; ++chunk) {
      problem.slices = FillingSlices(*head, spec, rng());
      DrawIds(problem, rng());
      const Problem gradients = RowGradients(problem);
      ExpectAdded(gradients, RunChunk(*head, gradients, kWithoutRowOutputs));
      want.Add(gradients);
    }
    want.Expect(*head);
  }
}

TEST_P(BackendConformance, EmbeddingGradientsThatAreNotAccumulatedAddNothing) {
  Problem problem = RowGradients(MakeProblem(Plain({12, 9}, 24, 40), rng()));
  problem.accumulate_gradients = false;
  for (SliceData& slice : problem.slices) slice.accumulate.clear();
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  ExpectAdded(problem, RunChunk(*head, problem, kWithoutRowOutputs));
  ExpectZeroGradients(*head);
  problem.accumulate_gradients = true;
  for (SliceData& slice : problem.slices) slice.accumulate.assign(slice.targets.size(), 0);
  ExpectAdded(problem, RunChunk(*head, problem, kWithoutRowOutputs));
  ExpectZeroGradients(*head);
  for (SliceData& slice : problem.slices) slice.targets.assign(slice.targets.size(), kIgnoredTarget);
  ExpectAdded(problem, RunChunk(*head, problem, kWithoutRowOutputs));
  ExpectZeroGradients(*head);
}

// The slice fails with its first such row and adds nothing; the others are as if it were not there.
TEST_P(BackendConformance, EmbeddingGradientsThatAreNotFiniteFailTheirSliceAlone) {
  constexpr int64_t kHidden = 29;
  const struct { float value, scale; } kinds[] = {{kNan, 1.0f}, {kInf, 1.0f}, {-kInf, 0.0f}, {1e3f, 1e38f}};
  for (const auto& kind : kinds) {
    ProblemSpec spec = Plain({10, 12, 7}, kHidden, 20);
    spec.ignored = 0.0;
    Problem problem = RowGradients(MakeProblem(spec, rng()));
    DrawIds(problem, rng());
    SliceData& bad = problem.slices[1];
    bad.grad_scale = kind.scale;
    for (const int64_t row : {5, 9})
      bad.hidden[static_cast<size_t>(row * kHidden + kHidden - 1)] = kind.value;
    if (kind.scale > 1.0f) {
      for (float& x : bad.hidden) x = x == kind.value ? x : RoundTo(problem.hidden_dtype, 0.1f * x);
    }
    bad.accumulate.assign(12, 1);
    bad.accumulate[5] = 0;  // it is looked at all the same
    // What an ignored row holds does not matter.
    problem.slices[2].targets[3] = kIgnoredTarget;
    problem.slices[2].hidden[3 * kHidden] = kNan;
    const auto head = MakeHead(backend(), problem);
    ASSERT_NE(head, nullptr);
    WantedGradient want(*head);
    want.Add(problem, {1});
    const ChunkRun run = RunChunk(*head, problem, kWithoutRowOutputs);
    ASSERT_TRUE(run.results.ok()) << run.results;
    ASSERT_TRUE(run.done.ok()) << run.done;
    EXPECT_EQ(run.slices[0].first_nonfinite_row, -1);
    EXPECT_EQ(run.slices[1].first_nonfinite_row, 5);
    EXPECT_EQ(run.slices[2].first_nonfinite_row, -1);
    want.Expect(*head);
  }
}

// ---- Among chunks with a loss ----

TEST_P(BackendConformance, EmbeddingGradientsComeOnTopOfALoss) {
  ProblemSpec spec = Plain({20, 13}, 48, 120);
  spec.config.has_bias = true;
  const Problem loss = MakeProblem(spec, rng());
  const auto head = MakeHead(backend(), loss);
  ASSERT_NE(head, nullptr);
  ASSERT_TRUE(RunChunk(*head, loss).done.ok());
  const std::vector<float> bias = ReadGradient(*head, Param::kBias);
  WantedGradient want(*head);
  Problem rows = loss;
  rows.slices = {MakeSlice(spec, 33, rng())};
  rows = RowGradients(std::move(rows));
  ExpectAdded(rows, RunChunk(*head, rows, kWithoutRowOutputs));
  want.Add(rows);
  want.Expect(*head);
  EXPECT_EQ(ReadGradient(*head, Param::kBias), bias);
}

// A loss after them adds to what they have left, also if they are the first of a step.
TEST_P(BackendConformance, ALossComesOnTopOfEmbeddingGradients) {
  const ProblemSpec spec = Plain({40}, 24, 90);
  const Problem loss = MakeProblem(spec, rng());
  Problem rows = loss;
  rows.slices = {MakeSlice(spec, 21, rng())};
  rows = RowGradients(std::move(rows));
  const auto head = MakeHead(backend(), loss), alone = MakeHead(backend(), loss);
  ASSERT_NE(head, nullptr);
  ASSERT_NE(alone, nullptr);
  ASSERT_TRUE(RunChunk(*alone, loss, {.independent = true}).done.ok());
  WantedGradient want(*alone);
  want.Add(rows);
  ASSERT_TRUE(RunChunk(*head, rows, kWithoutRowOutputs).done.ok());
  ASSERT_TRUE(RunChunk(*head, loss, {.independent = true}).done.ok());
  want.Expect(*head, kLossOrder);
}

// Chunks of all kinds, as many in flight as a backend takes: each has its own results, and all add up.
TEST_P(BackendConformance, EmbeddingChunksInFlightAmongOthers) {
  for (const Norm norm : {Norm::kNone, Norm::kRmsNorm}) {
    ProblemSpec spec = Plain({40, 17}, 56, 150);
    spec.config.norm = norm;
    const Problem loss = MakeProblem(spec, rng());
    Problem unlike = loss;
    unlike.slices = {MakeSlice(spec, 61, rng())};
    const Problem look_up = LookUp(unlike), gradients = RowGradients(unlike);
    const auto head = MakeHead(backend(), loss), alone = MakeHead(backend(), loss);
    ASSERT_NE(head, nullptr);
    ASSERT_NE(alone, nullptr);
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(RunChunk(*alone, loss).done.ok());
    std::vector<ChunkToRun> chunks;
    for (const Problem* const problem :
         {&loss, &gradients, &look_up, &loss, &look_up, &look_up, &gradients, &gradients, &loss}) {
      chunks.push_back({head.get(), problem, {.want_row_outputs = problem == &loss}});
    }
    const std::vector<ChunkRun> runs = RunInFlight(chunks, backend().max_chunks_in_flight());
    WantedGradient want(*alone);
    for (size_t i = 0; i < chunks.size(); ++i) {
      ASSERT_TRUE(runs[i].done.ok()) << runs[i].done;
      if (chunks[i].problem == &look_up) ExpectRowsOf(*head, look_up.weight, look_up, runs[i]);
      if (chunks[i].problem == &loss) {
        EXPECT_EQ(runs[i].slices[0].loss, runs[0].slices[0].loss);
      }
      if (chunks[i].problem != &gradients) continue;
      ExpectAdded(gradients, runs[i]);
      want.Add(gradients);
    }
    want.Expect(*head, kLossOrder);
  }
}

// Rows are those of the weight after the steps that have been taken.
TEST_P(BackendConformance, EmbeddingRowsAfterAStep) {
  const ProblemSpec spec = Plain({30}, 40, 64);
  const Problem problem = MakeProblem(spec, rng());
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  for (int64_t step = 1; step <= 2; ++step) {
    const Problem gradients = RowGradients(problem);
    ASSERT_TRUE(RunChunk(*head, gradients, kWithoutRowOutputs).done.ok());
    ASSERT_TRUE(head->ApplyStep({.kind = OptimizerOptions::Kind::kSgd, .learning_rate = 0.01}, step).ok());
    const std::vector<float> weight = ReadAll(*head, {Param::kWeight, Role::kValue});
    EXPECT_NE(weight, problem.weight);
    const Problem look_up = LookUp(problem);
    ExpectRowsOf(*head, weight, look_up, RunChunk(*head, look_up, kWithoutRowOutputs));
    ExpectZeroGradients(*head);
  }
}

// ---- Equal bits ----

TEST_P(BackendConformance, EmbeddingChunksGiveTheSameBitsEachTime) {
  Problem problem = MakeProblem(Plain({120, 77}, 72, 30), rng());
  DrawIds(problem, rng());
  const Problem gradients = RowGradients(problem), look_up = LookUp(problem);
  std::vector<std::vector<float>> sums, rows;
  for (int i = 0; i < 3; ++i) {
    const auto head = MakeHead(backend(), problem);
    ASSERT_NE(head, nullptr);
    const RunOptions options = {.want_row_outputs = false, .independent = true};
    ASSERT_TRUE(RunChunk(*head, gradients, options).done.ok());
    sums.push_back(ReadGradient(*head, Param::kWeight));
    rows.push_back(RunChunk(*head, look_up, options).slices[1].grad_hidden);
  }
  for (int i = 1; i < 3; ++i) {
    const auto at = static_cast<size_t>(i);
    EXPECT_EQ(std::memcmp(sums[0].data(), sums[at].data(), sums[0].size() * sizeof(float)), 0);
    EXPECT_EQ(rows[0], rows[at]);
  }
}

// ---- Heads that are an embedding alone ----

TEST_P(BackendConformance, AnEmbeddingAloneServesRowsAndGradients) {
  for (const auto& [rows, hidden, vocab] : kOddShapes) {
    Problem problem = MakeProblem(Plain({rows, (rows + 1) / 2}, hidden, vocab), rng());
    problem.config.logits = Logits::kNone;
    MakeFine(problem, rng());
    DrawIds(problem, rng());
    RunLookUp(backend(), LookUp(problem));
    RunGradients(backend(), {RowGradients(problem), RowGradients(problem)});
  }
}

TEST_P(BackendConformance, AnEmbeddingAloneHasNoRoomForALoss) {
  const ProblemSpec spec = Plain({33, 12}, 40, 12007);
  const Problem problem = MakeProblem(spec, rng());
  Problem alone = problem;
  alone.config.logits = Logits::kNone;
  const auto head = MakeHead(backend(), alone), with_logits = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  ASSERT_NE(with_logits, nullptr);
  // memory() adds up all devices.
  const int64_t logits = head->chunk_rows() * alone.config.vocab_size * 2;
  EXPECT_LT(head->memory()[MemoryKind::kWorkspace], logits) << "of a chunk, in 16 bits";
  if (GetParam().logits == Logits::kStored) {
    EXPECT_LT(head->memory()[MemoryKind::kWorkspace], with_logits->memory()[MemoryKind::kWorkspace]);
    EXPECT_GE(head->chunk_rows(), std::min<int64_t>(with_logits->chunk_rows(), 8192));
  }
  const std::vector<Choice> choices = head->Describe();
  EXPECT_TRUE(std::any_of(choices.begin(), choices.end(), [](const Choice& choice) {
    return choice.what == "logits" && choice.choice == "none";
  }));

  WantedGradient want(*head);
  Problem full = alone;
  full.slices = FillingSlices(*head, spec, rng());
  ExpectRowsOf(*head, full.weight, LookUp(full), RunChunk(*head, LookUp(full), kWithoutRowOutputs));
  const ChunkRun loss = RunChunk(*head, alone);
  for (const absl::Status& status : {loss.results, loss.done}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("embedding must be rows or gradients: the head has no logits, got none"));
  }
  ExpectZeroGradients(*head);
  ExpectAdded(RowGradients(full), RunChunk(*head, RowGradients(full), kWithoutRowOutputs));
  want.Add(RowGradients(full));
  want.Expect(*head);
}

// ---- Bad input ----

TEST_P(BackendConformance, BadEmbeddingChunksAreRefusedAndChangeNothing) {
  const Problem good = MakeProblem(Plain({4, 5}, 8, 30), rng());
  const auto head = MakeHead(backend(), good);
  ASSERT_NE(head, nullptr);
  const struct {
    std::function<void(Problem&)> change;
    bool gradients;
    const char* message;
  } cases[] = {
      {[](Problem& p) { p.slices[1].targets[3] = 30; }, true,
       "slices[1].targets[3] must be in [0, 30) or -1, got 30"},
      {[](Problem& p) { p.slices[1].targets[3] = 30; }, false, "slices[1].targets[3]"},
      {[](Problem& p) { p.slices[0].grad_scale = kInf; }, true,
       "slices[0].grad_scale must be finite, got inf"},
      {[](Problem& p) { p.slices[0].row_weights.assign(4, 1.0f); }, true, "row_weights"},
      {[](Problem& p) { p.slices[0].top_k = 1; }, false, "top_k"},
      {[](Problem& p) { p.slices[0].want_grad_hidden = false; }, false, "grad_hidden"},
      {[](Problem& p) { p.slices[0].want_grad_hidden = true; }, true, "grad_hidden"},
      {[](Problem& p) { p.accumulate_gradients = true; }, false, "accumulate_gradients"},
      {[](Problem& p) { p.options.softcap = 10.0f; }, true, "softcap"},
      {[](Problem& p) { p.options.gradients = Gradients::kSampled; }, true, "gradients"},
      {[](Problem& p) { p.options.embedding = static_cast<Embedding>(3); }, true, "embedding"},
  };
  for (const auto& c : cases) {
    Problem bad = c.gradients ? RowGradients(good) : LookUp(good);
    c.change(bad);
    const ChunkRun run = RunChunk(*head, bad, kWithoutRowOutputs);
    EXPECT_EQ(run.results.code(), absl::StatusCode::kInvalidArgument) << run.results;
    EXPECT_EQ(run.done.code(), absl::StatusCode::kInvalidArgument) << run.done;
    EXPECT_THAT(std::string(run.results.message()), HasSubstr(c.message));
    ExpectZeroGradients(*head);
  }
  Problem frozen = good;
  frozen.config.trainable = false;
  const auto frozen_head = MakeHead(backend(), frozen);
  ASSERT_NE(frozen_head, nullptr);
  const ChunkRun run = RunChunk(*frozen_head, RowGradients(frozen), kWithoutRowOutputs);
  EXPECT_EQ(run.results.code(), absl::StatusCode::kInvalidArgument) << run.results;
  EXPECT_THAT(std::string(run.results.message()), HasSubstr("not trainable"));
}

// Heads in host memory serve rows, or refuse them by name.
TEST_P(PoolConformance, EmbeddingRowsOfHeadsInHostMemory) {
  ProblemSpec spec = Plain({14, 3}, 24, 50);
  spec.config.trainable = false;
  spec.config.split = Split::kAny;
  spec.config.shares.clear();
  spec.config.replicas = 0;
  const Problem problem = LookUp(InHostMemory(MakeProblem(spec, rng())));
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  const ChunkRun run = RunChunk(*head, problem, kWithoutRowOutputs);
  if (absl::IsUnimplemented(run.results)) {
    EXPECT_THAT(std::string(run.results.message()), HasSubstr("embedding must be absent"));
    EXPECT_TRUE(absl::IsUnimplemented(run.done)) << run.done;
    return;
  }
  ExpectRowsOf(*head, problem.weight, problem, run);
}

}  // namespace lossd::kernels::testing
