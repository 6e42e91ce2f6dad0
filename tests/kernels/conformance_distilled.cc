// SPDX-License-Identifier: Apache-2.0
// Conformance tests of backends (backend_conformance.h) about distillation: rows that are compared with the
// softmax of a teacher, another head of the same backend.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "kernels/errors/field_error.h"
#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/chunk_run.h"
#include "tests/kernels/comparison.h"

namespace lossd::kernels::testing {
ProblemSpec DistillationConformance::Distilled(std::vector<int64_t> slice_rows, int64_t hidden_size,
                                               int64_t vocab_size, int64_t teacher_hidden_size,
                                               const Distillation& distillation) {
  ProblemSpec spec = Plain(std::move(slice_rows), hidden_size, vocab_size);
  ProblemSpec teacher = Plain({}, teacher_hidden_size, vocab_size);
  teacher.config.trainable = false;
  teacher.config.workspace_bytes = int64_t{256} << 20;  // its chunks have the student's rows (CheckTeacher)
  spec.options.distillation = distillation;
  // Hidden states that the head rounds once more would leave too much to rounding (IsDecided).
  const bool jumps = distillation.divergence == Divergence::kTotalVariation;
  if (jumps && spec.config.compute_dtype != DType::kFloat32) spec.hidden_dtype = spec.config.compute_dtype;
  spec.teacher.push_back(std::move(teacher));
  return spec;
}

bool DistillationConformance::Distils() {
  const Problem problem =
      MakeProblem(Distilled({3}, 8, 16, 12, {.divergence = Divergence::kForwardKl}), rng());
  const auto head = MakeHead(backend(), problem);
  const auto teacher = MakeHead(backend(), problem.teacher.front());
  if (head == nullptr || teacher == nullptr) return false;
  const absl::Status taken = head->CheckTeacher(*teacher);
  EXPECT_EQ(taken.ok(), GetParam().distils) << taken;
  if (taken.ok()) return true;
  EXPECT_EQ(taken.code(), absl::StatusCode::kUnimplemented) << taken;
  EXPECT_FALSE(RunChunk(*head, problem, {.teacher = teacher.get()}).results.ok());
  ExpectZeroGradients(*head);
  return false;
}

bool DistillationConformance::IsDecided(const Problem& problem) {
  const Distillation& distillation = problem.options.distillation;
  return distillation.divergence != Divergence::kTotalVariation ||
         LeastGapToTeacher(problem) >= 1e-4 / distillation.temperature;
}

void DistillationConformance::Run(const ProblemSpec& spec) {
  Problem problem = MakeProblem(spec, rng());
  while (!IsDecided(problem)) problem = MakeProblem(spec, rng());
  RunAndCompare(backend(), {problem});
}

TEST_P(DistillationConformance, EachDivergence) {
  if (!Distils()) return;
  for (const Divergence divergence : kDivergences) {
    Run(Distilled({17, 20}, 37, 101, 37, {.divergence = divergence}));
    Run(Distilled({40}, 24, 61, 56, {.divergence = divergence, .weight = 0.7f, .target_weight = 0.3f}));
  }
}

TEST_P(DistillationConformance, EachMixtureOfJensenAndShannon) {
  if (!Distils()) return;
  for (const float beta : {0.1f, 0.5f, 0.9f}) {
    Run(Distilled({33}, 29, 130, 16, {.divergence = Divergence::kJensenShannon, .beta = beta}));
  }
}

TEST_P(DistillationConformance, ShapesThatNoTileDivides) {
  if (!Distils()) return;
  for (const auto& [rows, hidden, vocab] : kOddShapes) {
    Run(Distilled({rows}, hidden, vocab, hidden + 3, {.divergence = Divergence::kForwardKl}));
  }
}

TEST_P(DistillationConformance, ColdAndHotTemperatures) {
  if (!Distils()) return;
  for (const Divergence divergence : kDivergences) {
    for (const float temperature : {0.1f, 2.0f, 10.0f}) {
      Run(Distilled({21}, 24, 61, 40,
                    {.divergence = divergence, .temperature = temperature, .target_weight = 0.5f}));
    }
  }
}

// It has kernels of its own on some GPUs.
TEST_P(DistillationConformance, AForwardDivergenceAloneWithRandomOptions) {
  if (!Distils()) return;
  for (const float temperature : {0.1f, 1.0f, 1.0f, 2.5f, 10.0f}) {
    const int64_t rows = UniformInt(rng(), 1, 90);
    const int64_t hidden =
        UniformInt(rng(), 5, 70);  // several processes take teachers of 16 times that at most
    ProblemSpec spec = Distilled({rows, 3}, hidden, UniformInt(rng(), 2, 600), UniformInt(rng(), 1, 70),
                                 {.divergence = Divergence::kForwardKl, .temperature = temperature});
    ProblemSpec& teacher = spec.teacher.front();
    if (Chance(rng(), 0.5)) spec.options.softcap = 6.0f;
    if (Chance(rng(), 0.5)) spec.options.distillation.teacher_softcap = 5.0f;
    if (Chance(rng(), 0.5)) spec.options.logit_scale = 0.5f;
    if (Chance(rng(), 0.5)) spec.options.distillation.teacher_logit_scale = -0.25f;
    spec.config.has_bias = Chance(rng(), 0.5);
    teacher.config.has_bias = Chance(rng(), 0.5);
    teacher.config.norm = Chance(rng(), 0.5) ? Norm::kRmsNorm : Norm::kNone;
    spec.row_weights = Chance(rng(), 0.5);
    spec.accumulate_mask = Chance(rng(), 0.5);
    Problem problem = MakeProblem(spec, rng());
    if (Chance(rng(), 0.3)) problem.slices[0].top_k = 2;
    RunAndCompare(backend(), {problem});
  }
}

TEST_P(DistillationConformance, CapAndScaleOnOneSideOnly) {
  if (!Distils()) return;
  for (const Divergence divergence : kDivergences) {
    ProblemSpec student =
        Distilled({25}, 24, 61, 40, {.divergence = divergence, .temperature = 1.5f, .target_weight = 0.5f});
    student.options.softcap = 6.0f;
    Run(student);
    ProblemSpec teacher = Distilled({25}, 24, 61, 40, {.divergence = divergence, .temperature = 1.5f});
    teacher.options.distillation.teacher_softcap = 5.0f;
    Run(teacher);
    ProblemSpec scales = Distilled({25}, 24, 61, 40, {.divergence = divergence});
    scales.options.logit_scale = 0.5f;
    scales.options.distillation.teacher_logit_scale = -0.25f;
    Run(scales);
  }
}

TEST_P(DistillationConformance, NormsAndBiasesOfEitherSide) {
  if (!Distils()) return;
  for (const Norm student : {Norm::kNone, Norm::kLayerNorm, Norm::kRmsNorm}) {
    for (const Norm teacher : {Norm::kNone, Norm::kLayerNorm, Norm::kRmsNorm}) {
      ProblemSpec spec = Distilled({19, 4}, 24, 61, 40, {.divergence = Divergence::kReverseKl});
      spec.config.norm = student;
      spec.config.has_bias = student != Norm::kNone;
      spec.teacher.front().config.norm = teacher;
      spec.teacher.front().config.has_bias = teacher == Norm::kNone;
      Run(spec);
    }
  }
}

TEST_P(DistillationConformance, OptionsOfTheLossWithTargets) {
  if (!Distils()) return;
  for (ProblemSpec spec : EachOptionAlone(
           Distilled({17, 20}, 37, 101, 30,
                     {.divergence = Divergence::kForwardKl, .weight = 0.5f, .target_weight = 0.5f}))) {
    if (spec.grad_lse || spec.grad_entropy) continue;  // they are refused
    spec.accumulate_mask = true;
    Run(spec);
  }
}

TEST_P(DistillationConformance, ManyRowsInOneChunk) {
  if (!Distils()) return;
  ProblemSpec spec = Distilled({300, 90, 1}, 48, 257, 64, {.divergence = Divergence::kForwardKl});
  spec.row_weights = true;
  Problem problem = MakeProblem(spec, rng());
  problem.slices[1].want_grad_hidden = false;
  RunAndCompare(backend(), {problem}, {.grad_hidden_in_place = true});
}

TEST_P(DistillationConformance, IgnoredRowsAloneAndRowsOfWeightZero) {
  if (!Distils()) return;
  ProblemSpec spec = Distilled({7, 9}, 24, 61, 40, {.divergence = Divergence::kReverseKl});
  spec.ignored = 1.0;
  Run(spec);
  spec.ignored = 0.3;
  Problem problem = MakeProblem(spec, rng());
  for (SliceData& slice : problem.slices) {
    for (size_t row = 0; row < slice.targets.size(); ++row) {
      slice.row_weights.push_back(Chance(rng(), 0.5) ? 0.0f : 1.5f);
    }
  }
  RunAndCompare(backend(), {problem});
}

// Classes that one softmax or both lack.
TEST_P(DistillationConformance, MaskedClasses) {
  if (!Distils()) return;
  for (const Divergence divergence : kDivergences) {
    ProblemSpec spec = Distilled({15}, 24, 61, 40, {.divergence = divergence, .weight = 0.5f});
    spec.ignored = 0.0;
    spec.config.has_bias = spec.teacher.front().config.has_bias = true;
    Problem both, of_student, of_teacher;  // which of the two lacks class 7
    do {
      both = MakeProblem(spec, rng());
      both.bias[7] = both.teacher.front().bias[7] = -kInf;
      both.slices.front().targets.assign(15, 8);
      of_student = of_teacher = both;
      of_student.teacher.front().bias[7] = of_teacher.bias[7] = 0.5f;
    } while (!IsDecided(both) || !IsDecided(of_student) || !IsDecided(of_teacher));
    RunAndCompare(backend(), {both});

    const auto fails = [&](const Problem& problem) {
      const auto head = MakeHead(backend(), problem);
      const auto teacher = MakeHead(backend(), problem.teacher.front());
      const ChunkRun run = RunChunk(*head, problem, {.teacher = teacher.get()});
      EXPECT_TRUE(run.results.ok()) << run.results;
      const bool failed = run.slices.front().first_nonfinite_row >= 0;
      if (failed) ExpectZeroGradients(*head);
      return failed;
    };
    SCOPED_TRACE(Name(divergence));
    EXPECT_EQ(fails(of_student), divergence == Divergence::kForwardKl);
    EXPECT_EQ(fails(of_teacher), divergence == Divergence::kReverseKl);
    if (divergence != Divergence::kForwardKl) RunAndCompare(backend(), {of_student});
    if (divergence != Divergence::kReverseKl) RunAndCompare(backend(), {of_teacher});
  }
}

// Without the loss with targets, a masked target is no error, unless its log-probability is wanted.
TEST_P(DistillationConformance, AMaskedTargetThatDoesNotCount) {
  if (!Distils()) return;
  ProblemSpec spec = Distilled({15}, 24, 61, 40, {.divergence = Divergence::kForwardKl});
  spec.config.has_bias = spec.teacher.front().config.has_bias = true;
  Problem problem = MakeProblem(spec, rng());
  problem.bias[7] = problem.teacher.front().bias[7] = -kInf;
  problem.slices.front().targets.assign(15, 7);
  RunAndCompare(backend(), {problem}, {.want_row_outputs = false});
  const auto head = MakeHead(backend(), problem);
  const auto teacher = MakeHead(backend(), problem.teacher.front());
  const ChunkRun run = RunChunk(*head, problem, {.teacher = teacher.get()});
  EXPECT_EQ(run.slices.front().first_nonfinite_row, 0);
}

TEST_P(DistillationConformance, RowsThatAreNotFinite) {
  if (!Distils()) return;
  for (const Divergence divergence : {Divergence::kJensenShannon, Divergence::kForwardKl}) {
    const ProblemSpec spec = Distilled({15, 6}, 24, 61, 40, {.divergence = divergence});
    for (const float bad : {kNan, kInf, -kInf}) {
      SCOPED_TRACE(absl::StrCat(Name(divergence), " ", bad));
      Problem problem = MakeProblem(spec, rng());
      problem.slices.front().targets[4] = 3;
      problem.slices.front().teacher_hidden[4 * 40 + 1] = bad;
      const auto head = MakeHead(backend(), problem);
      const auto teacher = MakeHead(backend(), problem.teacher.front());
      const ChunkRun run = RunChunk(*head, problem, {.teacher = teacher.get()});
      ASSERT_TRUE(run.results.ok()) << run.results;
      EXPECT_EQ(run.slices.front().first_nonfinite_row, 4);
      problem.slices.erase(problem.slices.begin());
      reference::ParamGradients gradients = reference::ZeroGradients(problem.config);
      const auto want = ComputeReference(problem, &gradients);
      ExpectSliceMatches(head->compute_dtype(), problem, problem.slices.front(), want.front(), run.slices[1]);
      ExpectGradientsMatch(*head, gradients, MaxAbsLogit(want));
    }
  }
}

// Whatever the student does. A teacher with a small workspace has its logits a few rows at a time.
TEST_P(DistillationConformance, TeachersThatStoreOrRecompute) {
  if (!Distils()) return;
  for (const Logits logits : {Logits::kStored, Logits::kRecomputed}) {
    // Where logits are recomputed, chunks have fewer rows.
    if (logits == Logits::kRecomputed && GetParam().logits == Logits::kStored) continue;
    for (const int64_t workspace : {int64_t{0}, int64_t{32} << 20}) {
      ProblemSpec spec =
          Distilled({150, 61}, 40, 1030, 56,
                    {.divergence = Divergence::kReverseKl, .weight = 0.7f, .target_weight = 0.3f});
      spec.config.has_bias = true;
      spec.teacher.front().config.logits = logits;
      spec.config.workspace_bytes = workspace;
      if (workspace > 0) spec.teacher.front().config.workspace_bytes = 2 * workspace;
      spec.accumulate_mask = true;
      Run(spec);
      spec.options.distillation.target_weight = 0.0f;
      Problem problem = MakeProblem(spec, rng());
      for (SliceData& slice : problem.slices) slice.want_grad_hidden = false;
      RunAndCompare(backend(), {problem, problem});
    }
  }
}

// The teacher is a head like any other before and after.
TEST_P(DistillationConformance, TheTeacherStaysAsItIs) {
  if (!Distils()) return;
  const Problem problem =
      MakeProblem(Distilled({15}, 24, 61, 40, {.divergence = Divergence::kForwardKl}), rng());
  const auto head = MakeHead(backend(), problem);
  const auto teacher = MakeHead(backend(), problem.teacher.front());
  ASSERT_TRUE(RunChunk(*head, problem, {.teacher = teacher.get()}).done.ok());
  EXPECT_EQ(ReadAll(*teacher, {Param::kWeight, Role::kValue}), problem.teacher.front().weight);
  EXPECT_EQ(ReadAll(*head, {Param::kWeight, Role::kValue}), problem.weight);
}

TEST_P(DistillationConformance, RefusesWhatDoesNotFit) {
  if (!Distils()) return;
  const ProblemSpec spec = Distilled({15}, 24, 61, 40, {.divergence = Divergence::kForwardKl});
  const Problem problem = MakeProblem(spec, rng());
  const auto head = MakeHead(backend(), problem);
  const auto teacher = MakeHead(backend(), problem.teacher.front());
  const auto refused = [&](const Problem& chunk, HeadKernels* with, absl::string_view field) {
    const absl::Status status = RunChunk(*head, chunk, {.teacher = with}).results;
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), field)) << status;
    ExpectZeroGradients(*head);
  };
  refused(problem, nullptr, "teacher");
  Problem plain = problem;
  plain.options.distillation = {};
  refused(plain, teacher.get(), "teacher");
  Problem other = problem;
  other.slices.front().grad_lse.assign(15, 1.0f);
  refused(other, teacher.get(), "grad_lse");
  other = problem;
  other.options.gradients = Gradients::kFiltered;
  refused(other, teacher.get(), "gradients");
  other = problem;
  other.options.distillation.temperature = 0.0f;
  refused(other, teacher.get(), "distillation.temperature");

  ProblemSpec wide = Plain({}, 40, 62);
  wide.config.trainable = false;
  const auto of_other_classes = MakeHead(backend(), MakeProblem(wide, rng()));
  refused(problem, of_other_classes.get(), "distillation.teacher");
  EXPECT_EQ(head->CheckTeacher(*of_other_classes).code(), absl::StatusCode::kInvalidArgument);
  const auto trainable = MakeHead(backend(), MakeProblem(Plain({}, 40, 61), rng()));
  refused(problem, trainable.get(), "distillation.teacher");
}

}  // namespace lossd::kernels::testing
