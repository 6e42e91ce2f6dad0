// SPDX-License-Identifier: Apache-2.0
// Losses and gradients that come back through the service, against the double-precision reference.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/sample_seed.h"
#include "tests/kernels/comparison.h"
#include "tests/server/service/service_problem.h"
#include "tests/server/service/test_server.h"

namespace lossd::app::testing::gradients_test {
namespace {

using kernels::DType;
using kernels::testing::Problem;
using kernels::testing::ProblemSpec;
using kernels::testing::Rng;
using kernels::testing::SliceData;
namespace reference = kernels::reference;

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
  EXPECT_NEAR(answers.summary->loss_sum(), want[0].loss_sum, 1e-3);
  EXPECT_EQ(answers.summary->valid_rows(), static_cast<uint64_t>(want[0].valid_rows));
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
  constexpr int64_t kClasses = 11;
  ProblemSpec spec = SpecFor({1}, kWidth, kClasses, GetParam());
  spec.row_weights = false;
  spec.grad_scale = 1.0f;
  spec.ignored = 0.0;
  Problem problem = kernels::testing::MakeProblem(spec, rng_);
  SliceData& row = problem.slices[0];
  std::fill(row.hidden.begin(), row.hidden.end(), 0.0f);
  row.hidden[0] = 1.0f;
  for (int64_t v = 0; v < kClasses; ++v) problem.weight[static_cast<size_t>(v * kWidth)] = 0.0f;
  std::fill(problem.bias.begin(), problem.bias.end(), 0.0f);
  const auto target = static_cast<size_t>(row.targets[0]);
  problem.bias[target] = static_cast<float>(std::log(0.9999 / (0.0001 / (kClasses - 1))));

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

}  // namespace
}  // namespace lossd::app::testing::gradients_test
