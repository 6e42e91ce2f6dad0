// SPDX-License-Identifier: Apache-2.0
// Tests of gradients through the service: from outside, computed, the calls that bring them, sampled, and of
// a deterministic server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/client.h"
#include "kernels/clocks/clock.h"
#include "proto/wire/status_details.h"
#include "server/engine/schedule.h"
#include "tests/kernels/comparison.h"
#include "tests/kernels/problem.h"
#include "tests/server/service/service_client.h"
#include "tests/server/service/service_fixture.h"
#include "tests/server/service/service_problem.h"
#include "tests/server/service/small_training.h"

namespace lossd::app::testing::gradients_test {
namespace {

namespace reference = kernels::reference;
using kernels::DType;
using kernels::testing::Problem;
using kernels::testing::ProblemSpec;
using kernels::testing::Rng;
using kernels::testing::SliceData;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// ---- Gradients from outside ----
// Gradients from outside (tied embeddings) and skipped steps through the service.

constexpr uint64_t kHidden = 11;
constexpr uint64_t kClasses = 29;

class AddGradientTest : public ::testing::Test {
 protected:
  AddGradientTest() : AddGradientTest(SmallServer()) {}
  explicit AddGradientTest(const ServerOptions& options) : server_(options) {}

  void SetUp() override {
    v1::CreateHeadRequest request;
    request.mutable_spec()->set_name("head");
    request.mutable_spec()->set_hidden_size(kHidden);
    request.mutable_spec()->set_vocab_size(kClasses);
    request.mutable_spec()->set_bias(true);
    const auto head = client_->CreateHead(request);
    ASSERT_TRUE(head.ok()) << head.status();
    for (float& value : values_) value = kernels::testing::Uniform(rng_, -1.0f, 1.0f);
  }

  static v1::OpenGradient Open(uint64_t id, uint64_t step = 0) {
    v1::OpenGradient open;
    open.set_head("head");
    open.set_step(step);
    open.set_contribution_id(id);
    open.set_param(v1::PARAM_WEIGHT);
    return open;
  }
  std::vector<float> Gradient() {
    return client_->Read("head", v1::PARAM_WEIGHT, v1::ROLE_GRADIENT).value_or(std::vector<float>());
  }
  absl::StatusOr<v1::ApplyStepResponse> Apply(uint64_t step, bool skip, std::vector<uint64_t> expected = {}) {
    v1::ApplyStepRequest request;
    request.set_head("head");
    request.set_step(step);
    request.mutable_optimizer()->mutable_adamw()->set_learning_rate(0.01);
    request.set_skip_non_finite(skip);
    request.mutable_expected_microbatches()->Add(expected.begin(), expected.end());
    return client_->ApplyStep(request);
  }
  // Makes the gradient overflow: each value is finite, their sum is not.
  void Overflow(uint64_t step) {
    const std::vector<float> huge(kHidden, 3e38f);
    for (uint64_t id : {100, 101}) {
      v1::OpenGradient open = Open(id, step);
      open.mutable_contribution_rows()->set_end(1);
      const auto added = client_->AddGradient(open, Bytes(huge));
      ASSERT_TRUE(added.ok()) << added.status();
    }
  }

  TestServer server_;
  std::unique_ptr<TestClient> client_ = server_.Connect();
  kernels::testing::Rng rng_ = kernels::testing::FreshRng();
  std::vector<float> values_ = std::vector<float>(kClasses * kHidden);
};

TEST_F(AddGradientTest, AddsAndReadsBackInSlicesOfEveryType) {
  std::vector<float> want(values_.size());
  uint64_t id = 0;
  for (const auto& [dtype, wire] : {std::pair(DType::kFloat32, v1::DTYPE_FP32),
                                    {DType::kFloat16, v1::DTYPE_FP16},
                                    {DType::kBFloat16, v1::DTYPE_BF16}}) {
    v1::OpenGradient open = Open(id++);
    open.set_dtype(wire);
    open.set_scale(-0.25f);
    const std::vector<uint8_t> bytes = kernels::testing::Encode(dtype, values_);
    const size_t row_bytes = kHidden * kernels::SizeOf(dtype);
    const auto added = client_->AddGradient(open, std::string(bytes.begin(), bytes.end()), 3 * row_bytes);
    ASSERT_TRUE(added.ok()) << added.status();
    EXPECT_EQ(added->added_rows(), kClasses);
    EXPECT_EQ(added->repeated_rows(), 0u);
    EXPECT_EQ(added->rows().end(), kClasses);
    const std::vector<float> sent = kernels::testing::Decode(dtype, bytes);
    for (size_t i = 0; i < want.size(); ++i) want[i] += -0.25f * sent[i];
  }
  EXPECT_EQ(Gradient(), want);
  v1::ReadTensorRequest read;
  read.set_head("head");
  read.set_param(v1::PARAM_WEIGHT);
  read.set_role(v1::ROLE_GRADIENT);
  read.set_dtype(v1::DTYPE_BF16);
  read.mutable_rows()->set_begin(3);
  read.mutable_rows()->set_end(20);
  const auto got = client_->ReadTensor(read);
  ASSERT_TRUE(got.ok()) << got.status();
  const auto rows = absl::MakeConstSpan(want).subspan(3 * kHidden, 17 * kHidden);
  const std::vector<uint8_t> encoded = kernels::testing::Encode(DType::kBFloat16, rows);
  EXPECT_EQ(*got, std::string(encoded.begin(), encoded.end()));
}

TEST_F(AddGradientTest, ResentRowsAreAcknowledgedAndNotAdded) {
  v1::OpenGradient part = Open(7);
  part.mutable_rows()->set_end(10);
  const std::string payload = Bytes(values_);
  const size_t row_bytes = kHidden * sizeof(float);
  ASSERT_TRUE(client_->AddGradient(part, payload.substr(0, 10 * row_bytes), 4 * row_bytes).ok());
  const auto incomplete = Apply(0, false, {7});
  EXPECT_EQ(incomplete.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(wire::GetErrorDetail(incomplete.status())->missing(),
              ElementsAre("contribution 7: rows [10, 29) of [0, 29)"));
  const auto whole = client_->AddGradient(Open(7), payload, 5 * row_bytes);
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ(whole->added_rows(), 19u);
  EXPECT_EQ(whole->repeated_rows(), 10u);
  EXPECT_EQ(Gradient(), values_);
  EXPECT_EQ(client_->DescribeHead("head")->step_contributions(), 1u);

  std::string changed = payload;
  changed[2 * row_bytes] = static_cast<char>(changed[2 * row_bytes] ^ 1);
  const absl::Status other = client_->AddGradient(Open(7), changed).status();
  EXPECT_EQ(other.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(wire::GetErrorDetail(other)->field(), "payload row 2");
  EXPECT_EQ(Gradient(), values_);

  const auto applied = Apply(0, false, {7});
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_EQ(applied->contributions(), 1u);
  const absl::Status closed = client_->AddGradient(Open(7), payload).status();
  EXPECT_EQ(closed.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(wire::GetErrorDetail(closed)->current_step(), 1u);
}

TEST_F(AddGradientTest, BadCallsNameFieldAndValue) {
  const auto field_of = [&](const v1::OpenGradient& open, absl::string_view payload) {
    const absl::Status status = client_->AddGradient(open, payload).status();
    EXPECT_FALSE(status.ok());
    const auto detail = wire::GetErrorDetail(status);
    return detail.has_value() ? detail->field() : absl::StrCat("no detail: ", status.message());
  };
  const std::string payload = Bytes(values_);
  v1::OpenGradient open = Open(1);
  open.set_head("missing");
  EXPECT_EQ(field_of(open, payload), "open.head");
  open = Open(1);
  open.set_param(v1::PARAM_NORM_GAIN);
  EXPECT_EQ(field_of(open, payload), "open.param");
  open.set_param(v1::PARAM_UNSPECIFIED);
  EXPECT_EQ(field_of(open, payload), "open.param");
  open = Open(1);
  open.set_dtype(static_cast<v1::DType>(77));
  EXPECT_EQ(field_of(open, payload), "open.dtype");
  open = Open(1);
  open.set_scale(std::numeric_limits<float>::quiet_NaN());
  EXPECT_EQ(field_of(open, payload), "open.scale");
  open = Open(1);
  open.mutable_rows()->set_begin(5);
  open.mutable_rows()->set_end(30);
  EXPECT_EQ(field_of(open, payload), "open.rows");
  EXPECT_EQ(field_of(Open(1), payload.substr(0, payload.size() - 4)), "payload");
  EXPECT_EQ(field_of(Open(1), payload + payload), "payload");
  std::vector<float> bad = values_;
  bad[4 * kHidden + 6] = std::numeric_limits<float>::infinity();
  EXPECT_EQ(field_of(Open(1), Bytes(bad)), "payload row 4 column 6");
  EXPECT_THAT(Gradient(), Each(0.0f));
}

TEST_F(AddGradientTest, StepsWithANonFiniteNormAreRefusedOrSkipped) {
  const auto before = client_->Read("head", v1::PARAM_WEIGHT, v1::ROLE_VALUE);
  ASSERT_NO_FATAL_FAILURE(Overflow(0));
  const absl::Status refused = Apply(0, false).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("skip_non_finite must be set"));
  EXPECT_EQ(client_->DescribeHead("head")->state().step(), 0u);
  EXPECT_FALSE(std::isfinite(*client_->GradNorm("head"))) << "the gradients are still there";

  for (const bool repeat : {false, true}) {
    const auto skipped = Apply(0, true, {100, 101});
    ASSERT_TRUE(skipped.ok()) << skipped.status();
    EXPECT_TRUE(skipped->skipped());
    EXPECT_EQ(skipped->repeated_call(), repeat);
    EXPECT_FALSE(std::isfinite(skipped->grad_norm()));
    EXPECT_EQ(skipped->state().step(), 1u);
  }
  EXPECT_EQ(*client_->GradNorm("head"), 0.0);
  EXPECT_EQ(*client_->Read("head", v1::PARAM_WEIGHT, v1::ROLE_VALUE), *before);
  EXPECT_EQ(client_->DescribeHead("head")->updates(), 0u);
}

// The count of updates, and so AdamW's bias correction, is that of steps that updated something, also in a
// head restored from a checkpoint.
TEST_F(AddGradientTest, SkippedStepsDoNotCountInTheBiasCorrection) {
  const auto train = [&](uint64_t step) {
    EXPECT_TRUE(client_->AddGradient(Open(0, step), Bytes(values_)).ok());
    const auto applied = Apply(step, true);
    EXPECT_TRUE(applied.ok() && !applied->skipped());
  };
  train(0);
  const auto start = client_->SaveCheckpoint("head", "start");
  ASSERT_TRUE(start.ok()) << start.status();
  train(1);
  const auto want = client_->Read("head", v1::PARAM_WEIGHT, v1::ROLE_VALUE);

  ASSERT_TRUE(client_->LoadCheckpoint(start->checkpoint(), "").ok());
  ASSERT_NO_FATAL_FAILURE(Overflow(1));
  ASSERT_TRUE(Apply(1, true).ok());
  const auto skipped = client_->SaveCheckpoint("head", "skipped");
  ASSERT_TRUE(skipped.ok()) << skipped.status();
  train(2);
  EXPECT_EQ(*client_->Read("head", v1::PARAM_WEIGHT, v1::ROLE_VALUE), *want);
  EXPECT_EQ(client_->DescribeHead("head")->updates(), 2u);
  for (const std::string name : {"head", "copy"}) {  // into the head that is there, and as a new one
    const auto loaded = client_->LoadCheckpoint(skipped->checkpoint(), name);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(loaded->state().step(), 2u);
    EXPECT_EQ(loaded->updates(), 1u);
  }
  train(2);
  EXPECT_EQ(*client_->Read("head", v1::PARAM_WEIGHT, v1::ROLE_VALUE), *want);
}

ServerOptions DeterministicServer() {
  ServerOptions options = SmallServer();
  options.deterministic = true;
  return options;
}

ServerOptions WithOneTensorCall() {
  ServerOptions options = SmallServer();
  options.max_tensor_calls = 1;
  options.peer_share = 1.0;
  return options;
}

// Who has the answer of a call may make the next one, however busy the server is.
TEST(TensorCallsTest, ACallCountsUntilItIsAnswered) {
  const TestServer server(WithOneTensorCall());
  client::ClientOptions options;
  options.target = server.target();
  options.transport = "grpc";
  const auto client = client::Client::Connect(options);
  ASSERT_TRUE(client.ok()) << client.status();
  v1::CreateHeadRequest request;
  request.mutable_spec()->set_name("lm");
  request.mutable_spec()->set_hidden_size(4);
  request.mutable_spec()->set_vocab_size(4);
  ASSERT_TRUE((*client)->CreateHead(request).ok());
  const std::vector<float> values(16, 0.5f);
  v1::OpenGradient open;
  open.set_head("lm");
  open.set_step(0);
  open.set_param(v1::PARAM_WEIGHT);
  open.mutable_rows()->set_end(4);
  open.set_dtype(v1::DTYPE_FP32);
  const absl::Span<const char> bytes(reinterpret_cast<const char*>(values.data()),
                                     sizeof(float) * values.size());
  // Threads that keep the server's own from running in time.
  std::atomic<bool> ends{false};
  std::vector<std::thread> busy;
  for (unsigned i = 0; i < 2 * std::max(std::thread::hardware_concurrency(), 1u); ++i) {
    busy.emplace_back([&ends] {
      while (!ends) {
      }
    });
  }
  const absl::Cleanup joins = [&] {
    ends = true;
    for (std::thread& thread : busy) thread.join();
  };
  for (int i = 0; i < 400; ++i) {
    const absl::Status written = (*client)->WriteTensor("lm", v1::PARAM_WEIGHT, values).status();
    ASSERT_TRUE(written.ok()) << i << ": " << written;
    const absl::Status read = (*client)->ReadTensor("lm", v1::PARAM_WEIGHT).status();
    ASSERT_TRUE(read.ok()) << i << ": " << read;
    open.set_contribution_id(static_cast<uint64_t>(i));
    const absl::Status added = (*client)->AddGradient(open, bytes).status();
    ASSERT_TRUE(added.ok()) << i << ": " << added;
  }
}

class OrderedAddGradientTest : public AddGradientTest {
 protected:
  OrderedAddGradientTest() : AddGradientTest(DeterministicServer()) {}
};

// More calls wait than the service has workers, and the one they wait for comes last.
TEST_F(OrderedAddGradientTest, WaitingContributionsHoldNoWorker) {
  constexpr uint64_t kCalls = 20;
  std::vector<std::thread> calls;
  for (uint64_t id = 1; id < kCalls; ++id) {
    calls.emplace_back([this, id] {
      const auto added = client_->AddGradient(Open(id), Bytes(values_));
      EXPECT_TRUE(added.ok()) << added.status();
    });
  }
  while (server_.server().stats().waiting_slices < static_cast<int64_t>(kCalls) - 1)
    absl::SleepFor(absl::Milliseconds(2));
  EXPECT_EQ(client_->DescribeHead("head")->step_contributions(), 0u);
  EXPECT_THAT(Gradient(), Each(0.0f));
  ASSERT_TRUE(client_->AddGradient(Open(0), Bytes(values_)).ok());
  for (std::thread& call : calls) call.join();
  std::vector<float> want(values_.size());
  for (uint64_t id = 0; id < kCalls; ++id) {
    for (size_t i = 0; i < want.size(); ++i) want[i] += values_[i];
  }
  EXPECT_EQ(Gradient(), want);
}

TEST_F(OrderedAddGradientTest, AWaitingContributionEndsWithItsCall) {
  const absl::Status late =
      client_->AddGradient(Open(1), Bytes(values_), size_t{1} << 20, absl::Milliseconds(100)).status();
  EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded) << late;
  while (server_.server().stats().waiting_slices > 0) absl::SleepFor(absl::Milliseconds(2));
  std::thread zeroed([this] {
    const absl::Status status = client_->AddGradient(Open(2), Bytes(values_)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  });
  while (server_.server().stats().waiting_slices < 1) absl::SleepFor(absl::Milliseconds(2));
  ASSERT_TRUE(client_->ZeroGradients("head", 0).ok());
  zeroed.join();
  ASSERT_TRUE(client_->AddGradient(Open(0), Bytes(values_)).ok());
  ASSERT_TRUE(client_->AddGradient(Open(1), Bytes(values_)).ok());
}

// ---- Computed gradients ----
// Losses and gradients that come back through the service, against the double-precision reference.

// Sends each slice of `problem` as a microbatch, on one to three calls over several connections at once, and
// compares everything.
void RunAndCompare(const Problem& problem, Rng& rng) {
  TestServer server;
  std::vector<std::unique_ptr<TestClient>> clients;
  for (int i = 0; i < 2; ++i) clients.push_back(server.Connect());
  ASSERT_NO_FATAL_FAILURE(CreateHead(*clients[0], "head", problem));

  std::vector<std::vector<LossAnswers>> answers(problem.slices.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < problem.slices.size(); ++i) {
    const SliceData& data = problem.slices[i];
    const int64_t middle = kernels::testing::UniformInt(rng, 0, data.rows());
    std::vector<std::pair<int64_t, int64_t>> ranges = {{0, middle}};
    if (middle < data.rows()) ranges.emplace_back(middle, data.rows());
    answers[i].resize(ranges.size());
    for (size_t j = 0; j < ranges.size(); ++j) {
      threads.emplace_back([&, i, j, range = ranges[j], seed = rng()] {
        answers[i][j] = Stream(*clients[(i + j) % clients.size()], OpenFor("head", problem, data, i), problem,
                               data, range.first, range.second, Rng(seed));
      });
    }
  }
  for (std::thread& thread : threads) thread.join();

  reference::ParamGradients gradients = reference::ZeroGradients(problem.config);
  const std::vector<reference::Result> want = kernels::testing::ComputeReference(problem, &gradients);
  for (size_t i = 0; i < problem.slices.size(); ++i) {
    SCOPED_TRACE(absl::StrCat("microbatch ", i));
    kernels::testing::ExpectSliceMatches(DType::kFloat32, problem, problem.slices[i], want[i],
                                         Collect(problem, problem.slices[i], answers[i]));
  }
  ExpectGradients(*clients[0], "head", problem.config, gradients, kernels::testing::MaxAbsLogit(want));
}

ProblemSpec SpecFor(std::vector<int64_t> rows, int64_t hidden_size, int64_t vocab_size, DType dtype) {
  ProblemSpec spec;
  spec.config.hidden_size = hidden_size;
  spec.config.vocab_size = vocab_size;
  spec.config.has_bias = true;
  spec.hidden_dtype = dtype;
  spec.slice_rows = std::move(rows);
  spec.row_weights = true;
  spec.grad_scale = 0.25f;
  return spec;
}

class GradientsTest : public ::testing::TestWithParam<DType> {
 protected:
  Rng rng_ = kernels::testing::FreshRng();
};

std::string DTypeName(const ::testing::TestParamInfo<DType>& info) {
  return std::string(kernels::Name(info.param));
}

INSTANTIATE_TEST_SUITE_P(HiddenDtypes, GradientsTest,
                         ::testing::Values(DType::kFloat32, DType::kFloat16, DType::kBFloat16), DTypeName);

TEST_P(GradientsTest, SeveralMicrobatchesOnMixedStreams) {
  ProblemSpec spec = SpecFor({37, 1, 64, 5}, 33, 211, GetParam());
  RunAndCompare(kernels::testing::MakeProblem(spec, rng_), rng_);
}

// Slices of one chunk want different numbers of classes.
TEST_P(GradientsTest, SingleClasses) {
  ProblemSpec spec = SpecFor({37, 1, 64, 5, 20}, 33, 211, GetParam());
  Problem problem = kernels::testing::MakeProblem(spec, rng_);
  for (size_t i = 0; i < problem.slices.size(); ++i) {
    spec.class_count = static_cast<int32_t>(3 * i);
    spec.shared_classes = i == 2;
    spec.top_k = i == 1 ? 0 : static_cast<int32_t>(1 + 31 * i);
    const int64_t rows = problem.slices[i].rows();
    problem.slices[i] = kernels::testing::MakeSlice(spec, rows, rng_);
  }
  RunAndCompare(problem, rng_);
}

// Slices of one chunk have different numbers of soft targets; they are different microbatches.
TEST_P(GradientsTest, SoftTargets) {
  for (const kernels::Rest rest :
       {kernels::Rest::kNone, kernels::Rest::kRenormalized, kernels::Rest::kOneClass}) {
    ProblemSpec spec = SpecFor({37, 1, 64}, 33, 211, GetParam());
    spec.options.rest = rest;
    Problem problem = kernels::testing::MakeProblem(spec, rng_);
    for (SliceData& slice : problem.slices) {
      spec.target_count = static_cast<int32_t>(kernels::testing::UniformInt(rng_, 1, 60));
      slice = kernels::testing::MakeSlice(spec, slice.rows(), rng_);
    }
    RunAndCompare(problem, rng_);
  }
}

TEST_P(GradientsTest, EveryOptionAtOnce) {
  ProblemSpec spec = SpecFor({23, 41}, 31, 123, GetParam());
  spec.config.norm = kernels::Norm::kLayerNorm;
  spec.config.has_class_weights = true;
  spec.options = {.logit_scale = 0.8f,
                  .softcap = 30.0f,
                  .label_smoothing = 0.1f,
                  .z_loss = 1e-4f,
                  .use_class_weights = true};
  RunAndCompare(kernels::testing::MakeProblem(spec, rng_), rng_);
}

TEST_P(GradientsTest, Filtered) {
  ProblemSpec spec = SpecFor({23, 41}, 31, 123, GetParam());
  spec.options = {.gradients = kernels::Gradients::kFiltered, .filter_epsilon = 0.02f};
  RunAndCompare(kernels::testing::MakeProblem(spec, rng_), rng_);
}

// Each slice is microbatch i of step 0 of head "head", with random numbers of its own.
TEST_P(GradientsTest, Sampled) {
  ProblemSpec spec = SpecFor({23, 41}, 31, 123, GetParam());
  spec.options = {.gradients = kernels::Gradients::kSampled, .sample_threshold = 0.05f};
  Problem problem = kernels::testing::MakeProblem(spec, rng_);
  for (size_t i = 0; i < problem.slices.size(); ++i) {
    problem.slices[i].sample_seed = engine::SampleSeed("head", 0, i);
    problem.slices[i].first_row = 0;
  }
  RunAndCompare(problem, rng_);
}

// Numbers of rows travel, and are cut, with their rows.
TEST_P(GradientsTest, Objectives) {
  const kernels::Objective objectives[] = {
      {.kind = kernels::ObjectiveKind::kPpo,
       .clip_low = 0.2f,
       .clip_high = 0.3f,
       .dual_clip = 3.0f,
       .kl_coef = 0.1f},
      {.kind = kernels::ObjectiveKind::kCispo, .clip_low = 1.0f, .clip_high = 0.5f, .entropy_bonus = 0.05f},
      {.kind = kernels::ObjectiveKind::kDft}};
  for (const kernels::Objective& objective : objectives) {
    RunAndCompare(
        kernels::testing::WithObjective(
            kernels::testing::MakeProblem(SpecFor({23, 41}, 31, 123, GetParam()), rng_), objective, rng_),
        rng_);
  }
}

TEST_P(GradientsTest, SmallestShapes) {
  RunAndCompare(kernels::testing::MakeProblem(SpecFor({1}, 1, 1, GetParam()), rng_), rng_);
  RunAndCompare(kernels::testing::MakeProblem(SpecFor({1, 1}, 3, 7, GetParam()), rng_), rng_);
}

TEST_P(GradientsTest, AllRowsIgnored) {
  ProblemSpec spec = SpecFor({19}, 17, 29, GetParam());
  spec.ignored = 1.0;
  RunAndCompare(kernels::testing::MakeProblem(spec, rng_), rng_);
}

TEST_P(GradientsTest, AllLogitsNearMinusTwenty) {
  ProblemSpec spec = SpecFor({9, 30}, 15, 77, GetParam());
  spec.logit_deviation = 0.05f;
  Problem problem = kernels::testing::MakeProblem(spec, rng_);
  for (float& bias : problem.bias) bias = -20.0f + kernels::testing::Uniform(rng_, -0.01f, 0.01f);
  RunAndCompare(problem, rng_);
}

// A bias of -infinity; the entropies of all rows are wanted.
TEST_P(GradientsTest, MaskedClasses) {
  Problem problem = kernels::testing::MakeProblem(SpecFor({37, 20}, 33, 101, GetParam()), rng_);
  std::fill_n(problem.bias.begin() + 40, 10, -std::numeric_limits<float>::infinity());
  for (SliceData& slice : problem.slices) {
    for (int32_t& target : slice.targets) target = target >= 40 && target < 50 ? 39 : target;
  }
  RunAndCompare(problem, rng_);
}

// Rows of weight 0 with NaN in their hidden states: the sums and gradients of the others.
TEST_P(GradientsTest, AbsentRows) {
  Problem problem = kernels::testing::MakeProblem(SpecFor({30}, 33, 101, GetParam()), rng_);
  SliceData& data = problem.slices[0];
  for (size_t row = 0; row < 30; row += 3) data.row_weights[row] = 0.0f;
  SliceData poisoned = data;
  for (size_t row = 0; row < 30; row += 3) std::fill_n(poisoned.hidden.begin() + row * 33, 33, NAN);
  TestServer server;
  const auto client = server.Connect();
  ASSERT_NO_FATAL_FAILURE(CreateHead(*client, "head", problem));
  const LossAnswers answers =
      Stream(*client, OpenFor("head", problem, data, 0), problem, poisoned, 0, 30, rng_);
  ASSERT_TRUE(answers.status.ok()) << answers.status;
  reference::ParamGradients gradients = reference::ZeroGradients(problem.config);
  const std::vector<reference::Result> want = kernels::testing::ComputeReference(problem, &gradients);
  ExpectGradients(*client, "head", problem.config, gradients, kernels::testing::MaxAbsLogit(want));
  EXPECT_NEAR(answers.summary->loss_sum(), want[0].sums.loss, 1e-3);
  EXPECT_EQ(answers.summary->valid_rows(), static_cast<uint64_t>(want[0].sums.valid_rows));
  const kernels::testing::SliceOutputs out = Collect(problem, data, {answers});
  for (size_t row = 0; row < 30; row += 3) {
    if (data.targets[row] == kernels::kIgnoredTarget) continue;
    EXPECT_EQ(out.loss[row], 0.0f);
    EXPECT_TRUE(std::isnan(out.lse[row]));
    EXPECT_EQ(out.argmax[row], -1);
    for (size_t i = 0; i < 33; ++i) EXPECT_EQ(out.grad_hidden[row * 33 + i], 0.0f);
  }
}

// One row whose target has probability 0.9999: p - 1 must not be lost to rounding.
TEST_P(GradientsTest, NearlyCertainRow) {
  constexpr int64_t kWidth = 9;
  constexpr int64_t kFewClasses = 11;
  ProblemSpec spec = SpecFor({1}, kWidth, kFewClasses, GetParam());
  spec.row_weights = false;
  spec.grad_scale = 1.0f;
  spec.ignored = 0.0;
  Problem problem = kernels::testing::MakeProblem(spec, rng_);
  SliceData& row = problem.slices[0];
  std::fill(row.hidden.begin(), row.hidden.end(), 0.0f);
  row.hidden[0] = 1.0f;
  for (int64_t v = 0; v < kFewClasses; ++v) problem.weight[static_cast<size_t>(v * kWidth)] = 0.0f;
  std::fill(problem.bias.begin(), problem.bias.end(), 0.0f);
  const auto target = static_cast<size_t>(row.targets[0]);
  problem.bias[target] = static_cast<float>(std::log(0.9999 / (0.0001 / (kFewClasses - 1))));

  TestServer server;
  const auto client = server.Connect();
  ASSERT_NO_FATAL_FAILURE(CreateHead(*client, "head", problem));
  const LossAnswers answers = Stream(*client, OpenFor("head", problem, row, 1), problem, row, 0, 1, rng_);
  ASSERT_TRUE(answers.status.ok()) << answers.status;
  const auto bias_gradient = client->Read("head", v1::PARAM_BIAS, v1::ROLE_GRADIENT);
  ASSERT_TRUE(bias_gradient.ok()) << bias_gradient.status();
  EXPECT_NEAR((*bias_gradient)[target], -1e-4, 1e-6);
  EXPECT_NEAR(answers.slices[0].result.row_loss(0), 1e-4, 1e-6);
}

// Forward without gradients on two calls, then one backward call with a gradient for each row.
TEST_P(GradientsTest, DeferredMicrobatches) {
  ProblemSpec spec = SpecFor({37, 8}, 33, 211, GetParam());
  spec.config.norm = kernels::Norm::kRmsNorm;
  spec.options.softcap = 20.0f;
  spec.grad_scale = 1.0f;
  spec.grad_loss = spec.grad_lse = spec.grad_entropy = true;
  const Problem problem = kernels::testing::MakeProblem(spec, rng_);
  TestServer server;
  const auto client = server.Connect();
  ASSERT_NO_FATAL_FAILURE(CreateHead(*client, "head", problem));
  reference::ParamGradients gradients = reference::ZeroGradients(problem.config);
  const std::vector<reference::Result> want = kernels::testing::ComputeReference(problem, &gradients);
  for (size_t i = 0; i < problem.slices.size(); ++i) {
    SCOPED_TRACE(absl::StrCat("microbatch ", i));
    const SliceData& data = problem.slices[i];
    v1::OpenMicrobatch open = OpenFor("head", problem, data, i);
    open.set_reduction(v1::REDUCTION_NONE);
    open.set_retain(true);
    open.set_want_grad_hidden(false);
    open.set_accumulate_gradients(false);
    std::vector<LossAnswers> forward;
    forward.push_back(Stream(*client, open, problem, data, 0, 3, rng_));
    forward.push_back(Stream(*client, open, problem, data, 3, data.rows(), rng_));

    v1::ComputeLossRequest request;
    v1::OpenBackward& backward = *request.mutable_backward();
    backward.set_head("head");
    backward.set_step(0);
    backward.set_microbatch_id(i);
    backward.mutable_rows()->set_end(static_cast<uint64_t>(data.rows()));
    backward.set_want_grad_hidden(true);
    backward.set_accumulate_gradients(true);
    backward.mutable_grad_loss()->Assign(data.grad_loss.begin(), data.grad_loss.end());
    backward.mutable_grad_lse()->Assign(data.grad_lse.begin(), data.grad_lse.end());
    backward.mutable_grad_entropy()->Assign(data.grad_entropy.begin(), data.grad_entropy.end());
    const auto stream = client->OpenLoss();
    stream->Send(request);
    LossAnswers answers = stream->Finish();
    ASSERT_TRUE(answers.status.ok()) << answers.status;
    ASSERT_TRUE(answers.summary.has_value());
    EXPECT_EQ(answers.summary->accumulated_rows(), answers.summary->valid_rows());

    // The losses of the forward calls with the gradients of the backward call.
    for (LossAnswers& call : forward) {
      if (!call.summary.has_value()) continue;
      EXPECT_EQ(call.summary->accumulated_rows(), 0u);
      call.summary->set_accumulated_rows(call.summary->valid_rows());
    }
    kernels::testing::SliceOutputs outputs = Collect(problem, data, forward);
    outputs.grad_hidden = Collect(problem, data, {answers}).grad_hidden;
    kernels::testing::ExpectSliceMatches(DType::kFloat32, problem, data, want[i], outputs);
  }
  ExpectGradients(*client, "head", problem.config, gradients, kernels::testing::MaxAbsLogit(want));
  EXPECT_EQ(client->DescribeHead("head")->retained_microbatches(), 2u);
}

TEST(GradientsServiceTest, EmptyMicrobatchGetsASummary) {
  Rng rng = kernels::testing::FreshRng();
  const Problem problem = kernels::testing::MakeProblem(SpecFor({4}, 5, 6, DType::kFloat32), rng);
  TestServer server;
  const auto client = server.Connect();
  ASSERT_NO_FATAL_FAILURE(CreateHead(*client, "head", problem));
  SliceData nothing;
  const LossAnswers answers =
      Stream(*client, OpenFor("head", problem, nothing, 1), problem, nothing, 0, 0, rng);
  EXPECT_TRUE(answers.status.ok()) << answers.status;
  EXPECT_THAT(answers.order, ::testing::ElementsAre("accepted", "summary"));
  EXPECT_EQ(answers.summary->loss_sum(), 0.0);
}

// Streams with different loss options and dtypes accumulate into the same head.
TEST(GradientsServiceTest, DifferentOptionsAndDtypesShareAHead) {
  Rng rng = kernels::testing::FreshRng();
  TestServer server;
  const auto client = server.Connect();
  ProblemSpec spec = SpecFor({21}, 13, 47, DType::kFloat32);
  const Problem first = kernels::testing::MakeProblem(spec, rng);
  ASSERT_NO_FATAL_FAILURE(CreateHead(*client, "head", first));
  reference::ParamGradients gradients = reference::ZeroGradients(first.config);
  double max_abs_logit = 0.0;
  std::vector<std::thread> threads;
  std::vector<Problem> problems;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    spec.hidden_dtype = dtype;
    spec.options.label_smoothing = kernels::testing::Uniform(rng, 0.0f, 0.5f);
    Problem problem = kernels::testing::MakeProblem(spec, rng);
    problem.weight = first.weight;
    problem.bias = first.bias;
    max_abs_logit =
        std::max(max_abs_logit,
                 kernels::testing::MaxAbsLogit(kernels::testing::ComputeReference(problem, &gradients)));
    problems.push_back(std::move(problem));
  }
  for (size_t i = 0; i < problems.size(); ++i) {
    threads.emplace_back([&, i, seed = rng()] {
      const SliceData& data = problems[i].slices[0];
      const LossAnswers answers = Stream(*client, OpenFor("head", problems[i], data, i), problems[i], data, 0,
                                         data.rows(), Rng(seed));
      EXPECT_TRUE(answers.status.ok()) << answers.status;
    });
  }
  for (std::thread& thread : threads) thread.join();
  ExpectGradients(*client, "head", first.config, gradients, max_abs_logit);
}

// The mean over several calls with the normalizer of the whole microbatch, then one step: as SGD by hand.
TEST(GradientsServiceTest, StepFollowsTheGradient) {
  Rng rng = kernels::testing::FreshRng();
  const Problem problem = kernels::testing::MakeProblem(SpecFor({16}, 7, 19, DType::kFloat32), rng);
  TestServer server;
  const auto client = server.Connect();
  ASSERT_NO_FATAL_FAILURE(CreateHead(*client, "head", problem));
  const SliceData& data = problem.slices[0];
  ASSERT_TRUE(Stream(*client, OpenFor("head", problem, data, 5), problem, data, 0, 16, rng).status.ok());
  const auto before = client->Read("head", v1::PARAM_WEIGHT, v1::ROLE_VALUE);
  const auto gradient = client->Read("head", v1::PARAM_WEIGHT, v1::ROLE_GRADIENT);
  v1::ApplyStepRequest step;
  step.set_head("head");
  step.mutable_optimizer()->mutable_sgd()->set_learning_rate(0.5);
  step.add_expected_microbatches(5);
  const auto applied = client->ApplyStep(step);
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_EQ(applied->state().step(), 1u);
  const auto after = client->Read("head", v1::PARAM_WEIGHT, v1::ROLE_VALUE);
  for (size_t i = 0; i < after->size(); ++i) {
    EXPECT_NEAR((*after)[i], (*before)[i] - 0.5f * (*gradient)[i], 1e-6f);
  }
  const auto repeated = client->ApplyStep(step);
  ASSERT_TRUE(repeated.ok()) << repeated.status();
  EXPECT_TRUE(repeated->repeated_call());
  EXPECT_EQ(repeated->grad_norm(), applied->grad_norm());
}

// ---- Calls ----
// ComputeLoss calls beside their results: what the log says of their ends, and how long retained rows stay.

constexpr int64_t kCallHidden = 8, kCallRows = 4;

void CreateHead(TestClient& client) {
  v1::CreateHeadRequest request;
  request.mutable_spec()->set_name("head");
  request.mutable_spec()->set_hidden_size(kCallHidden);
  request.mutable_spec()->set_vocab_size(16);
  ASSERT_TRUE(client.CreateHead(request).ok());
}

v1::OpenMicrobatch Open(const std::string& head) {
  v1::OpenMicrobatch open;
  open.set_head(head);
  open.set_step(0);
  open.set_microbatch_id(3);
  open.set_microbatch_rows(kCallRows);
  open.mutable_rows()->set_end(kCallRows);
  open.set_hidden_dtype(v1::DTYPE_FP32);
  open.set_reduction(v1::REDUCTION_NONE);
  for (int32_t row = 0; row < kCallRows; ++row) open.add_targets(row);
  return open;
}

absl::Status Compute(TestClient& client, const v1::OpenMicrobatch& open, float value) {
  const auto stream = client.OpenLoss();
  stream->SendOpen(open);
  stream->SendSlice(0, kCallRows, Bytes(std::vector<float>(kCallRows * kCallHidden, value)));
  return stream->Finish().status;
}

TEST(LossCallsTest, TheLogNamesCallsThatFailedAndNoOthers) {
  TestServer server;
  const auto client = server.Connect();
  CreateHead(*client);
  log::Configure(log::LogLevel::kInfo, log::LogFormat::kText);
  ::testing::internal::CaptureStderr();
  EXPECT_TRUE(Compute(*client, Open("head"), 0.5f).ok());
  const std::string quiet = ::testing::internal::GetCapturedStderr();
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(Compute(*client, Open("none"), 0.5f).code(), absl::StatusCode::kNotFound);
  const std::string loud = ::testing::internal::GetCapturedStderr();
  log::Configure(log::LogLevel::kOff, log::LogFormat::kText);
  EXPECT_THAT(quiet, Not(HasSubstr("call failed")));
  EXPECT_THAT(loud, HasSubstr("call failed method=ComputeLoss code=NOT_FOUND"));
}

TEST(LossCallsTest, RetainedRowsStayForTheTimeoutAndNoLonger) {
  ServerOptions options = SmallServer();
  options.retained_timeout = absl::Seconds(1);  // looked at ten times as often
  TestServer server(options);
  const auto client = server.Connect();
  CreateHead(*client);
  v1::OpenMicrobatch open = Open("head");
  open.set_retain(true);
  const absl::Time before = clocks::SteadyNow();
  ASSERT_TRUE(Compute(*client, open, 0.5f).ok());
  absl::Time now;
  do {
    absl::SleepFor(absl::Milliseconds(10));
    now = clocks::SteadyNow();
  } while (server.server().stats().retained_microbatches > 0 && now - before < absl::Minutes(5));
  EXPECT_GE(now - before, options.retained_timeout);
  EXPECT_LT(now - before, absl::Minutes(5));
}

// ---- Sampled gradients ----
// Sampled gradients through the network: a microbatch that is computed again is sampled alike, over whatever
// connections, in whatever slices, by a server that was restarted, and in deterministic mode to the bit; on
// one device, and by several that share the classes of a head.

constexpr size_t kSampledRows = 700;

// How a client sends.
struct Way {
  int channels = 1;
  int streams = 1;
  uint64_t slice_bytes = 1 << 20;
};

struct Mode {
  bool deterministic;
  int devices;  // that each have some of the classes
};

class SampledServiceTest : public ::testing::TestWithParam<Mode> {
 protected:
  ServerOptions Options() const { return OptionsOn(GetParam().devices); }
  static ServerOptions OptionsOn(int devices) {
    return SmallCpuServer(GetParam().deterministic, devices, /*by_vocabulary=*/true);
  }

  static void CreateHead(const TestServer& server) {
    ASSERT_TRUE(Connect(server, 1)->CreateHead(SmallHead()).ok());
  }
  static std::unique_ptr<client::Client> Connect(const TestServer& server, int channels) {
    client::ClientOptions options;
    options.target = server.target();
    options.channels = channels;
    auto client = client::Client::Connect(options);
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }

  // dx of the data as microbatch `id`, and what else is known.
  client::LossResult Compute(const TestServer& server, const Way& way, uint64_t id, std::vector<float>& dx,
                             v1::Gradients gradients = v1::GRADIENTS_SAMPLED) {
    dx.assign(data_.hidden.size(), NAN);
    client::ComputeOptions compute;
    compute.accumulate_gradients = true;
    compute.streams = way.streams;
    compute.slice_bytes = way.slice_bytes;
    compute.loss.set_gradients(gradients);
    compute.loss.set_max_gradient_error(1.0f);
    compute.loss.set_filter_epsilon(0.003f);
    compute.loss.set_sample_threshold(0.05f);
    const auto result = Connect(server, way.channels)
                            ->ComputeLoss(SmallMicrobatch(data_, 0, id), {.grad_hidden = dx.data()}, compute);
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *result : client::LossResult();
  }

  // In deterministic mode to the bit. Otherwise rows are rounded as their chunk has it, which may, very
  // rarely, move a decision.
  void ExpectAlike(const std::vector<float>& got, const std::vector<float>& want) const {
    ASSERT_EQ(got.size(), want.size());
    if (GetParam().deterministic) {
      EXPECT_EQ(got, want);
      return;
    }
    EXPECT_LE(DifferentRows(got, want), 2u);
  }
  static size_t DifferentRows(const std::vector<float>& a, const std::vector<float>& b) {
    float largest = 0.0f;
    for (const float x : b) largest = std::max(largest, std::fabs(x));
    size_t rows = 0;
    for (size_t row = 0; row < kSampledRows; ++row) {
      bool different = false;
      for (size_t i = row * kSmallHidden; i < (row + 1) * kSmallHidden; ++i)
        different |= !(std::fabs(a[i] - b[i]) < 1e-3f * largest);
      rows += different ? 1 : 0;
    }
    return rows;
  }

  std::mt19937_64 rng_{std::random_device{}()};
  SmallRows data_ = MakeSmallRows(kSampledRows, rng_);
};

INSTANTIATE_TEST_SUITE_P(Modes, SampledServiceTest,
                         ::testing::Values(Mode{false, 1}, Mode{true, 1}, Mode{false, 2}, Mode{true, 2},
                                           Mode{true, 3}),
                         [](const auto& mode) {
                           return absl::StrCat(mode.param.deterministic ? "deterministic" : "arrival", "On",
                                               mode.param.devices);
                         });

// Calls of a microbatch share chunks there, so they agree on whether they want top classes, but not on how
// many, and none names classes of its own.
TEST_P(SampledServiceTest, SingleClasses) {
  TestServer server(Options());
  CreateHead(server);
  const auto client = Connect(server, 1);
  std::vector<int32_t> argmax(kSampledRows), top_classes(kSampledRows * 3);
  std::vector<float> top(kSampledRows * 3), named(kSampledRows);
  const auto compute = [&](uint32_t top_k, bool names, bool accumulates) {
    client::Microbatch microbatch = SmallMicrobatch(data_, 0, 0);
    client::LossOutputs outputs{.row_argmax = absl::MakeSpan(argmax),
                                .top_logprobs = absl::MakeSpan(top).subspan(0, kSampledRows * top_k),
                                .top_classes = absl::MakeSpan(top_classes).subspan(0, kSampledRows * top_k),
                                .top_k = top_k};
    const std::vector<int32_t> classes = {3};
    if (names) {
      microbatch.classes = classes;
      outputs.class_count = 1;
      outputs.class_logprobs = absl::MakeSpan(named);
    }
    client::ComputeOptions options;
    options.accumulate_gradients = accumulates;
    options.slice_bytes = 4096;
    return client->ComputeLoss(microbatch, outputs, options).status();
  };
  ASSERT_TRUE(compute(3, false, true).ok());
  for (size_t row = 0; row < kSampledRows; ++row) {
    EXPECT_EQ(top_classes[row * 3], argmax[row]) << row;
    EXPECT_TRUE(top[row * 3] >= top[row * 3 + 1] && top[row * 3 + 1] >= top[row * 3 + 2]) << row;
  }
  EXPECT_TRUE(compute(1, false, true).ok());
  const bool deterministic = GetParam().deterministic;
  EXPECT_EQ(absl::IsFailedPrecondition(compute(0, false, true)), deterministic);
  const absl::Status with_names = compute(3, true, true);
  EXPECT_EQ(absl::IsInvalidArgument(with_names), deterministic) << with_names;
  if (deterministic) {
    EXPECT_THAT(std::string(with_names.message()), HasSubstr("open.class_count"));
  }
  EXPECT_TRUE(compute(3, true, false).ok());
}

TEST_P(SampledServiceTest, RepeatsAreSampledAlike) {
  std::vector<float> first, again, other;
  {
    TestServer server(Options());
    CreateHead(server);
    const client::LossResult result = Compute(server, {}, 0, first);
    EXPECT_GT(result.gradient_error(), 0.01);
    EXPECT_LT(result.gradient_error(), 1.0);
    const client::LossResult repeat =
        Compute(server, {.channels = 2, .streams = 5, .slice_bytes = 1000}, 0, again);
    EXPECT_EQ(repeat.repeated_rows, result.valid_rows);
    EXPECT_NEAR(repeat.gradient_error(), result.gradient_error(), 1e-6);
    ExpectAlike(again, first);
    Compute(server, {}, 1, other);
    EXPECT_GT(DifferentRows(other, first), kSampledRows / 2) << "another microbatch has other random numbers";
  }
  TestServer restarted(Options());
  CreateHead(restarted);
  Compute(restarted, {.channels = 3, .streams = 3, .slice_bytes = 7777}, 0, again);
  ExpectAlike(again, first);
}

// What devices that share the classes say of the error and of what was dropped is what one device says.
TEST_P(SampledServiceTest, TheErrorIsThatOfAllClasses) {
  TestServer one(OptionsOn(1)), server(Options());
  CreateHead(one);
  CreateHead(server);
  std::vector<float> dx;
  uint64_t id = 0;
  for (const v1::Gradients gradients : {v1::GRADIENTS_SAMPLED, v1::GRADIENTS_AUTO, v1::GRADIENTS_FILTERED}) {
    const client::LossResult want = Compute(one, {}, id, dx, gradients);
    const client::LossResult got = Compute(server, {}, id, dx, gradients);
    ++id;
    EXPECT_EQ(got.gradient_error() > 0.0, gradients != v1::GRADIENTS_FILTERED);
    EXPECT_NEAR(got.gradient_error(), want.gradient_error(), 1e-5);
    EXPECT_EQ(got.dropped_mass > 0.0, gradients == v1::GRADIENTS_FILTERED);
    EXPECT_NEAR(got.dropped_mass, want.dropped_mass, 1e-4 * want.dropped_mass);
  }
}

// ---- A deterministic server ----
// A deterministic server, through the network: waiting calls do not stand in each other's way, and training
// gives the same bits whatever order the client sends in.

ServerOptions Deterministic() {
  ServerOptions options = SmallServer();
  options.deterministic = true;
  return options;
}

// Two steps of training with the C++ client, microbatches in a random order. Returns the weights, and the
// gradients of the hidden states of each microbatch.
std::pair<std::string, std::vector<std::vector<float>>> Train(const std::vector<SmallRows>& data,
                                                              uint64_t seed) {
  TestServer server(Deterministic());
  std::mt19937_64 rng(seed);
  client::ClientOptions options;
  options.target = server.target();
  options.channels = 1 + static_cast<int>(rng() % 3);
  auto client = client::Client::Connect(options);
  EXPECT_TRUE(client.ok()) << client.status();
  EXPECT_TRUE((*client)->CreateHead(SmallHead()).ok());
  EXPECT_GT((*client)->DescribeHead("head")->slice_limits().row_grid(), 0u);
  std::vector<std::vector<float>> grads(data.size());
  for (uint64_t step = 0; step < 2; ++step) {
    std::vector<size_t> order(data.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), rng);
    std::vector<client::PendingLoss> pending;
    v1::ApplyStepRequest apply;
    apply.set_head("head");
    apply.set_step(step);
    apply.mutable_optimizer()->mutable_sgd()->set_learning_rate(0.5);
    for (size_t i : order) {
      grads[i].assign(data[i].hidden.size(), 0.0f);
      client::ComputeOptions compute;
      compute.accumulate_gradients = true;
      compute.streams = 1 + static_cast<int>(rng() % 5);
      compute.slice_bytes = 1 + rng() % (64 << 10);
      pending.push_back((*client)->ComputeLossAsync(SmallMicrobatch(data[i], step, i),
                                                    {.grad_hidden = grads[i].data()}, compute));
      apply.add_expected_microbatches(i);
    }
    for (client::PendingLoss& loss : pending) {
      const auto result = loss.Wait();
      EXPECT_TRUE(result.ok()) << result.status();
    }
    const auto applied = (*client)->ApplyStep(apply);
    EXPECT_TRUE(applied.ok()) << applied.status();
  }
  const auto weights = (*client)->ReadTensor("head", v1::PARAM_WEIGHT);
  EXPECT_TRUE(weights.ok()) << weights.status();
  return {Bytes(weights->values), std::move(grads)};
}

TEST(DeterministicServiceTest, TrainingHasTheSameBitsInWhateverOrder) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  std::vector<SmallRows> data;
  for (int i = 0; i < 6; ++i) data.push_back(MakeSmallRows(1 + rng() % 3000, rng));
  const auto first = Train(data, seed);
  for (uint64_t run = 1; run < 4; ++run) {
    const auto other = Train(data, seed + run);
    EXPECT_EQ(other.first, first.first) << "weights";
    EXPECT_EQ(other.second, first.second) << "gradients of hidden states";
  }
}

v1::OpenMicrobatch OpenFor(uint64_t id, uint64_t rows) {
  v1::OpenMicrobatch open;
  open.set_head("head");
  open.set_step(0);
  open.set_microbatch_id(id);
  open.set_microbatch_rows(rows);
  open.mutable_rows()->set_end(rows);
  open.set_hidden_dtype(v1::DTYPE_FP32);
  open.set_reduction(v1::REDUCTION_SUM);
  open.set_want_grad_hidden(true);
  open.set_accumulate_gradients(true);
  for (uint64_t i = 0; i < rows; ++i) open.add_targets(static_cast<int32_t>(i % kSmallVocab));
  return open;
}

// All calls share one connection, and those that wait have more to send than its windows hold: the one whose
// turn it is must get through.
TEST(DeterministicServiceTest, WaitingCallsLeaveTheConnectionToTheOneInTurn) {
  ServerOptions options = Deterministic();
  options.slice_bytes = 1 << 20;
  options.staging_bytes = 3 << 20;
  TestServer server(options);
  client::ClientOptions client_options;
  client_options.target = server.target();
  client_options.channels = 1;
  auto client = client::Client::Connect(client_options);
  ASSERT_TRUE(client.ok());
  ASSERT_TRUE((*client)->CreateHead(SmallHead()).ok());
  constexpr uint64_t kRows = (6 << 20) / (kSmallHidden * 4);
  constexpr uint64_t kCalls = 16;
  const SmallRows data = {std::vector<float>(kRows * kSmallHidden, 0.25f), std::vector<int32_t>(kRows, 1)};
  std::vector<client::PendingLoss> pending;
  for (uint64_t i = 0; i < kCalls; ++i) {
    client::ComputeOptions compute;
    compute.accumulate_gradients = true;
    pending.push_back((*client)->ComputeLossAsync(SmallMicrobatch(data, 0, kCalls - 1 - i), {}, compute));
    if (i + 1 < kCalls) {
      EXPECT_FALSE(pending.back().WaitFor(absl::Milliseconds(50)));
    }
  }
  for (client::PendingLoss& loss : pending) {
    const auto result = loss.Wait();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->accumulated_rows, kRows);
  }
}

TEST(DeterministicServiceTest, SaysWhatIsWaitedForAndCleansUp) {
  TestServer server(Deterministic());
  const auto client = server.Connect();
  ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
  const std::string payload(4 * kSmallHidden * 4, '\0');
  auto early = client->OpenLoss(absl::Milliseconds(300));
  ASSERT_TRUE(early->SendOpen(OpenFor(1, 4)));
  ASSERT_TRUE(early->SendSlice(0, 4, payload));
  while (client->DescribeHead("head")->waiting_slices() == 0) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_EQ(client->DescribeHead("head")->waits_for(), "microbatch 0");
  EXPECT_EQ(early->Finish().status.code(), absl::StatusCode::kDeadlineExceeded);
  while (client->DescribeHead("head")->open_streams() > 0) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_EQ(client->DescribeHead("head")->waiting_slices(), 0u);
  for (uint64_t id : {0, 1}) {
    auto call = client->OpenLoss();
    ASSERT_TRUE(call->SendOpen(OpenFor(id, 4)));
    ASSERT_TRUE(call->SendSlice(0, 4, payload));
    const LossAnswers answers = call->Finish();
    EXPECT_TRUE(answers.status.ok()) << answers.status;
  }
}

TEST(DeterministicServiceTest, StopsWhileCallsWait) {
  TestServer server(Deterministic());
  const auto client = server.Connect();
  ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
  std::vector<std::unique_ptr<LossStream>> calls;
  for (uint64_t id : {1, 0, 2}) {
    calls.push_back(client->OpenLoss());
    ASSERT_TRUE(calls.back()->SendOpen(OpenFor(id, 8)));
    ASSERT_TRUE(calls.back()->SendSlice(0, 4, std::string(4 * kSmallHidden * 4, '\0')));
  }
  while (client->DescribeHead("head")->waiting_slices() < 2) absl::SleepFor(absl::Milliseconds(5));
  server.Stop();
  for (auto& call : calls) EXPECT_FALSE(call->Finish().status.ok());
}

TEST(DeterministicServiceTest, DeferredGradientsTakeTheirTurn) {
  ServerOptions server_options = Deterministic();
  server_options.peer_share = 1;  // both microbatches are one peer's
  TestServer server(server_options);
  client::ClientOptions options;
  options.target = server.target();
  auto client = client::Client::Connect(options);
  ASSERT_TRUE(client.ok());
  ASSERT_TRUE((*client)->CreateHead(SmallHead()).ok());
  std::mt19937_64 rng(3);
  const SmallRows data = MakeSmallRows(700, rng);
  for (uint64_t id : {0, 1}) {
    const auto kept = (*client)->ComputeLoss(SmallMicrobatch(data, 0, id), {},
                                             {.reduction = v1::REDUCTION_NONE, .retain = true});
    ASSERT_TRUE(kept.ok()) << kept.status();
  }
  const std::vector<float> upstream(700, 0.5f);
  std::vector<std::vector<float>> grads(2, std::vector<float>(data.hidden.size()));
  const auto start = [&](uint64_t id) {
    client::RetainedGradients gradients;
    gradients.head = "head";
    gradients.step = 0;
    gradients.id = id;
    gradients.hidden_size = kSmallHidden;
    gradients.hidden_dtype = v1::DTYPE_FP32;
    gradients.grad_loss = upstream;
    return (*client)->BackwardAsync(gradients, grads[id].data(), {.accumulate_gradients = true});
  };
  client::PendingLoss second = start(1);
  EXPECT_FALSE(second.WaitFor(absl::Milliseconds(100)));
  client::PendingLoss first = start(0);
  EXPECT_TRUE(first.Wait().ok()) << first.Wait().status();
  EXPECT_TRUE(second.Wait().ok()) << second.Wait().status();
  EXPECT_EQ(grads[0], grads[1]);
}

}  // namespace
}  // namespace lossd::app::testing::gradients_test
