// SPDX-License-Identifier: Apache-2.0
// Conformance tests of backends (backend_conformance.h) with soft targets: rows that have several classes
// with weights in the place of one target (kernels/soft_targets.h).
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
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

constexpr Rest kRests[] = {Rest::kNone, Rest::kRenormalized, Rest::kOneClass};

ProblemSpec WithTargets(ProblemSpec spec, Rest rest, int32_t count) {
  spec.options.rest = rest;
  spec.options.label_smoothing = 0.0f;
  spec.options.use_class_weights = false;
  spec.class_count = spec.top_k = 0;
  // Where a row may name all classes, nothing is left for the rest.
  const int64_t room = spec.config.vocab_size - (rest == Rest::kOneClass ? 1 : 0);
  spec.target_count = static_cast<int32_t>(std::min<int64_t>(count, room));
  return spec;
}

// Soft targets that say the same as one target of weight 1.
void NameTargetsAlone(Problem& problem, Rest rest) {
  problem.options.rest = rest;
  for (SliceData& slice : problem.slices) {
    slice.target_count = 1;
    slice.target_classes.clear();
    for (const int32_t target : slice.targets) slice.target_classes.push_back(std::max(target, 0));
    slice.target_weights.assign(slice.targets.size(), 1.0f);
  }
}

}  // namespace

TEST_P(BackendConformance, SoftTargetsWithEachOptionAlone) {
  for (const Rest rest : kRests) {
    for (const ProblemSpec& spec : EachOptionAlone(Plain({23, 31}, 37, 211))) {
      RunAndCompare(backend(), {MakeProblem(WithTargets(spec, rest, 9), rng())});
    }
  }
}

TEST_P(BackendConformance, SoftTargetsOfShapesThatNoTileDivides) {
  for (const auto& [rows, hidden, vocab] : kOddShapes) {
    for (const Rest rest : kRests) {
      if (rest == Rest::kOneClass && vocab == 1) continue;
      const auto count = static_cast<int32_t>(UniformInt(rng(), 1, kMostSoftTargets));
      RunAndCompare(backend(), {MakeProblem(WithTargets(Plain({rows}, hidden, vocab), rest, count), rng())});
    }
  }
}

TEST_P(BackendConformance, SoftTargetsWithAllOtherOptionsOverSeveralChunks) {
  for (int repeat = 0; repeat < 12; ++repeat) {
    ProblemSpec spec = WithTargets(Random(40, 24 + 9 * repeat, 61 + 53 * repeat), kRests[repeat % 3],
                                   static_cast<int32_t>(UniformInt(rng(), 1, 40)));
    std::vector<Problem> chunks = {MakeProblem(spec, rng())};
    Problem next = chunks.front();
    spec.target_count = static_cast<int32_t>(UniformInt(rng(), 1, 9));  // slices may differ
    next.slices = {MakeSlice(spec, UniformInt(rng(), 1, 40), rng())};
    spec.target_count = static_cast<int32_t>(UniformInt(rng(), 10, 20));
    next.slices.push_back(MakeSlice(spec, UniformInt(rng(), 1, 40), rng()));
    next.slices.front().want_grad_hidden = Chance(rng(), 0.5);
    chunks.push_back(next);
    RunAndCompare(backend(), chunks);
  }
}

TEST_P(GradientsConformance, SoftTargetsWithGradientsOfEveryKind) {
  for (const Gradients gradients : {Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
    for (const Rest rest : kRests) {
      for (const float softcap : {0.0f, 12.0f}) {
        ProblemSpec spec = WithTargets(Plain({33, 30}, 40, 700), rest, 24);
        spec.options.gradients = gradients;
        spec.options.filter_epsilon = 1e-3f;
        spec.options.sample_threshold = 5e-3f;
        spec.options.max_gradient_error = 1e6f;
        spec.options.softcap = softcap;
        spec.row_weights = true;
        RunAndCompare(backend(), {MakeProblem(spec, rng())});
      }
    }
  }
}

// The mean of sampled gradients over seeds is the exact one.
TEST_P(GradientsConformance, SampledSoftTargetsAreUnbiased) {
  ProblemSpec spec = WithTargets(Plain({24}, 16, 300), Rest::kOneClass, 20);
  spec.ignored = 0.0;
  Problem problem = MakeProblem(spec, rng());
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  ASSERT_TRUE(RunChunk(*head, problem).done.ok());
  const std::vector<float> want = ReadGradient(*head, Param::kWeight);
  problem.options.gradients = Gradients::kSampled;
  problem.options.sample_threshold = 0.05f;
  constexpr int kSeeds = 60;
  ASSERT_TRUE(head->ZeroGradients().ok());
  double variance = 0.0, square = 0.0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    problem.slices.front().sample_seed = rng()();
    const ChunkRun run = RunChunk(*head, problem);
    ASSERT_TRUE(run.done.ok()) << run.done;
    variance += run.slices.front().sums.sampling_variance;
    square += run.slices.front().sums.squared_gradient;
  }
  const std::vector<float> sum = ReadGradient(*head, Param::kWeight);
  double error = 0.0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double difference = double{sum[i]} / kSeeds - double{want[i]};
    error += difference * difference;
  }
  const double predicted = std::sqrt(variance / square / kSeeds);
  EXPECT_GT(variance, 0.0);
  EXPECT_LT(std::sqrt(error) / NormOf(want), 3.0 * predicted + 1e-2) << "predicted " << predicted;
}

TEST_P(BackendConformance, SoftTargetsWithoutGradients) {
  for (const Rest rest : kRests) {
    for (const bool all_ignored : {false, true}) {
      ProblemSpec spec = WithTargets(Plain({17, 20}, 37, 101), rest, 7);
      if (all_ignored) spec.ignored = 1.0;
      Problem problem = MakeProblem(spec, rng());
      problem.accumulate_gradients = all_ignored;
      for (SliceData& slice : problem.slices) slice.want_grad_hidden = all_ignored;
      RunAndCompare(backend(), {problem});
    }
  }
}

// Class probabilities of a small vocabulary: every class is named.
TEST_P(BackendConformance, SoftTargetsOfAllClasses) {
  for (const Rest rest : kRests) {
    ProblemSpec spec = Plain({21, 6}, 24, 40);
    spec.options.rest = rest;
    spec.target_count = 40;
    Problem problem = MakeProblem(spec, rng());
    for (SliceData& slice : problem.slices) {
      for (size_t row = 0; row < slice.targets.size(); ++row) {
        double sum = 0.0;
        for (size_t i = 0; i < 40; ++i) {
          slice.target_classes[row * 40 + i] = static_cast<int32_t>(39 - i);
          slice.target_weights[row * 40 + i] = Uniform(rng(), 0.1f, 1.0f);
          sum += double{slice.target_weights[row * 40 + i]};
        }
        for (size_t i = 0; i < 40; ++i) slice.target_weights[row * 40 + i] /= static_cast<float>(sum);
      }
    }
    RunAndCompare(backend(), {problem});
  }
}

// Label smoothing is a special case.
TEST_P(BackendConformance, SoftTargetsAsLabelSmoothing) {
  constexpr int64_t kVocab = 30;
  ProblemSpec spec = Plain({25}, 24, kVocab);
  spec.options.label_smoothing = 0.2f;
  spec.ignored = 0.1;
  const Problem smooth = MakeProblem(spec, rng());
  Problem soft = smooth;
  soft.options.label_smoothing = 0.0f;
  soft.options.rest = Rest::kNone;
  SliceData& slice = soft.slices.front();
  slice.target_count = kVocab;
  for (const int32_t target : slice.targets) {
    for (int32_t v = 0; v < kVocab; ++v) {
      slice.target_classes.push_back(v);
      slice.target_weights.push_back(0.2f / kVocab + (v == target ? 0.8f : 0.0f));
    }
  }
  RunAndCompare(backend(), {soft});
  const auto head = MakeHead(backend(), smooth);
  ASSERT_NE(head, nullptr);
  const ChunkRun want = RunChunk(*head, smooth), got = RunChunk(*head, soft);
  ASSERT_TRUE(want.done.ok() && got.done.ok()) << got.done;
  for (size_t row = 0; row < slice.targets.size(); ++row) {
    EXPECT_NEAR(got.slices[0].loss[row], want.slices[0].loss[row], 1e-4) << row;
  }
}

// Where the named classes have nearly all of the probability, what is left of it is still precise: 1 - p
// would be 0 in fp32.
TEST_P(BackendConformance, RestOfConfidentRows) {
  constexpr int64_t kVocab = 90;
  for (const float height : {8.0f, 24.0f, 48.0f}) {
    std::vector<float> logits(kVocab, 0.0f);
    for (size_t v = 0; v < kVocab; ++v) logits[v] = static_cast<float>(v % 5) * 0.25f;
    logits[3] = height;
    logits[60] = height - 1.0f;
    Problem problem = WithLogits(logits, {3, 60, 3, 7});
    problem.options.rest = Rest::kOneClass;
    SliceData& slice = problem.slices.front();
    slice.target_count = 4;
    for (size_t row = 0; row < 4; ++row) {
      for (const int32_t v : {60, 3, kNoClass, 3}) slice.target_classes.push_back(v);
      for (const float w : {0.25f, 0.5f, 0.0f, 0.125f}) slice.target_weights.push_back(w);
    }
    RunAndCompare(backend(), {problem});
  }
}

// One target of weight 1 is the cross-entropy.
TEST_P(BackendConformance, OneSoftTargetIsTheCrossEntropy) {
  for (const Rest rest : kRests) {
    Problem problem = MakeProblem(Plain({40}, 33, 260), rng());
    const auto head = MakeHead(backend(), problem);
    ASSERT_NE(head, nullptr);
    const ChunkRun want = RunChunk(*head, problem);
    NameTargetsAlone(problem, rest);
    const ChunkRun got = RunChunk(*head, problem);
    ASSERT_TRUE(want.done.ok() && got.done.ok()) << got.done;
    for (size_t row = 0; row < problem.slices[0].targets.size(); ++row) {
      const float loss = want.slices[0].loss[row];
      EXPECT_NEAR(got.slices[0].loss[row], loss, 1e-4 * (1.0 + double{loss})) << row;
      EXPECT_EQ(got.slices[0].argmax[row], want.slices[0].argmax[row]);
    }
    RunAndCompare(backend(), {problem});
  }
}

// A class without a probability may be named with weight 0; with a weight its loss is infinite, and the row
// fails as one whose target is such a class.
TEST_P(BackendConformance, SoftTargetsAmongMaskedClasses) {
  constexpr int64_t kVocab = 60;
  for (const Rest rest : kRests) {
    ProblemSpec spec = WithTargets(Plain({5, 4}, 16, kVocab), rest, 6);
    spec.config.has_bias = true;
    spec.ignored = 0.0;
    Problem problem = MakeProblem(spec, rng());
    for (size_t v = 0; v < kVocab; v += 2) problem.bias[v] = -kInf;
    for (SliceData& slice : problem.slices) {
      for (int32_t& target : slice.targets) target |= 1;
      for (size_t i = 0; i < slice.target_classes.size(); ++i) {
        if (slice.target_classes[i] == kNoClass) continue;
        slice.target_classes[i] |= 1;
        if (slice.target_weights[i] == 0.0f) slice.target_classes[i] &= ~1;
      }
    }
    RunAndCompare(backend(), {problem});
    problem.slices[1].target_classes[2 * 6] = 4;
    problem.slices[1].target_weights[2 * 6] = 0.01f;
    if (rest == Rest::kOneClass) {
      for (size_t i = 1; i < 6; ++i) problem.slices[1].target_weights[2 * 6 + i] *= 0.9f;
    }
    const auto head = MakeHead(backend(), problem);
    ASSERT_NE(head, nullptr);
    const ChunkRun run = RunChunk(*head, problem);
    ASSERT_TRUE(run.results.ok()) << run.results;
    EXPECT_EQ(run.slices[0].first_nonfinite_row, -1);
    EXPECT_EQ(run.slices[1].first_nonfinite_row, 2);
  }
}

TEST_P(BackendConformance, RefusesBadSoftTargets) {
  const auto expect_refused = [&](Rest rest, auto change, const char* field, const char* limit) {
    ProblemSpec spec = WithTargets(Plain({4}, 16, 90), rest, 3);
    spec.ignored = 0.0;
    Problem problem = MakeProblem(spec, rng());
    problem.slices[0].target_classes.assign(12, 5);
    problem.slices[0].target_weights.assign(12, 0.25f);
    change(problem);
    const auto head = MakeHead(backend(), problem);
    ASSERT_NE(head, nullptr);
    const ChunkRun run = RunChunk(*head, problem);
    EXPECT_TRUE(absl::IsInvalidArgument(run.results)) << run.results;
    EXPECT_THAT(run.results.message(), HasSubstr(field));
    EXPECT_THAT(run.results.message(), HasSubstr(limit));
    ExpectZeroGradients(*head);
  };
  const auto weight = [](size_t i, float value) {
    return [i, value](Problem& problem) { problem.slices[0].target_weights[i] = value; };
  };
  const auto place = [](size_t i, int32_t value) {
    return [i, value](Problem& problem) { problem.slices[0].target_classes[i] = value; };
  };
  expect_refused(Rest::kNone, weight(4, -0.5f), "slices[0].target_weights[4]", "-0.5");
  expect_refused(Rest::kNone, weight(4, kNan), "slices[0].target_weights[4]", "finite");
  expect_refused(Rest::kNone, place(7, 90), "slices[0].target_classes[7]", "[0, 90)");
  expect_refused(Rest::kNone, place(7, -2), "slices[0].target_classes[7]", "-2");
  expect_refused(Rest::kNone, place(7, kNoClass), "slices[0].target_weights[7]", "be 0");
  expect_refused(Rest::kOneClass, weight(10, 0.75f), "slices[0].target_weights[9]", "at most 1.001");
  expect_refused(
      Rest::kRenormalized, [](Problem& problem) { problem.slices[0].target_weights.assign(12, 0.0f); },
      "slices[0].target_weights[0]", "more than 0");
  expect_refused(
      Rest::kNone, [](Problem& problem) { problem.slices[0].target_count = kMostSoftTargets + 1; },
      "slices[0].target_count", "[1, 90]");
  expect_refused(
      Rest::kNone, [](Problem& problem) { problem.options.rest = Rest::kNoTargets; },
      "slices[0].target_count", "be 0");
  expect_refused(
      Rest::kNone, [](Problem& problem) { problem.slices[0].top_k = 2; }, "slices[0].top_k", "soft targets");
  expect_refused(
      Rest::kNone, [](Problem& problem) { problem.options.label_smoothing = 0.1f; }, "label_smoothing",
      "soft targets");
  expect_refused(
      Rest::kNone, [](Problem& problem) { problem.options.use_class_weights = true; }, "use_class_weights",
      "soft targets");
  expect_refused(
      Rest::kNone, [](Problem& problem) { problem.options.objective.kind = ObjectiveKind::kDft; },
      "objective", "soft targets");
}

}  // namespace lossd::kernels::testing
