// SPDX-License-Identifier: Apache-2.0
// Tests of distillation through the service: what is computed, what is refused, and what becomes of calls
// whose teacher changes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "proto/wire/status_details.h"
#include "tests/kernels/comparison.h"
#include "tests/kernels/problem.h"
#include "tests/server/service/service_client.h"
#include "tests/server/service/service_fixture.h"
#include "tests/server/service/service_problem.h"

namespace lossd::app::testing::distillation_test {
namespace {

namespace reference = kernels::reference;
using kernels::Distillation;
using kernels::Divergence;
using kernels::DType;
using kernels::testing::Problem;
using kernels::testing::ProblemSpec;
using kernels::testing::Rng;
using kernels::testing::SliceData;
using ::testing::HasSubstr;

constexpr int64_t kHidden = 24;
constexpr int64_t kTeacherHidden = 40;
constexpr int64_t kClasses = 61;

class DistillationTest : public ::testing::Test {
 protected:
  static ProblemSpec Spec(const Distillation& distillation, DType dtype = DType::kFloat32) {
    ProblemSpec spec;
    spec.config.hidden_size = kHidden;
    spec.config.vocab_size = kClasses;
    spec.config.has_bias = true;
    spec.hidden_dtype = dtype;
    spec.slice_rows = {90};
    ProblemSpec teacher = spec;
    teacher.config.hidden_size = kTeacherHidden;
    teacher.config.norm = kernels::Norm::kRmsNorm;
    teacher.config.trainable = false;
    teacher.slice_rows.clear();
    spec.options.distillation = distillation;
    spec.teacher.push_back(teacher);
    return spec;
  }

  void CreateHeads(TestClient& client, const Problem& problem) {
    CreateHead(client, "student", problem);
    CreateHead(client, kTeacherName, problem.teacher.front());
  }

  // Creates the heads of a random problem, which is returned.
  Problem Prepare(const Distillation& distillation = {.divergence = Divergence::kForwardKl}) {
    Problem problem = kernels::testing::MakeProblem(Spec(distillation), rng_);
    CreateHeads(*client_, problem);
    return problem;
  }

  v1::OpenMicrobatch OpenOf(const Problem& problem, uint64_t id = 0) {
    return OpenFor("student", problem, problem.slices.front(), id);
  }

  // What a call says that is opened so and sends all rows.
  absl::Status Call(const Problem& problem, const std::function<void(v1::OpenMicrobatch&)>& change) {
    v1::OpenMicrobatch open = OpenOf(problem);
    change(open);
    const auto stream = client_->OpenLoss();
    stream->SendOpen(open);
    stream->SendSlice(0, 90, PayloadOf(problem, problem.slices.front(), 0, 90));
    return stream->Finish().status;
  }

  void ExpectNothingAccumulated() {
    const auto head = client_->DescribeHead("student");
    ASSERT_TRUE(head.ok());
    EXPECT_EQ(head->step_rows(), 0u);
    EXPECT_EQ(head->open_streams(), 0u);
  }

  Rng rng_ = kernels::testing::FreshRng();
  TestServer server_;
  std::unique_ptr<TestClient> client_ = server_.Connect();
};

TEST_F(DistillationTest, ComputesEachDivergenceFromSeveralCalls) {
  const Distillation all[] = {
      {.divergence = Divergence::kForwardKl, .temperature = 2.0f, .target_weight = 0.25f},
      {.divergence = Divergence::kReverseKl, .teacher_logit_scale = 0.5f},
      {.divergence = Divergence::kJensenShannon, .beta = 0.1f, .weight = 3.0f},
      {.divergence = Divergence::kTotalVariation, .teacher_softcap = 4.0f},
  };
  for (const Distillation& distillation : all) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      const TestServer server;
      const auto client = server.Connect();
      const Problem problem = kernels::testing::MakeProblem(Spec(distillation, dtype), rng_);
      SCOPED_TRACE(Describe(problem));
      CreateHeads(*client, problem);
      const SliceData& data = problem.slices.front();
      const v1::OpenMicrobatch open = OpenOf(problem);
      const std::vector<LossAnswers> calls = {Stream(*client, open, problem, data, 0, 50, rng_),
                                              Stream(*client, open, problem, data, 50, 90, rng_)};
      reference::ParamGradients gradients = reference::ZeroGradients(problem.config);
      const auto want = kernels::testing::ComputeReference(problem, &gradients);
      kernels::testing::ExpectSliceMatches(DType::kFloat32, problem, data, want.front(),
                                           Collect(problem, data, calls));
      ExpectGradients(*client, "student", problem.config, gradients, kernels::testing::MaxAbsLogit(want));
    }
  }
}

TEST_F(DistillationTest, ARepeatCountsOnceAndAnotherTeacherIsAnotherMicrobatch) {
  const Problem problem = Prepare();
  const SliceData& data = problem.slices.front();
  const v1::OpenMicrobatch open = OpenOf(problem);
  const LossAnswers first = Stream(*client_, open, problem, data, 0, 90, rng_);
  ASSERT_TRUE(first.status.ok()) << first.status;
  const LossAnswers again = Stream(*client_, open, problem, data, 0, 90, rng_);
  ASSERT_TRUE(again.status.ok()) << again.status;
  EXPECT_EQ(again.summary->accumulated_rows(), 0u);
  EXPECT_EQ(again.summary->repeated_rows(), first.summary->accumulated_rows());

  v1::OpenMicrobatch warmer = open;
  warmer.mutable_options()->mutable_distillation()->set_temperature(3.0f);
  v1::OpenMicrobatch without = open;
  without.mutable_options()->clear_distillation();
  for (const v1::OpenMicrobatch& other : {warmer, without}) {
    const LossAnswers refused = Stream(*client_, other, problem, data, 0, 90, rng_);
    EXPECT_EQ(refused.status.code(), absl::StatusCode::kFailedPrecondition) << refused.status;
  }
  // The same name, but another head.
  ASSERT_TRUE(client_->DeleteHead(kTeacherName).ok());
  CreateHead(*client_, kTeacherName, problem.teacher.front());
  const LossAnswers refused = Stream(*client_, open, problem, data, 0, 90, rng_);
  EXPECT_EQ(refused.status.code(), absl::StatusCode::kFailedPrecondition) << refused.status;
}

TEST_F(DistillationTest, RefusesWhatDoesNotFitAndBooksNothing) {
  const Problem problem = Prepare();
  Problem other_classes = problem;
  other_classes.teacher.front().config.vocab_size = kClasses - 1;
  other_classes.teacher.front().weight.resize(kTeacherHidden * (kClasses - 1));
  other_classes.teacher.front().bias.resize(kClasses - 1);
  CreateHead(*client_, "narrow", other_classes.teacher.front());
  Problem trainable = problem;
  trainable.teacher.front().config.trainable = true;
  CreateHead(*client_, "trainable", trainable.teacher.front());

  struct Case {
    std::function<void(v1::OpenMicrobatch&, v1::Distillation&)> change;
    absl::StatusCode code;
    std::string field;
  };
  using Code = absl::StatusCode;
  const std::string prefix = "open.options.distillation.";
  const Case cases[] = {
      {[](auto& open, auto& d) { d.set_teacher("nobody"); }, Code::kNotFound, prefix + "teacher"},
      {[](auto& open, auto& d) { d.set_teacher(""); }, Code::kInvalidArgument, prefix + "teacher"},
      {[](auto& open, auto& d) { d.set_teacher("student"); }, Code::kInvalidArgument, prefix + "teacher"},
      {[](auto& open, auto& d) { d.set_teacher("narrow"); }, Code::kInvalidArgument, prefix + "teacher"},
      {[](auto& open, auto& d) { d.set_teacher("trainable"); }, Code::kInvalidArgument, prefix + "teacher"},
      {[](auto& open, auto& d) { d.clear_divergence(); }, Code::kInvalidArgument, prefix + "divergence"},
      {[](auto& open, auto& d) { d.set_divergence(static_cast<v1::Divergence>(99)); }, Code::kInvalidArgument,
       prefix + "divergence"},
      {[](auto& open, auto& d) { d.set_beta(1.0f); }, Code::kInvalidArgument, prefix + "beta"},
      {[](auto& open, auto& d) { d.set_temperature(0.0f); }, Code::kInvalidArgument, prefix + "temperature"},
      {[](auto& open, auto& d) { d.set_weight(-1.0f); }, Code::kInvalidArgument, prefix + "weight"},
      {[](auto& open, auto& d) { d.set_target_weight(NAN); }, Code::kInvalidArgument,
       prefix + "target_weight"},
      {[](auto& open, auto& d) { d.set_teacher_logit_scale(0.0f); }, Code::kInvalidArgument,
       prefix + "teacher_logit_scale"},
      {[](auto& open, auto& d) { d.set_teacher_softcap(-1.0f); }, Code::kInvalidArgument,
       prefix + "teacher_softcap"},
      {[](auto& open, auto& d) { open.mutable_options()->set_gradients(v1::GRADIENTS_FILTERED); },
       Code::kInvalidArgument, "open.options.gradients"},
      {[](auto& open, auto& d) {
         open.set_reduction(v1::REDUCTION_NONE);
         open.set_want_grad_hidden(false);
         open.set_accumulate_gradients(false);
         open.set_retain(true);
       },
       Code::kUnimplemented, "open.retain"},
  };
  for (const Case& c : cases) {
    const absl::Status status = Call(problem, [&](v1::OpenMicrobatch& open) {
      c.change(open, *open.mutable_options()->mutable_distillation());
    });
    EXPECT_EQ(status.code(), c.code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.field));
    const auto detail = wire::GetErrorDetail(status);
    ASSERT_TRUE(detail.has_value()) << status;
    EXPECT_EQ(detail->field(), c.field) << status;
    ExpectNothingAccumulated();
  }
  EXPECT_TRUE(Call(problem, [](v1::OpenMicrobatch& open) {
                open.mutable_options()->set_gradients(v1::GRADIENTS_AUTO);
              }).ok());
}

TEST_F(DistillationTest, RefusesSlicesOfAnotherLength) {
  const Problem problem = Prepare();
  const std::string payload = PayloadOf(problem, problem.slices.front(), 0, 90);
  const auto student_alone = static_cast<size_t>(90 * kHidden) * sizeof(float);
  for (const size_t bytes : {student_alone, payload.size() - 4, size_t{0}}) {
    const auto stream = client_->OpenLoss();
    stream->SendOpen(OpenOf(problem));
    stream->SendSlice(0, 90, payload.substr(0, bytes));
    const absl::Status status = stream->Finish().status;
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("40 of the teacher"));
    ExpectNothingAccumulated();
  }
}

TEST_F(DistillationTest, ATeacherInUseIsNotDeletedAndAChangedOneEndsItsCalls) {
  const Problem problem = Prepare();
  const SliceData& data = problem.slices.front();
  const auto stream = client_->OpenLoss();
  stream->SendOpen(OpenOf(problem));
  ASSERT_TRUE(stream->ReadOne());
  const absl::Status in_use = client_->DeleteHead(kTeacherName);
  EXPECT_EQ(in_use.code(), absl::StatusCode::kFailedPrecondition) << in_use;
  EXPECT_THAT(std::string(in_use.message()), HasSubstr("is the teacher of 1 open ComputeLoss calls"));
  stream->SendSlice(0, 40, PayloadOf(problem, data, 0, 40));
  ASSERT_TRUE(stream->ReadOne());

  ASSERT_TRUE(client_->Write(kTeacherName, v1::PARAM_WEIGHT, problem.teacher.front().weight).ok());
  stream->SendSlice(40, 90, PayloadOf(problem, data, 40, 90));
  const absl::Status aborted = stream->Finish().status;
  EXPECT_EQ(aborted.code(), absl::StatusCode::kAborted) << aborted;
  EXPECT_THAT(std::string(aborted.message()), HasSubstr("teacher teacher"));

  // The head trains on, and the teacher may go.
  const LossAnswers again = Stream(*client_, OpenOf(problem), problem, data, 0, 90, rng_);
  EXPECT_TRUE(again.status.ok()) << again.status;
  EXPECT_TRUE(client_->DeleteHead(kTeacherName).ok());
  EXPECT_EQ(Stream(*client_, OpenOf(problem, 1), problem, data, 0, 90, rng_).status.code(),
            absl::StatusCode::kNotFound);
}

// Through the C++ client, in messages and in shared memory, whose regions hold a few slices only.
TEST_F(DistillationTest, TheClientSendsRowsOfBoth) {
  const Distillation distillation = {.divergence = Divergence::kReverseKl, .target_weight = 0.5f};
  const Problem problem = Prepare(distillation);
  const SliceData& data = problem.slices.front();
  uint64_t id = 0;
  for (const std::string transport : {"grpc", "shared_memory"}) {
    for (const uint64_t slice_bytes : {uint64_t{2000}, uint64_t{1} << 20}) {
      SCOPED_TRACE(transport);
      client::ClientOptions options;
      options.target = server_.target();
      options.transport = transport;
      options.shared_memory_bytes = 16 << 10;
      const auto client = client::Client::Connect(options);
      ASSERT_TRUE(client.ok()) << client.status();
      const v1::OpenMicrobatch open = OpenOf(problem);
      const std::vector<int32_t> targets(open.targets().begin(), open.targets().end());
      client::Microbatch microbatch{.head = "student",
                                    .step = 0,
                                    .id = id++,
                                    .hidden_size = kHidden,
                                    .hidden_dtype = v1::DTYPE_FP32,
                                    .hidden = data.hidden.data(),
                                    .targets = targets,
                                    .teacher_hidden = data.teacher_hidden.data(),
                                    .teacher_hidden_size = kTeacherHidden};
      client::ComputeOptions compute;
      compute.loss = open.options();
      compute.reduction = v1::REDUCTION_SUM;
      compute.slice_bytes = slice_bytes;
      kernels::testing::SliceOutputs got;
      got.grad_hidden.resize(90 * kHidden);
      got.loss.resize(90);
      ASSERT_TRUE(
          (*client)
              ->ComputeLoss(microbatch,
                            {.grad_hidden = got.grad_hidden.data(), .row_loss = absl::MakeSpan(got.loss)},
                            compute)
              .ok());
      EXPECT_EQ((*client)->transport().transport, transport);
      const auto want = kernels::testing::ComputeReference(problem, nullptr);
      for (size_t row = 0; row < 90; ++row) {
        ASSERT_NEAR(got.loss[row], want.front().loss[row], 1e-3) << row;
      }
      for (size_t i = 0; i < got.grad_hidden.size(); ++i) {
        ASSERT_NEAR(got.grad_hidden[i], want.front().grad_hidden.value[i], 1e-3) << i;
      }
      microbatch.teacher_hidden_size = 0;
      const auto refused = (*client)->ComputeLoss(microbatch, {}, compute);
      EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(refused.status().message()), HasSubstr("teacher_hidden_size"));
    }
  }
}

// As a call says, or as the head was created.
TEST_F(DistillationTest, SampledGradientsSayTheirError) {
  Problem problem = Prepare();
  const SliceData& data = problem.slices.front();
  v1::OpenMicrobatch open = OpenOf(problem);
  open.mutable_options()->set_gradients(v1::GRADIENTS_SAMPLED);
  open.mutable_options()->set_sample_threshold(0.05f);
  const LossAnswers sampled = Stream(*client_, open, problem, data, 0, 90, rng_);
  ASSERT_TRUE(sampled.status.ok()) << sampled.status;
  EXPECT_GT(sampled.summary->sampling_variance(), 0.0);
  EXPECT_GT(sampled.summary->squared_gradient(), 0.0);
  EXPECT_NEAR(sampled.summary->divergence_sum(), sampled.summary->loss_sum(),
              1e-5 * sampled.summary->loss_sum());
  EXPECT_EQ(sampled.summary->target_loss_sum(), 0.0);

  for (const auto& [gradients, is_sampled] :
       {std::pair{kernels::Gradients::kSampled, true}, {kernels::Gradients::kFiltered, false}}) {
    problem.config.gradients = gradients;
    const std::string head = absl::StrCat("created_", kernels::Name(gradients));
    CreateHead(*client_, head, problem);
    v1::OpenMicrobatch by_head = OpenFor(head, problem, data, 0);
    by_head.mutable_options()->clear_gradients();
    by_head.mutable_options()->set_sample_threshold(0.05f);
    const LossAnswers answers = Stream(*client_, by_head, problem, data, 0, 90, rng_);
    ASSERT_TRUE(answers.status.ok()) << answers.status;
    EXPECT_EQ(answers.summary->sampling_variance() > 0.0, is_sampled);
    EXPECT_EQ(answers.summary->dropped_mass(), 0.0);
  }
}

// Students share a teacher, and a frozen student may teach.
TEST_F(DistillationTest, OneTeacherOfSeveralStudentsAtOnce) {
  const Problem problem = Prepare();
  const SliceData& data = problem.slices.front();
  CreateHead(*client_, "other", problem);
  std::vector<std::unique_ptr<LossStream>> streams;
  for (const std::string head : {"student", "other", "student"}) {
    streams.push_back(client_->OpenLoss());
    streams.back()->SendOpen(OpenFor(head, problem, data, streams.size()));
    streams.back()->SendSlice(0, 90, PayloadOf(problem, data, 0, 90));
  }
  std::vector<double> losses;
  for (const auto& stream : streams) {
    const LossAnswers answers = stream->Finish();
    ASSERT_TRUE(answers.status.ok()) << answers.status;
    losses.push_back(answers.summary->loss_sum());
  }
  EXPECT_NEAR(losses[1], losses[0], 1e-4 * losses[0]);
  EXPECT_NEAR(losses[2], losses[0], 1e-4 * losses[0]);
  EXPECT_TRUE(client_->DeleteHead(kTeacherName).ok());
}

// Over three devices, alike, and in ways that do not fit.
TEST(VocabularyDistillationTest, TheTeacherIsDividedAsTheStudentIs) {
  ServerOptions options = SmallServer();
  options.cpu_devices = 3;
  const TestServer server(options);
  const auto client = server.Connect();
  Rng rng = kernels::testing::FreshRng();
  ProblemSpec spec;
  spec.config.hidden_size = 24;
  spec.config.vocab_size = 61;
  spec.config.split = kernels::Split::kVocabulary;
  spec.config.shares = {3, 0, 2};
  spec.slice_rows = {40};
  spec.class_parts = 3;
  ProblemSpec teacher = spec;
  teacher.config.hidden_size = 40;
  teacher.config.trainable = false;
  spec.options.distillation = {.divergence = Divergence::kJensenShannon, .target_weight = 0.5f};
  spec.teacher.push_back(teacher);
  const Problem problem = kernels::testing::MakeProblem(spec, rng);
  CreateHead(*client, "student", problem);
  CreateHead(*client, kTeacherName, problem.teacher.front());
  const SliceData& data = problem.slices.front();
  const v1::OpenMicrobatch open = OpenFor("student", problem, data, 0);
  const std::vector<LossAnswers> calls = {Stream(*client, open, problem, data, 0, 40, rng)};
  reference::ParamGradients gradients = reference::ZeroGradients(problem.config);
  const auto want = kernels::testing::ComputeReference(problem, &gradients);
  kernels::testing::ExpectSliceMatches(DType::kFloat32, problem, data, want.front(),
                                       Collect(problem, data, calls));
  ExpectGradients(*client, "student", problem.config, gradients, kernels::testing::MaxAbsLogit(want));

  Problem by_rows = problem;
  by_rows.teacher.front().config.split = kernels::Split::kAny;
  by_rows.teacher.front().config.shares.clear();
  Problem other_shares = problem;
  other_shares.teacher.front().config.shares = {1, 1, 1};
  uint64_t id = 1;
  for (const Problem& other : {by_rows, other_shares}) {
    ASSERT_TRUE(client->DeleteHead(kTeacherName).ok());
    CreateHead(*client, kTeacherName, other.teacher.front());
    const auto before = client->DescribeHead("student");
    const LossAnswers refused =
        Stream(*client, OpenFor("student", problem, data, id++), problem, data, 0, 40, rng);
    EXPECT_EQ(refused.status.code(), absl::StatusCode::kUnimplemented) << refused.status;
    EXPECT_THAT(std::string(refused.status.message()), HasSubstr("open.options.distillation.teacher"));
    EXPECT_EQ(client->DescribeHead("student")->step_rows(), before->step_rows());
  }
  // As the student again.
  v1::SetSharesRequest request;
  request.set_head(kTeacherName);
  request.set_change_id("as the student");
  for (const uint32_t share : {3u, 0u, 2u}) request.add_shares(share);
  const absl::Status changed = client->SetShares(request);
  ASSERT_TRUE(changed.ok()) << changed;
  const LossAnswers taken = Stream(*client, OpenFor("student", problem, data, id), problem, data, 0, 40, rng);
  EXPECT_TRUE(taken.status.ok()) << taken.status;
}

TEST(DeterministicDistillationTest, IsRefusedByNameWhereRowsAccumulate) {
  ServerOptions options = SmallServer();
  options.deterministic = true;
  const TestServer server(options);
  const auto client = server.Connect();
  Rng rng = kernels::testing::FreshRng();
  ProblemSpec spec;
  spec.config.hidden_size = 8;
  spec.config.vocab_size = 16;
  spec.slice_rows = {5};
  ProblemSpec teacher = spec;
  teacher.config.trainable = false;
  spec.options.distillation.divergence = Divergence::kForwardKl;
  spec.teacher.push_back(teacher);
  const Problem problem = kernels::testing::MakeProblem(spec, rng);
  CreateHead(*client, "student", problem);
  CreateHead(*client, kTeacherName, problem.teacher.front());
  const SliceData& data = problem.slices.front();
  v1::OpenMicrobatch open = OpenFor("student", problem, data, 0);
  const LossAnswers refused = Stream(*client, open, problem, data, 0, 5, rng);
  EXPECT_EQ(refused.status.code(), absl::StatusCode::kUnimplemented) << refused.status;
  EXPECT_THAT(std::string(refused.status.message()), HasSubstr("open.options.distillation"));
  open.set_accumulate_gradients(false);
  const LossAnswers computed = Stream(*client, open, problem, data, 0, 5, rng);
  EXPECT_TRUE(computed.status.ok()) << computed.status;
}

}  // namespace
}  // namespace lossd::app::testing::distillation_test
