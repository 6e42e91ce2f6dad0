// SPDX-License-Identifier: Apache-2.0
// Tests of heads that live in host memory through the service: what they compute, what is told of them, what
// is refused, and that tensors, checkpoints and deletions leave nothing behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "proto/wire/status_details.h"
#include "tests/kernels/problem.h"
#include "tests/server/service/service_client.h"
#include "tests/server/service/service_fixture.h"
#include "tests/server/service/service_problem.h"

namespace lossd::app::testing::teacher_pool_test {
namespace {

using kernels::Divergence;
using kernels::testing::Problem;
using kernels::testing::ProblemSpec;
using kernels::testing::Rng;
using ::testing::HasSubstr;

constexpr int64_t kClasses = 61;
constexpr int64_t kRows = 40;

class TeacherPoolTest : public ::testing::Test {
 protected:
  // A student with a frozen teacher; the student's tensors do not matter.
  Problem Lesson(int64_t teacher_hidden) {
    ProblemSpec spec;
    spec.config.hidden_size = 24;
    spec.config.vocab_size = kClasses;
    spec.slice_rows = {kRows};
    ProblemSpec teacher = spec;
    teacher.config.hidden_size = teacher_hidden;
    teacher.config.trainable = false;
    teacher.slice_rows.clear();
    spec.options.distillation = {.divergence = Divergence::kForwardKl};
    spec.teacher.push_back(teacher);
    return kernels::testing::MakeProblem(spec, rng_);
  }
  void Start(ServerOptions options = SmallServer()) {
    server_ = std::make_unique<TestServer>(std::move(options));
    client_ = server_->Connect();
  }
  void CreateInHostMemory(const std::string& name, Problem problem) {
    problem.config.residency = kernels::Residency::kHost;
    CreateHead(*client_, name, problem);
  }
  // The losses of the rows with this teacher.
  std::vector<float> Losses(const Problem& lesson, const std::string& teacher, uint64_t id) {
    v1::OpenMicrobatch open = OpenFor("student", lesson, lesson.slices.front(), id);
    open.mutable_options()->mutable_distillation()->set_teacher(teacher);
    const auto stream = client_->OpenLoss();
    stream->SendOpen(open);
    stream->SendSlice(0, kRows, PayloadOf(lesson, lesson.slices.front(), 0, kRows));
    const LossAnswers answers = stream->Finish();
    EXPECT_TRUE(answers.status.ok()) << answers.status;
    std::vector<float> losses;
    for (const LossAnswers::Slice& slice : answers.slices) {
      losses.insert(losses.end(), slice.result.row_loss().begin(), slice.result.row_loss().end());
    }
    return losses;
  }
  v1::HeadDescription Described(const std::string& head) {
    const auto description = client_->DescribeHead(head);
    EXPECT_TRUE(description.ok()) << description.status();
    return *description;
  }
  v1::MemoryUsage Memory() { return client_->GetServer()->memory(); }

  Rng rng_ = kernels::testing::FreshRng();
  std::unique_ptr<TestServer> server_;
  std::unique_ptr<TestClient> client_;
};

TEST_F(TeacherPoolTest, TeachersInTurnComputeWhatTeachersOnTheDeviceDo) {
  Start();
  const Problem lessons[] = {Lesson(40), Lesson(37)};
  CreateHead(*client_, "student", lessons[0]);
  for (const int i : {0, 1}) {
    CreateHead(*client_, absl::StrCat("device", i), lessons[i].teacher.front());
    CreateInHostMemory(absl::StrCat("host", i), lessons[i].teacher.front());
  }
  EXPECT_EQ(Described("device0").spec().residency(), v1::RESIDENCY_DEVICE);
  EXPECT_FALSE(Described("device0").has_paging());
  const v1::HeadDescription before = Described("host0");
  EXPECT_EQ(before.spec().residency(), v1::RESIDENCY_HOST);
  EXPECT_FALSE(before.paging().on_device());
  EXPECT_EQ(before.paging().copies(), 0u);
  EXPECT_GE(before.memory().host_values(), uint64_t{40 * kClasses * 4});
  EXPECT_EQ(before.memory().weights(), 0u);
  EXPECT_GE(Memory().teacher_pool(), uint64_t{40 * kClasses * 4});

  uint64_t id = 0;
  for (const int i : {0, 1, 1, 0}) {
    const std::vector<float> want = Losses(lessons[i], absl::StrCat("device", i), id++);
    const std::vector<float> got = Losses(lessons[i], absl::StrCat("host", i), id++);
    EXPECT_EQ(got, want);
    EXPECT_EQ(got.size(), static_cast<size_t>(kRows));
  }
  const v1::Paging first = Described("host0").paging(), second = Described("host1").paging();
  EXPECT_TRUE(first.on_device());
  EXPECT_FALSE(second.on_device()) << "the pool has room for the larger of the two";
  EXPECT_EQ(first.copies(), 2u);
  EXPECT_EQ(second.copies(), 1u);
  EXPECT_EQ(second.hits(), 1u);
  EXPECT_EQ(first.evictions(), 1u);
  EXPECT_EQ(second.evictions(), 1u);
  EXPECT_EQ(first.copied_bytes(), 2 * first.value_bytes());
  EXPECT_GT(first.copy_seconds(), 0.0);
}

TEST_F(TeacherPoolTest, APoolForBothCopiesEachOnce) {
  ServerOptions options = SmallServer();
  options.teacher_pool_bytes = 1 << 20;
  Start(options);
  const Problem lessons[] = {Lesson(40), Lesson(37)};
  CreateHead(*client_, "student", lessons[0]);
  for (const int i : {0, 1}) CreateInHostMemory(absl::StrCat("host", i), lessons[i].teacher.front());
  EXPECT_EQ(Memory().teacher_pool(), uint64_t{1} << 20);
  for (uint64_t id = 0; id < 6; ++id) Losses(lessons[id % 2], absl::StrCat("host", id % 2), id);
  for (const char* head : {"host0", "host1"}) {
    const v1::Paging paging = Described(head).paging();
    EXPECT_TRUE(paging.on_device());
    EXPECT_EQ(paging.copies(), 1u);
    EXPECT_EQ(paging.hits(), 2u);
    EXPECT_EQ(paging.evictions(), 0u);
  }
}

TEST_F(TeacherPoolTest, AHeadLargerThanThePoolIsRefusedAndHoldsNothing) {
  ServerOptions options = SmallServer();
  options.teacher_pool_bytes = 4096;
  Start(options);
  v1::CreateHeadRequest request;
  request.mutable_zeros();
  v1::HeadSpec& spec = *request.mutable_spec();
  spec.set_name("host");
  spec.set_hidden_size(40);
  spec.set_vocab_size(kClasses);
  spec.set_frozen(true);
  spec.set_residency(v1::RESIDENCY_HOST);
  const absl::Status refused = client_->CreateHead(request).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("9984 bytes"));  // 40 * 61 floats, rounded up
  EXPECT_THAT(std::string(refused.message()), HasSubstr("4096 bytes"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("--teacher_pool_bytes"));
  EXPECT_EQ(Memory().host_values(), 0u);
  EXPECT_EQ(Memory().teacher_pool(), 0u);
  EXPECT_EQ(client_->DescribeHead("host").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(TeacherPoolTest, TensorsCheckpointsAndDeletion) {
  Start();
  const Problem lesson = Lesson(40);
  const Problem& teacher = lesson.teacher.front();
  CreateHead(*client_, "student", lesson);
  CreateInHostMemory("host", teacher);
  const std::vector<float> losses = Losses(lesson, "host", 0);
  ASSERT_TRUE(client_->SaveCheckpoint("host", "kept").ok());
  // Other values are copied anew.
  std::vector<float> other = teacher.weight;
  for (float& value : other) value *= 0.5f;
  ASSERT_TRUE(client_->Write("host", v1::PARAM_WEIGHT, other).ok());
  EXPECT_FALSE(Described("host").paging().on_device());
  EXPECT_EQ(*client_->Read("host", v1::PARAM_WEIGHT, v1::ROLE_VALUE), other);
  EXPECT_NE(Losses(lesson, "host", 1), losses);
  // Into the head, and as a new head, which lives where the saved one did.
  ASSERT_TRUE(client_->LoadCheckpoint("host/kept", "host").ok());
  EXPECT_EQ(Losses(lesson, "host", 2), losses);
  const auto loaded = client_->LoadCheckpoint("host/kept", "again");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->spec().residency(), v1::RESIDENCY_HOST);
  EXPECT_EQ(*client_->Read("again", v1::PARAM_WEIGHT, v1::ROLE_VALUE), teacher.weight);
  EXPECT_EQ(Losses(lesson, "again", 3), losses);
  for (const char* head : {"host", "again"}) EXPECT_TRUE(client_->DeleteHead(head).ok());
  EXPECT_EQ(Memory().host_values(), 0u);
  EXPECT_EQ(Memory().teacher_pool(), 0u);
}

// Losses of the head itself, and gradients of hidden states.
TEST_F(TeacherPoolTest, RowsOfTheHeadItself) {
  Start();
  Problem problem = Lesson(40).teacher.front();
  problem.options.distillation = {};
  problem.teacher.clear();
  ProblemSpec spec;
  spec.config = problem.config;
  problem.slices.push_back(kernels::testing::MakeSlice(spec, kRows, rng_));
  problem.accumulate_gradients = false;
  CreateInHostMemory("host", problem);
  v1::OpenMicrobatch open = OpenFor("host", problem, problem.slices.front(), 0);
  open.set_accumulate_gradients(false);
  const LossAnswers answers = Stream(*client_, open, problem, problem.slices.front(), 0, kRows, rng_);
  ASSERT_TRUE(answers.status.ok()) << answers.status;
  const auto want = kernels::testing::ComputeReference(problem, nullptr);
  EXPECT_NEAR(answers.summary->loss_sum(), want.front().sums.loss,
              1e-4 * std::abs(want.front().sums.loss) + 1e-4);
  EXPECT_GE(Described("host").paging().copies(), 1u);
}

TEST_F(TeacherPoolTest, SeveralDevicesEachHaveAPool) {
  ServerOptions options = SmallServer();
  options.threads = 2;
  options.cpu_devices = 2;
  Start(options);
  const Problem lesson = Lesson(40);
  CreateHead(*client_, "student", lesson);
  CreateHead(*client_, "device", lesson.teacher.front());
  CreateInHostMemory("host", lesson.teacher.front());
  EXPECT_EQ(Described("host").paging().value_bytes(), Described("host").memory().host_values());
  EXPECT_EQ(Losses(lesson, "host", 0), Losses(lesson, "device", 1));

  v1::CreateHeadRequest request;
  request.mutable_zeros();
  v1::HeadSpec& spec = *request.mutable_spec();
  spec.set_name("split");
  spec.set_hidden_size(8);
  spec.set_vocab_size(kClasses);
  spec.set_frozen(true);
  spec.set_residency(v1::RESIDENCY_HOST);
  spec.set_split(v1::SPLIT_VOCABULARY);
  const absl::Status refused = client_->CreateHead(request).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnimplemented) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("spec.residency"));
}

TEST_F(TeacherPoolTest, AStudentAndATeacherInHostMemoryAreRefusedByName) {
  Start();
  const Problem lesson = Lesson(40);
  Problem student = lesson;
  student.config.trainable = false;
  CreateInHostMemory("student", student);
  CreateInHostMemory("host", lesson.teacher.front());
  v1::OpenMicrobatch open = OpenFor("student", lesson, lesson.slices.front(), 0);
  open.mutable_options()->mutable_distillation()->set_teacher("host");
  open.set_accumulate_gradients(false);
  const auto stream = client_->OpenLoss();
  stream->SendOpen(open);
  const absl::Status refused = stream->Finish().status;
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnimplemented) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("open.options.distillation.teacher"));
}

}  // namespace
}  // namespace lossd::app::testing::teacher_pool_test
