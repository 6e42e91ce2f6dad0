// SPDX-License-Identifier: Apache-2.0
// Conformance tests of backends (backend_conformance.h) about rows that are special: absent rows, rows of
// masked classes, bad input, and deferred rows.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/chunk_run.h"
#include "tests/kernels/comparison.h"

namespace lossd::kernels::testing {

// ---- Absent rows ----
// Rows of weight 0 are absent: they have loss 0 and gradient 0, and nothing that their hidden states hold
// reaches any sum. Where these are finite, the other row results are those of any row.

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

// The same for what is wanted of single classes.
void TakePoisonedClasses(const Problem& problem, const SliceData& slice, size_t row, SliceOutputs& got) {
  if (slice.class_count == 0 && slice.top_k == 0) return;
  const auto vocab = static_cast<size_t>(problem.config.vocab_size);
  const std::vector<double> all =
      reference::LogProbabilities(ReferenceHead(problem), problem.options, ReferenceRows(slice));
  const auto log_p = absl::MakeConstSpan(all).subspan(row * vocab, vocab);
  std::vector<int32_t> order(vocab);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return log_p[static_cast<size_t>(a)] > log_p[static_cast<size_t>(b)];
  });
  const auto count = static_cast<size_t>(slice.class_count), k = static_cast<size_t>(slice.top_k);
  for (size_t i = 0; i < count; ++i) {
    float& value = got.class_logprobs[row * count + i];
    EXPECT_TRUE(std::isnan(value)) << "row " << row << " " << value;
    const int32_t place = slice.classes[(slice.shared_classes ? 0 : row) * count + i];
    value = static_cast<float>(log_p[static_cast<size_t>(place)]);
  }
  for (size_t i = 0; i < k; ++i) {
    float& value = got.top_logprobs[row * k + i];
    EXPECT_TRUE(std::isnan(value)) << "row " << row << " " << value;
    EXPECT_EQ(got.top_classes[row * k + i], -1) << "row " << row;
    got.top_classes[row * k + i] = order[i];
    value = static_cast<float>(log_p[static_cast<size_t>(order[i])]);
  }
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
    TakePoisonedClasses(problem, slice, row, got);
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

// ---- Masked classes ----
// Classes whose probability is exactly 0 because a bias or a weight is -infinity: they add 0 to entropies and
// to all gradients. And what such a head makes impossible: rows without a finite loss or gradient, which add
// nothing.

namespace {

// Bias -infinity on the classes [begin, end), which are then no targets.
void MaskClasses(Problem& problem, int64_t begin, int64_t end, Rng& rng) {
  std::fill(problem.bias.begin() + begin, problem.bias.begin() + end, -kInf);
  for (SliceData& slice : problem.slices) {
    for (int32_t& target : slice.targets) {
      while (target != kIgnoredTarget && problem.bias[static_cast<size_t>(target)] == -kInf) {
        target = static_cast<int32_t>(UniformInt(rng, 0, problem.config.vocab_size - 1));
      }
    }
  }
}

// Besides, each class with this probability.
void MaskSome(Problem& problem, double probability, Rng& rng) {
  for (int64_t v = 1; v < problem.config.vocab_size; ++v) {
    if (Chance(rng, probability)) MaskClasses(problem, v, v + 1, rng);
  }
}

void AddEntropyGradients(Problem& problem, Rng& rng) {
  for (SliceData& slice : problem.slices) {
    slice.grad_entropy.clear();
    for (size_t i = 0; i < slice.targets.size(); ++i) {
      slice.grad_entropy.push_back(Chance(rng, 0.3) ? 0.0f : Uniform(rng, -2.0f, 2.0f));
    }
  }
}

// Every option that leaves the loss of a row with masked classes finite.
std::vector<ProblemSpec> MaskedSpecs(ProblemSpec plain) {
  plain.config.has_bias = true;
  std::vector<ProblemSpec> specs(8, plain);
  specs[1].config.norm = Norm::kLayerNorm;
  specs[2].config.norm = Norm::kRmsNorm;
  specs[3].options.logit_scale = 0.25f;
  specs[4].options.z_loss = 0.02f;
  specs[5].config.has_class_weights = specs[5].options.use_class_weights = true;
  specs[6].grad_loss = specs[6].grad_lse = true;
  specs[7].row_weights = specs[7].accumulate_mask = true;
  return specs;
}

// The bits of all gradients.
std::vector<std::vector<uint32_t>> GradientBits(HeadKernels& head) {
  std::vector<std::vector<uint32_t>> bits;
  for (const std::vector<float>& gradient : AllGradients(head)) {
    std::vector<uint32_t>& own = bits.emplace_back(gradient.size());
    std::memcpy(own.data(), gradient.data(), gradient.size() * sizeof(float));
  }
  return bits;
}

// Whether a gradient of hidden states may be known only after its row has been accumulated, or is known to
// one device alone: then the chunk says that the gradients are lost.
bool LosesGradients(Backend& backend, const Problem& problem) {
  return backend.info().name == "cuda" &&
         (problem.config.logits == Logits::kRecomputed || problem.config.split == Split::kVocabulary);
}

void WriteBias(HeadKernels& head, const std::vector<float>& bias) {
  const absl::Status status = head.WriteTensor(
      {Param::kBias, Role::kValue}, 0, static_cast<int64_t>(bias.size()), DType::kFloat32, AsBytes(bias));
  ASSERT_TRUE(status.ok()) << status;
}

}  // namespace

TEST_P(BackendConformance, ZeroProbabilitiesAddNothing) {
  for (const ProblemSpec& spec : MaskedSpecs(Plain({17, 20}, 37, 101))) {
    for (const bool with_entropies : {false, true}) {
      Problem problem = MakeProblem(spec, rng());
      MaskClasses(problem, 40, 50, rng());
      if (with_entropies) AddEntropyGradients(problem, rng());
      RunAndCompare(backend(), {problem});
    }
  }
}

TEST_P(BackendConformance, ZeroProbabilitiesAnywhere) {
  constexpr int64_t kShapes[][3] = {{40, 24, 61}, {31, 47, 123}, {9, 129, 67}, {130, 16, 1031}};
  for (const auto& [rows, hidden, vocab] : kShapes) {
    for (const double probability : {0.05, 0.5, 0.95}) {
      ProblemSpec spec = Plain({rows}, hidden, vocab);
      spec.config.has_bias = true;
      Problem problem = MakeProblem(spec, rng());
      MaskSome(problem, probability, rng());
      AddEntropyGradients(problem, rng());
      RunAndCompare(backend(), {problem});
    }
  }
}

// Whole tiles and blocks of classes, and all classes of a device.
TEST_P(BackendConformance, ZeroProbabilitiesOfWholeTiles) {
  constexpr int64_t kVocab = 2100;
  constexpr int64_t kMasked[][2] = {{0, 1050},   {1050, 2100}, {0, 128},    {0, 256},     {256, 512},
                                    {255, 1281}, {1, 2100},    {512, 2048}, {2048, 2100}, {0, 2099}};
  for (const auto& [begin, end] : kMasked) {
    ProblemSpec spec = Plain({24}, 40, kVocab);
    spec.config.has_bias = true;
    Problem problem = MakeProblem(spec, rng());
    MaskClasses(problem, begin, end, rng());
    if (Chance(rng(), 0.5)) AddEntropyGradients(problem, rng());
    RunAndCompare(backend(), {problem});
  }
}

// As tanh has it: the logit of a class with an infinite bias is the softcap, and its slope 0.
TEST_P(BackendConformance, InfiniteBiasesUnderASoftcap) {
  for (const float softcap : {4.0f, 30.0f}) {
    for (const bool with_entropies : {false, true}) {
      ProblemSpec spec = Plain({30}, 37, 300);
      spec.config.has_bias = true;
      spec.options.softcap = softcap;
      spec.options.label_smoothing = with_entropies ? 0.0f : 0.1f;
      Problem problem = MakeProblem(spec, rng());
      std::fill_n(problem.bias.begin() + 40, 10, -kInf);
      problem.bias[255] = kInf;
      if (with_entropies) AddEntropyGradients(problem, rng());
      RunAndCompare(backend(), {problem});
    }
  }
}

TEST_P(GradientsConformance, ZeroProbabilitiesWithOtherGradients) {
  for (const Gradients gradients : {Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
    for (const bool with_entropies : {false, true}) {
      for (const float least : {0.0f, 1e-3f}) {
        ProblemSpec spec = Plain({9, 30}, 37, 600);
        spec.config.has_bias = true;
        spec.options.gradients = gradients;
        spec.options.filter_epsilon = least;
        spec.options.sample_threshold = std::max(least, 1e-30f);
        spec.options.max_gradient_error = Chance(rng(), 0.5) ? 1e6f : 0.0f;
        Problem problem = MakeProblem(spec, rng());
        MaskClasses(problem, 40, 50, rng());
        MaskClasses(problem, 256, 512, rng());
        if (with_entropies) AddEntropyGradients(problem, rng());
        RunAndCompare(backend(), {problem});
      }
    }
  }
}

// Loss, entropy and all gradients are exactly 0 wherever among the tiles the only class is.
TEST_P(GradientsConformance, OneClassThatIsNotMasked) {
  constexpr int64_t kVocab = 100000, kHidden = 8, kRows = 3;
  constexpr int64_t kPlaces[] = {0,     1,     31,    32,    127,   128,   255,   256,   257,   511,  512,
                                 32767, 32768, 49999, 50000, 65535, 65536, 99839, 99840, 99998, 99999};
  ProblemSpec spec = Plain({kRows}, kHidden, kVocab);
  spec.config.has_bias = true;
  spec.ignored = 0.0;
  Problem problem = MakeProblem(spec, rng());
  const std::vector<float> bias = problem.bias;
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  for (const int64_t place : kPlaces) {
    SCOPED_TRACE(place);
    std::vector<float> masked(kVocab, -kInf);
    masked[static_cast<size_t>(place)] = bias[static_cast<size_t>(place)];
    WriteBias(*head, masked);
    problem.bias = masked;
    SliceData& slice = problem.slices.front();
    slice.targets.assign(kRows, static_cast<int32_t>(place));
    problem.options.gradients = static_cast<Gradients>(UniformInt(rng(), 0, 3));
    slice.grad_entropy.clear();
    if (Chance(rng(), 0.5)) AddEntropyGradients(problem, rng());
    const ChunkRun run = RunChunk(*head, problem);
    ASSERT_TRUE(run.done.ok()) << run.done;
    const SliceOutputs& out = run.slices[0];
    EXPECT_EQ(out.first_nonfinite_row, -1);
    EXPECT_TRUE(AllZero(out.loss));
    EXPECT_TRUE(AllZero(out.entropy));
    EXPECT_TRUE(AllZero(out.target_logprob));
    EXPECT_TRUE(AllZero(out.grad_hidden));
    EXPECT_EQ(out.argmax, std::vector<int32_t>(kRows, static_cast<int32_t>(place)));
    EXPECT_EQ(out.sums.loss, 0.0);
    EXPECT_EQ(out.sums.correct_rows, kRows);
  }
  ExpectZeroGradients(*head);
}

// Two classes share the mass of each row, on both sides of the border between two tiles.
TEST_P(BackendConformance, TwoClassesThatAreNotMasked) {
  constexpr int64_t kVocab = 1300;
  for (const int64_t last : {1, 32, 128, 256, 512, 650, 1024, 1280, 1299}) {
    ProblemSpec spec = Plain({12}, 24, kVocab);
    spec.config.has_bias = true;
    Problem problem = MakeProblem(spec, rng());
    MaskClasses(problem, 0, last - 1, rng());
    MaskClasses(problem, last + 1, kVocab, rng());
    AddEntropyGradients(problem, rng());
    RunAndCompare(backend(), {problem});
  }
}

// A masked target has no finite loss, and neither has label smoothing over a masked class. The gradients keep
// their bits.
TEST_P(BackendConformance, RefusedRowsOfMaskedHeadsAddNothing) {
  for (const Norm norm : {Norm::kNone, Norm::kLayerNorm}) {
    ProblemSpec spec = Plain({12, 9}, 24, 300);
    spec.config.norm = norm;
    spec.config.has_bias = true;
    spec.ignored = 0.0;
    Problem problem = MakeProblem(spec, rng());
    MaskClasses(problem, 40, 50, rng());
    AddEntropyGradients(problem, rng());
    const auto head = MakeHead(backend(), problem);
    ASSERT_NE(head, nullptr);
    ASSERT_TRUE(RunChunk(*head, problem).done.ok());
    const auto before = GradientBits(*head);
    Problem masked_target = problem;
    masked_target.slices.erase(masked_target.slices.begin());
    masked_target.slices[0].targets[5] = 44;
    const ChunkRun run = RunChunk(*head, masked_target);
    ASSERT_TRUE(run.done.ok()) << run.done;
    EXPECT_EQ(run.slices[0].first_nonfinite_row, 5);
    EXPECT_EQ(GradientBits(*head), before);
    Problem smoothed = problem;
    smoothed.options.label_smoothing = 0.1f;
    const ChunkRun smooth = RunChunk(*head, smoothed);
    ASSERT_TRUE(smooth.done.ok()) << smooth.done;
    EXPECT_EQ(smooth.slices[0].first_nonfinite_row, 0);
    EXPECT_EQ(smooth.slices[1].first_nonfinite_row, 0);
    EXPECT_EQ(GradientBits(*head), before);
  }
}

// Whatever is not finite in a head, and whatever gradients are asked for: nothing of it reaches the
// gradients.
TEST_P(GradientsConformance, HeadsThatAreNotFiniteAccumulateNothing) {
  for (const Gradients gradients :
       {Gradients::kExact, Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
    for (const float bad : {kNan, kInf}) {
      for (const Param param : {Param::kWeight, Param::kBias, Param::kNormGain}) {
        ProblemSpec spec = Plain({12, 9}, 24, 300);
        spec.config.has_bias = true;
        spec.config.norm = param == Param::kNormGain ? Norm::kRmsNorm : Norm::kNone;
        spec.options.gradients = gradients;
        spec.ignored = 0.0;
        Problem problem = MakeProblem(spec, rng());
        std::vector<float>& values = problem.Values(param);
        values[static_cast<size_t>(UniformInt(rng(), 0, static_cast<int64_t>(values.size()) - 1))] = bad;
        SCOPED_TRACE(Describe(problem));
        const auto head = MakeHead(backend(), problem);
        ASSERT_NE(head, nullptr);
        const ChunkRun run = RunChunk(*head, problem);
        if (!run.done.ok()) {
          EXPECT_TRUE(LosesGradients(backend(), problem) && absl::IsDataLoss(run.done)) << run.done;
          continue;
        }
        for (size_t i = 0; i < run.slices.size(); ++i) {
          // An infinite weight may be -infinity in the logits of some rows.
          if (bad == kInf && param == Param::kWeight) continue;
          EXPECT_EQ(run.slices[i].first_nonfinite_row, 0) << "slice " << i;
        }
        for (const std::vector<float>& gradient : AllGradients(*head)) EXPECT_TRUE(AllFinite(gradient));
      }
    }
  }
}

// A weight of -infinity masks its class where the hidden state is positive, and makes dx NaN: 0 times
// infinity. The slice whose dx is wanted fails, the one that wants none does not.
TEST_P(BackendConformance, HiddenGradientsThatAreNotFiniteFailTheirSlice) {
  constexpr int64_t kHidden = 24;
  ProblemSpec spec = Plain({12, 9, 5}, kHidden, 300);
  spec.ignored = 0.0;
  Problem problem = MakeProblem(spec, rng());
  for (SliceData& slice : problem.slices) {
    for (int64_t row = 0; row < slice.rows(); ++row)
      slice.hidden[static_cast<size_t>(row * kHidden + 3)] = 1.0f;
    for (int32_t& target : slice.targets) target = std::max(target, 45);
  }
  problem.weight[static_cast<size_t>(44 * kHidden + 3)] = -kInf;
  problem.slices[0].want_grad_hidden = problem.slices[2].want_grad_hidden = false;
  Problem without = problem;
  without.slices[1].targets.assign(9, kIgnoredTarget);
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  const ChunkRun run = RunChunk(*head, problem);
  if (LosesGradients(backend(), problem)) {
    EXPECT_TRUE(absl::IsDataLoss(run.done)) << run.done;
    EXPECT_TRUE(absl::IsDataLoss(run.results)) << run.results;
    return;
  }
  ASSERT_TRUE(run.results.ok()) << run.results;
  ASSERT_TRUE(run.done.ok()) << run.done;
  EXPECT_EQ(run.slices[1].first_nonfinite_row, 0);
  reference::ParamGradients gradients = reference::ZeroGradients(problem.config);
  const auto want = ComputeReference(without, &gradients);
  for (size_t i : {0, 2}) {
    ExpectSliceMatches(head->compute_dtype(), without, without.slices[i], want[i], run.slices[i]);
  }
  ExpectGradientsMatch(*head, gradients, MaxAbsLogit(want));
}

// ---- Bad input ----
// What a chunk can get wrong: it, or the slice at fault, fails by itself and changes nothing else.

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

// ---- Deferred rows ----
// Rows are kept by one chunk, computed again by a later one from what was kept, whatever comes in
// between and whatever rows share a chunk with them.

TEST_P(BackendConformance, DeferredAndDirectRowsInAnyOrder) {
  for (const Norm norm : {Norm::kNone, Norm::kRmsNorm}) {
    ProblemSpec spec = Plain({1}, 24, 101);
    spec.config.norm = norm;
    spec.config.has_bias = true;
    DeferredRows rows(backend(), spec, rng());
    for (int repeat = 0; repeat < 12; ++repeat) {
      rows.Forward();
      if (Chance(rng(), 0.7)) rows.Backward();
      if (Chance(rng(), 0.4)) rows.Release();
      if (Chance(rng(), 0.1)) rows.ZeroGradients();
    }
    rows.Backward();
    rows.ExpectGradients();
  }
}

}  // namespace lossd::kernels::testing
