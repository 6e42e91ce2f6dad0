// SPDX-License-Identifier: Apache-2.0
// Conformance tests of backends (backend_conformance.h) about heads that live in host memory: they compute
// the same bits as heads that live on the device, whatever the pool of the device has at that time.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "kernels/errors/field_error.h"
#include "kernels/teacher_pool.h"
#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/chunk_run.h"
#include "tests/kernels/comparison.h"

namespace lossd::kernels::testing {
namespace {

void ExpectSameBits(const ChunkRun& got, const ChunkRun& want) {
  ASSERT_TRUE(got.results.ok()) << got.results;
  ASSERT_TRUE(want.results.ok()) << want.results;
  EXPECT_TRUE(got.done.ok()) << got.done;
  ASSERT_EQ(got.slices.size(), want.slices.size());
  for (size_t i = 0; i < got.slices.size(); ++i) {
    SCOPED_TRACE(i);
    const SliceOutputs &a = got.slices[i], &b = want.slices[i];
    EXPECT_EQ(a.first_nonfinite_row, -1);
    ExpectSameRows(a, b);
    EXPECT_EQ(a.sums.loss, b.sums.loss);
    EXPECT_EQ(a.sums.correct_rows, b.sums.correct_rows);
  }
}

PagingStats PagingOf(const HeadKernels& head) {
  const std::optional<PagingStats> paging = head.paging();
  EXPECT_TRUE(paging.has_value());
  return paging.value_or(PagingStats());
}

}  // namespace

Problem PoolConformance::InHostMemory(Problem problem) {
  problem.config.residency = Residency::kHost;
  return problem;
}

std::vector<Problem> PoolConformance::Lessons(int teachers, int64_t hidden_size, int64_t vocab_size) {
  std::vector<Problem> lessons;
  for (int i = 0; i < teachers; ++i) {
    ProblemSpec spec = Distilled({23, 18}, 29, vocab_size, hidden_size + 3 * i,
                                 {.divergence = Divergence::kForwardKl, .target_weight = 0.5f});
    spec.teacher.front().config.norm = i % 2 == 0 ? Norm::kRmsNorm : Norm::kNone;
    spec.teacher.front().config.has_bias = i % 2 == 0;
    lessons.push_back(MakeProblem(spec, rng()));
    for (Param param : kAllParams) lessons.back().Values(param) = lessons.front().Values(param);
  }
  return lessons;
}

// Heads that are split by vocabulary live on their devices, and say so.
TEST_P(PoolConformance, HeadsByVocabularyAreRefusedByName) {
  ProblemSpec spec = Plain({4}, 8, 16);
  spec.config.trainable = false;
  spec.config.residency = Residency::kHost;
  const bool refused = spec.config.split == Split::kVocabulary;
  const auto head = backend().CreateHead(spec.config);
  EXPECT_EQ(head.status().code(), refused ? absl::StatusCode::kUnimplemented : absl::StatusCode::kOk)
      << head.status();
  EXPECT_EQ(absl::StrContains(head.status().message(), "residency"), refused);
  spec.config.split = Split::kAny;
  spec.config.shares.clear();
  spec.config.replicas = 0;
  EXPECT_TRUE(backend().CreateHead(spec.config).ok());
  spec.config.trainable = true;
  const absl::Status trainable = backend().CreateHead(spec.config).status();
  EXPECT_EQ(trainable.code(), absl::StatusCode::kInvalidArgument) << trainable;
  EXPECT_TRUE(absl::StrContains(trainable.message(), "residency")) << trainable;
}

TEST_P(PoolConformance, LossesAndHiddenGradientsHaveTheSameBits) {
  if (GetParam().split == Split::kVocabulary) return;
  for (const auto& [rows, hidden, vocab] : kOddShapes) {
    for (const Norm norm : {Norm::kNone, Norm::kLayerNorm, Norm::kRmsNorm}) {
      ProblemSpec spec = Plain({rows, 5}, hidden, vocab);
      spec.config.trainable = false;
      spec.config.norm = norm;
      spec.config.has_bias = norm != Norm::kRmsNorm;
      spec.config.has_class_weights = norm == Norm::kNone;
      spec.options.use_class_weights = norm == Norm::kNone;
      spec.class_count = 3;
      spec.top_k = vocab > 4 ? 4 : 1;
      Problem problem = MakeProblem(spec, rng());
      problem.accumulate_gradients = false;
      const auto device = MakeHead(backend(), problem);
      const auto host = MakeHead(backend(), InHostMemory(problem));
      ASSERT_TRUE(device != nullptr && host != nullptr);
      EXPECT_FALSE(device->paging().has_value());
      EXPECT_FALSE(PagingOf(*host).on_device);
      EXPECT_EQ(host->chunk_rows(), device->chunk_rows());
      ExpectSameBits(RunChunk(*host, problem), RunChunk(*device, problem));
      ExpectSameBits(RunChunk(*host, problem), RunChunk(*device, problem));
      const PagingStats paging = PagingOf(*host);
      EXPECT_TRUE(paging.on_device || GetParam().devices > 1);
      EXPECT_GE(paging.copies, 1);
      EXPECT_GE(paging.hits + paging.copies, 2);
      EXPECT_EQ(paging.copied_bytes * GetParam().devices, paging.copies * paging.value_bytes);
    }
  }
}

TEST_P(PoolConformance, AllWaysOfGradientsHaveTheSameBits) {
  if (GetParam().split == Split::kVocabulary) return;
  for (const Gradients gradients : {Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
    ProblemSpec spec = Plain({90, 41}, 64, 777);
    spec.config.trainable = false;
    spec.options.gradients = gradients;
    Problem problem = MakeProblem(spec, rng());
    problem.accumulate_gradients = false;
    const auto device = MakeHead(backend(), problem);
    const auto host = MakeHead(backend(), InHostMemory(problem));
    for (int i = 0; i < 3; ++i) ExpectSameBits(RunChunk(*host, problem), RunChunk(*device, problem));
  }
}

// The pool has room for one of them.
TEST_P(PoolConformance, TeachersInTurn) {
  if (!Distils() || GetParam().split == Split::kVocabulary) return;
  const std::vector<Problem> lessons = Lessons(3, 120, 301);
  const auto student = MakeHead(backend(), lessons.front());
  std::vector<std::unique_ptr<HeadKernels>> device, host;
  std::vector<ChunkToRun> chunks;
  for (const Problem& lesson : lessons) {
    device.push_back(MakeHead(backend(), lesson.teacher.front()));
    host.push_back(MakeHead(backend(), InHostMemory(lesson.teacher.front())));
  }
  std::vector<ChunkRun> want;
  for (size_t i = 0; i < 12; ++i) {
    const size_t which = i % 5 == 4 ? 0 : i % lessons.size();
    want.push_back(RunChunk(*student, lessons[which], {.teacher = device[which].get()}));
    chunks.push_back({student.get(), &lessons[which], {.teacher = host[which].get()}});
  }
  const std::vector<ChunkRun> got = RunInFlight(chunks, backend().max_chunks_in_flight());
  for (size_t i = 0; i < chunks.size(); ++i) {
    SCOPED_TRACE(i);
    ExpectSameBits(got[i], want[i]);
  }
  int64_t evictions = 0;
  for (const auto& teacher : host) evictions += PagingOf(*teacher).evictions;
  EXPECT_GE(evictions, GetParam().devices == 1 ? 3 : 0);
}

// Heads in host memory and others, as students, as teachers and by themselves, in flight together.
TEST_P(PoolConformance, MixturesInFlight) {
  if (!Distils() || GetParam().split == Split::kVocabulary) return;
  const std::vector<Problem> lessons = Lessons(2, 40, 130);
  const auto student = MakeHead(backend(), lessons.front());
  Problem alone = MakeProblem(Plain({31, 2}, 90, 130), rng());
  alone.config.trainable = alone.accumulate_gradients = false;
  Problem frozen = lessons.front();  // a student in host memory
  frozen.config.trainable = frozen.accumulate_gradients = false;
  const auto make = [&](const Problem& problem, bool in_host_memory) {
    return MakeHead(backend(), in_host_memory ? InHostMemory(problem) : problem);
  };
  std::vector<ChunkRun> runs[2];
  for (const bool in_host_memory : {false, true}) {
    const auto first = make(lessons[0].teacher.front(), in_host_memory);
    const auto second = make(lessons[1].teacher.front(), in_host_memory);
    const auto other = make(alone, in_host_memory);
    const auto taught = make(frozen, in_host_memory);
    const auto on_device = make(lessons[0].teacher.front(), false);
    std::vector<ChunkToRun> chunks;
    for (int i = 0; i < 4; ++i) {
      chunks.push_back({student.get(), &lessons[0], {.teacher = first.get()}});
      chunks.push_back({other.get(), &alone});
      chunks.push_back({student.get(), &lessons[1], {.teacher = second.get()}});
      chunks.push_back({student.get(), &lessons[1], {.teacher = second.get()}});
      chunks.push_back({taught.get(), &frozen, {.teacher = on_device.get()}});
      chunks.push_back({other.get(), &alone});
    }
    runs[in_host_memory ? 1 : 0] = RunInFlight(chunks, backend().max_chunks_in_flight());
  }
  for (size_t i = 0; i < runs[0].size(); ++i) {
    SCOPED_TRACE(i);
    ExpectSameBits(runs[1][i], runs[0][i]);
  }
}

TEST_P(PoolConformance, TensorsAreThoseInHostMemory) {
  if (GetParam().split == Split::kVocabulary) return;
  ProblemSpec spec = Plain({12}, 33, 65);
  spec.config.trainable = false;
  spec.config.norm = Norm::kLayerNorm;
  spec.config.has_bias = spec.config.has_class_weights = true;
  spec.options.use_class_weights = true;
  Problem problem = MakeProblem(spec, rng());
  problem.accumulate_gradients = false;
  const auto host = MakeHead(backend(), InHostMemory(problem));
  const auto fresh = backend().CreateHead(InHostMemory(problem).config);
  ASSERT_TRUE(fresh.ok()) << fresh.status();
  for (Param param : kAllParams) {
    SCOPED_TRACE(Name(param));
    const TensorId id = {param, Role::kValue};
    EXPECT_EQ(ReadAll(*host, id), problem.Values(param));  // which 16 bits hold, where they have to
    const bool ones = param == Param::kNormGain || param == Param::kClassWeights;
    EXPECT_EQ(ReadAll(**fresh, id), std::vector<float>(problem.Values(param).size(), ones ? 1.0f : 0.0f));
  }
  // Rows in every dtype; what was computed before they were written does not count.
  ExpectSameBits(RunChunk(*host, problem), RunChunk(*MakeHead(backend(), problem), problem));
  Problem changed = MakeProblem(spec, rng());
  changed.slices = problem.slices;
  changed.accumulate_gradients = false;
  for (Param param : kAllParams) {
    const TensorShape shape = ShapeOf(problem.config, param);
    const int64_t begin = shape.rows / 3, rows = shape.rows - begin - 1;
    const auto from = static_cast<size_t>(begin * shape.cols);
    const auto count = static_cast<size_t>(rows * shape.cols);
    std::vector<float> part(changed.Values(param).begin() + static_cast<std::ptrdiff_t>(from),
                            changed.Values(param).begin() + static_cast<std::ptrdiff_t>(from + count));
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      const std::vector<uint8_t> bytes = Encode(dtype, part);
      ASSERT_TRUE(host->WriteTensor({param, Role::kValue}, begin, rows, dtype, bytes).ok());
      std::vector<uint8_t> back(bytes.size());
      ASSERT_TRUE(host->ReadTensor({param, Role::kValue}, begin, rows, dtype, absl::MakeSpan(back)).ok());
      EXPECT_TRUE(back == bytes || dtype != DType::kFloat32);
    }
    std::copy(part.begin(), part.end(), problem.Values(param).begin() + static_cast<std::ptrdiff_t>(from));
  }
  EXPECT_FALSE(PagingOf(*host).on_device);
  ExpectSameBits(RunChunk(*host, problem), RunChunk(*MakeHead(backend(), problem), problem));
  std::vector<uint8_t> none(4);
  EXPECT_EQ(
      host->ReadTensor({Param::kWeight, Role::kGradient}, 0, 1, DType::kFloat32, absl::MakeSpan(none)).code(),
      absl::StatusCode::kNotFound);
  EXPECT_EQ(host->WriteTensor({Param::kWeight, Role::kValue}, 60, 9, DType::kFloat32, none).code(),
            absl::StatusCode::kInvalidArgument);
}

// Heads that come and go move the memory that the others compute in.
TEST_P(PoolConformance, HeadsThatComeAndGo) {
  if (GetParam().split == Split::kVocabulary) return;
  const auto make = [&](int64_t hidden, int64_t vocab) {
    ProblemSpec spec = Plain({30}, hidden, vocab);
    spec.config.trainable = false;
    spec.config.norm = Norm::kRmsNorm;
    Problem problem = MakeProblem(spec, rng());
    problem.accumulate_gradients = false;
    return problem;
  };
  std::vector<Problem> problems;
  for (const auto& [hidden, vocab] : {std::pair{16, 50}, std::pair{80, 300}, std::pair{24, 700}}) {
    problems.push_back(make(hidden, vocab));
  }
  std::vector<ChunkRun> want;
  for (const Problem& problem : problems) want.push_back(RunChunk(*MakeHead(backend(), problem), problem));
  std::vector<std::unique_ptr<HeadKernels>> heads;
  const auto compute = [&] {
    for (size_t i = heads.size(); i-- > 0;) {
      SCOPED_TRACE(i);
      if (heads[i] != nullptr) ExpectSameBits(RunChunk(*heads[i], problems[i]), want[i]);
    }
  };
  for (const Problem& problem : problems) {
    heads.push_back(MakeHead(backend(), InHostMemory(problem)));
    compute();
  }
  heads[1].reset();
  compute();
  heads[1] = MakeHead(backend(), InHostMemory(problems[1]));
  compute();
}

TEST_P(PoolConformance, AStudentAndATeacherInHostMemoryAreRefused) {
  if (!Distils() || GetParam().split == Split::kVocabulary) return;
  const Problem lesson = Lessons(1, 24, 61).front();
  Problem student = lesson;
  student.config.trainable = student.accumulate_gradients = false;
  const auto head = MakeHead(backend(), InHostMemory(student));
  const auto teacher = MakeHead(backend(), InHostMemory(lesson.teacher.front()));
  const absl::Status taken = head->CheckTeacher(*teacher);
  EXPECT_EQ(taken.code(), absl::StatusCode::kUnimplemented) << taken;
  EXPECT_TRUE(absl::StrContains(taken.message(), "distillation.teacher")) << taken;
  EXPECT_EQ(RunChunk(*head, student, {.teacher = teacher.get()}).results.code(),
            absl::StatusCode::kUnimplemented);
}

TEST_P(PoolConformance, RowsWithoutTargetsBringNothing) {
  if (GetParam().split == Split::kVocabulary) return;
  ProblemSpec spec = Plain({7}, 16, 30);
  spec.config.trainable = false;
  spec.ignored = 1.0;
  Problem problem = MakeProblem(spec, rng());
  problem.accumulate_gradients = false;
  const auto host = MakeHead(backend(), InHostMemory(problem));
  EXPECT_TRUE(RunChunk(*host, problem).results.ok());
  const PagingStats paging = PagingOf(*host);
  EXPECT_EQ(paging.hits + paging.copies, 0);
  EXPECT_FALSE(paging.on_device);
}

}  // namespace lossd::kernels::testing
