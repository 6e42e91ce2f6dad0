// SPDX-License-Identifier: Apache-2.0
// Conformance tests of backends (backend_conformance.h) about what a slice may ask of single classes of its
// rows: log-probabilities of given classes, and the most probable classes.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/chunk_run.h"
#include "tests/kernels/comparison.h"

namespace lossd::kernels::testing {
namespace {

constexpr int64_t kHidden = 16;

void WantClasses(SliceData& slice, int32_t class_count, int32_t top_k, int64_t vocab, Rng& rng) {
  slice.class_count = class_count;
  slice.top_k = static_cast<int32_t>(std::min<int64_t>(top_k, vocab));
  slice.classes.clear();
  for (int64_t i = 0; i < slice.rows() * class_count; ++i) {
    slice.classes.push_back(static_cast<int32_t>(UniformInt(rng, 0, vocab - 1)));
  }
}

// Rows whose logits are exactly these: x is the first unit vector.
Problem ExactLogits(ProblemSpec spec, const std::vector<float>& logits, Rng& rng) {
  spec.ignored = 0.0;
  Problem problem = MakeProblem(spec, rng);
  for (size_t v = 0; v < logits.size(); ++v) problem.weight[v * kHidden] = logits[v];
  for (SliceData& slice : problem.slices) {
    for (size_t i = 0; i < slice.hidden.size(); ++i) slice.hidden[i] = i % kHidden == 0 ? 1.0f : 0.0f;
  }
  return problem;
}

std::vector<int32_t> Order(const std::vector<float>& logits) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
  });
  return order;
}

// That every row has the classes that its slice wants, in the order of these logits.
void ExpectTopInOrder(const Problem& problem, const ChunkRun& run, const std::vector<float>& logits) {
  const std::vector<int32_t> order = Order(logits);
  for (size_t s = 0; s < problem.slices.size(); ++s) {
    const auto k = static_cast<size_t>(problem.slices[s].top_k);
    const std::vector<int32_t>& got = run.slices[s].top_classes;
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(got[i], order[i % k]) << "slice " << s << " rank " << i % k;
    }
  }
}

}  // namespace

TEST_P(BackendConformance, ClassesOfShapesThatNoTileDivides) {
  for (const auto& [rows, hidden, vocab] : kOddShapes) {
    Problem problem = MakeProblem(Plain({rows}, hidden, vocab), rng());
    WantClasses(problem.slices[0], kMostGivenClasses, kMostTopClasses, vocab, rng());
    RunAndCompare(backend(), {problem});
  }
}

// As many as there are, the smaller class first where logits are equal; values of a few kinds, so that there
// are ties at every rank, also between the classes of several devices.
TEST_P(BackendConformance, TopClassesWithTies) {
  for (const int64_t vocab : {1, 5, 64, 128, 517, 2503}) {
    for (const int kinds : {1, 3, 40}) {
      std::vector<float> logits;
      for (int64_t v = 0; v < vocab; ++v) {
        logits.push_back(static_cast<float>(UniformInt(rng(), 0, kinds - 1)) * 0.5f - 4.0f);
      }
      for (const float bias : {0.0f, 0.25f}) {
        ProblemSpec spec = Plain({3, 2}, kHidden, vocab);
        spec.config.has_bias = bias != 0.0f;
        Problem problem = ExactLogits(spec, logits, rng());
        if (bias != 0.0f) problem.bias.assign(static_cast<size_t>(vocab), bias);
        WantClasses(problem.slices[0], 0, kMostTopClasses, vocab, rng());
        WantClasses(problem.slices[1], 2, 3, vocab, rng());
        const auto head = MakeHead(backend(), problem);
        ASSERT_NE(head, nullptr);
        const ChunkRun run = RunChunk(*head, problem);
        ASSERT_TRUE(run.done.ok()) << run.done;
        SCOPED_TRACE(absl::StrCat("V ", vocab, " kinds ", kinds));
        ASSERT_NO_FATAL_FAILURE(ExpectTopInOrder(problem, run, logits));
        for (const SliceOutputs& slice : run.slices) EXPECT_EQ(slice.argmax[0], Order(logits)[0]);
        RunAndCompare(backend(), {problem});
      }
    }
  }
}

// Logits that come in ascending and in descending order, which a selection by a running threshold meets at
// its best and at its worst.
TEST_P(BackendConformance, TopClassesOfSortedLogits) {
  constexpr int64_t kVocab = 9001;
  for (const bool ascending : {true, false}) {
    std::vector<float> logits;
    for (int64_t v = 0; v < kVocab; ++v) {
      logits.push_back(static_cast<float>((ascending ? v : kVocab - v) / 71) * 0.125f);  // in 16 bits too
    }
    Problem problem = ExactLogits(Plain({2}, kHidden, kVocab), logits, rng());
    WantClasses(problem.slices[0], 0, kMostTopClasses, kVocab, rng());
    const auto head = MakeHead(backend(), problem);
    ASSERT_NE(head, nullptr);
    const ChunkRun run = RunChunk(*head, problem);
    ASSERT_TRUE(run.done.ok()) << run.done;
    ASSERT_NO_FATAL_FAILURE(ExpectTopInOrder(problem, run, logits));
  }
}

// More classes than a selection keeps in mind: logits of some kinds, of a single one, in ascending order, and
// far below that of the target, where exponentials of 16 bits are 0. The target is anywhere.
TEST_P(BackendConformance, TopClassesOfAManyThousand) {
  constexpr int64_t kVocab = 20011;
  const auto drawn = [&](int64_t) { return static_cast<float>(UniformInt(rng(), -120, 120)) / 16.0f; };
  const auto equal = [](int64_t) { return 0.5f; };
  const auto ascending = [](int64_t v) { return static_cast<float>(v / 160) / 8.0f; };
  const auto far_below = [](int64_t v) { return -100.0f - static_cast<float>(v % 32); };
  const std::vector<absl::FunctionRef<float(int64_t)>> kinds = {drawn, equal, ascending, far_below};
  for (const auto& logit : kinds) {
    std::vector<float> logits;
    for (int64_t v = 0; v < kVocab; ++v) logits.push_back(logit(v));
    const int64_t target = UniformInt(rng(), 0, kVocab - 1);
    logits[static_cast<size_t>(target)] = 8.0f;
    Problem problem = ExactLogits(Plain({2, 1, 1}, kHidden, kVocab), logits, rng());
    for (SliceData& slice : problem.slices)
      slice.targets.assign(slice.targets.size(), static_cast<int32_t>(target));
    WantClasses(problem.slices[0], 0, kMostTopClasses, kVocab, rng());
    WantClasses(problem.slices[1], 3, 1, kVocab, rng());
    problem.slices[2].targets[0] = static_cast<int32_t>((target + 1) % kVocab);
    WantClasses(problem.slices[2], 0, 30, kVocab, rng());
    const auto head = MakeHead(backend(), problem);
    ASSERT_NE(head, nullptr);
    const ChunkRun run = RunChunk(*head, problem);
    ASSERT_TRUE(run.done.ok()) << run.done;
    ASSERT_NO_FATAL_FAILURE(ExpectTopInOrder(problem, run, logits));
    RunAndCompare(backend(), {problem});
  }
}

// Temperatures of 0.1 and 10, a softcap, masked classes, and what these are together.
TEST_P(BackendConformance, ClassesOfExtremeLogits) {
  constexpr int64_t kVocab = 301;
  for (const float scale : {10.0f, 0.1f, -1.5f}) {
    for (const float softcap : {0.0f, 8.0f}) {
      for (const bool masked : {false, true}) {
        ProblemSpec spec = Plain({19, 4}, kHidden, kVocab);
        spec.options.logit_scale = scale;
        spec.options.softcap = softcap;
        spec.config.has_bias = masked;
        if (masked && scale < 0.0f && softcap == 0.0f) continue;  // +infinity
        Problem problem = MakeProblem(spec, rng());
        problem.accumulate_gradients = false;  // those of logits at a softcap are no more precise than 1e-5
        for (int64_t v = 0; masked && v < kVocab; v += 2) problem.bias[static_cast<size_t>(v)] = -kInf;
        for (SliceData& slice : problem.slices) {
          for (int32_t& target : slice.targets) {
            if (target != kIgnoredTarget) target |= 1;
          }
          for (int32_t& target : slice.targets) target = std::min<int32_t>(target, kVocab - 2);
          slice.want_grad_hidden = false;
          WantClasses(slice, 20, 128, kVocab, rng());
        }
        RunAndCompare(backend(), {problem});
      }
    }
  }
}

// Fewer classes than are wanted have a probability: the masked ones follow by their numbers.
TEST_P(BackendConformance, TopClassesAmongMaskedOnes) {
  constexpr int64_t kVocab = 40;
  ProblemSpec spec = Plain({3}, kHidden, kVocab);
  spec.config.has_bias = true;
  spec.ignored = 0.0;
  Problem problem = MakeProblem(spec, rng());
  problem.bias.assign(kVocab, -kInf);
  for (const size_t v : {7u, 21u, 39u}) problem.bias[v] = 0.0f;
  problem.slices[0].targets = {7, 21, 39};
  WantClasses(problem.slices[0], 5, kVocab, kVocab, rng());
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  const ChunkRun run = RunChunk(*head, problem);
  ASSERT_TRUE(run.done.ok()) << run.done;
  const SliceOutputs& got = run.slices[0];
  for (size_t row = 0; row < 3; ++row) {
    int32_t next = 0;
    for (size_t i = 3; i < kVocab; ++i) {
      while (next == 7 || next == 21 || next == 39) ++next;
      EXPECT_EQ(got.top_classes[row * kVocab + i], next++);
      EXPECT_EQ(got.top_logprobs[row * kVocab + i], -kInf);
    }
  }
  RunAndCompare(backend(), {problem});
}

TEST_P(BackendConformance, ClassesOfLossesAlone) {
  for (const bool all_ignored : {false, true}) {
    ProblemSpec spec = Plain({20, 7, 31}, kHidden, 600);
    if (all_ignored) spec.ignored = 1.0;
    Problem problem = MakeProblem(spec, rng());
    problem.accumulate_gradients = false;
    for (SliceData& slice : problem.slices) slice.want_grad_hidden = false;
    WantClasses(problem.slices[0], 4, 9, 600, rng());
    WantClasses(problem.slices[2], 0, 64, 600, rng());
    problem.slices[1].class_count = 3;
    problem.slices[1].shared_classes = true;
    problem.slices[1].classes = {599, 0, 0};
    RunAndCompare(backend(), {problem, problem});
  }
}

TEST_P(GradientsConformance, ClassesBesideOtherGradients) {
  for (const Gradients gradients : {Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
    for (const float max_error : {0.0f, 1e6f}) {
      for (const bool smooth : {false, true}) {
        ProblemSpec spec = Plain({9, 30}, 37, 600);
        spec.options.gradients = gradients;
        spec.options.filter_epsilon = 1e-3f;
        spec.options.sample_threshold = 1e-2f;
        spec.options.max_gradient_error = max_error;
        spec.options.label_smoothing = smooth ? 0.1f : 0.0f;
        spec.class_count = 6;
        spec.top_k = 70;
        RunAndCompare(backend(), {MakeProblem(spec, rng())});
      }
    }
  }
}

// What is asked of single classes changes no other bit.
TEST_P(BackendConformance, ClassesOfARowThatFails) {
  ProblemSpec spec = Plain({6, 5}, kHidden, 90);
  spec.ignored = 0.0;
  spec.class_count = 3;
  spec.top_k = 8;
  Problem problem = MakeProblem(spec, rng());
  problem.slices[1].hidden[2 * kHidden] = kNan;
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  const ChunkRun run = RunChunk(*head, problem);
  ASSERT_TRUE(run.done.ok()) << run.done;
  EXPECT_EQ(run.slices[0].first_nonfinite_row, -1);
  EXPECT_EQ(run.slices[1].first_nonfinite_row, 2);
}

TEST_P(BackendConformance, RefusesBadClasses) {
  const auto expect_refused = [&](auto change, const char* field, const char* limit) {
    ProblemSpec spec = Plain({4}, kHidden, 90);
    spec.class_count = 3;
    spec.top_k = 8;
    Problem problem = MakeProblem(spec, rng());
    change(problem.slices[0]);
    const auto head = MakeHead(backend(), problem);
    ASSERT_NE(head, nullptr);
    const ChunkRun run = RunChunk(*head, problem);
    EXPECT_TRUE(absl::IsInvalidArgument(run.results)) << run.results;
    EXPECT_THAT(run.results.message(), ::testing::HasSubstr(field));
    EXPECT_THAT(run.results.message(), ::testing::HasSubstr(limit));
    ExpectZeroGradients(*head);
  };
  expect_refused([](SliceData& slice) { slice.top_k = 91; }, "slices[0].top_k", "[0, 90]");
  expect_refused([](SliceData& slice) { slice.top_k = -1; }, "slices[0].top_k", "-1");
  expect_refused([](SliceData& slice) { slice.class_count = kMostGivenClasses + 1; }, "slices[0].class_count",
                 "[0, 256]");
  expect_refused([](SliceData& slice) { slice.classes[4] = 90; }, "slices[0].classes[4]", "[0, 90)");
  expect_refused([](SliceData& slice) { slice.classes[11] = -1; }, "slices[0].classes[11]", "-1");
}

}  // namespace lossd::kernels::testing
