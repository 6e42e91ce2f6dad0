// SPDX-License-Identifier: Apache-2.0
// Classes whose probability is exactly 0 because a bias or a weight is -infinity: they add 0 to entropies and
// to all gradients. And what such a head makes impossible: rows without a finite loss or gradient, which add
// nothing.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/comparison.h"

namespace lossd::kernels::testing {
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

}  // namespace lossd::kernels::testing
