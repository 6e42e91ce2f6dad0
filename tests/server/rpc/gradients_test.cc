// Losses and gradients that come back through the service, against the double-precision reference.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "tests/kernels/comparison.h"
#include "tests/kernels/problem.h"
#include "tests/kernels/tolerances.h"
#include "tests/server/rpc/service_client.h"
#include "tests/server/rpc/test_server.h"

namespace lossd::rpc::testing {
namespace {

using kernels::DType;
using kernels::Param;
using kernels::Role;
using kernels::testing::Problem;
using kernels::testing::ProblemSpec;
using kernels::testing::Rng;
using kernels::testing::SliceData;
namespace reference = kernels::reference;

constexpr int32_t kIgnoreIndex = -100;

v1::DType WireType(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return v1::DTYPE_FP32;
    case DType::kFloat16:
      return v1::DTYPE_FP16;
    case DType::kBFloat16:
      return v1::DTYPE_BF16;
  }
  return v1::DTYPE_UNSPECIFIED;
}

v1::Algorithm WireAlgorithm(kernels::Algorithm algorithm) {
  return static_cast<v1::Algorithm>(static_cast<int>(algorithm) + 1);
}

v1::Param WireParam(Param param) { return static_cast<v1::Param>(static_cast<int>(param) + 1); }

// A head with the problem's tensors.
void CreateHead(TestClient& client, const std::string& name, const Problem& problem) {
  v1::CreateHeadRequest request;
  request.mutable_zeros();
  v1::HeadSpec& spec = *request.mutable_spec();
  spec.set_name(name);
  spec.set_hidden_size(static_cast<uint64_t>(problem.config.hidden_size));
  spec.set_vocab_size(static_cast<uint64_t>(problem.config.vocab_size));
  spec.set_bias(problem.config.has_bias);
  spec.set_class_weights(problem.config.has_class_weights);
  spec.set_norm(static_cast<v1::Norm>(static_cast<int>(problem.config.norm) + 1));
  spec.set_norm_epsilon(problem.config.norm_epsilon);
  spec.set_compute_dtype(v1::DTYPE_FP32);
  const auto created = client.CreateHead(request);
  ASSERT_TRUE(created.ok()) << created.status();
  for (const Param param : kernels::kAllParams) {
    if (!kernels::HasTensor(problem.config, {param, Role::kValue})) continue;
    const absl::Status written = client.Write(name, WireParam(param), problem.Values(param));
    ASSERT_TRUE(written.ok()) << written;
  }
}

v1::OpenMicrobatch OpenFor(const std::string& head, const Problem& problem, const SliceData& data,
                           uint64_t id) {
  v1::OpenMicrobatch open;
  open.set_head(head);
  open.set_step(0);
  open.set_microbatch_id(id);
  open.set_microbatch_rows(static_cast<uint64_t>(data.rows()));
  open.mutable_rows()->set_end(static_cast<uint64_t>(data.rows()));
  open.set_hidden_dtype(WireType(problem.hidden_dtype));
  v1::LossOptions& options = *open.mutable_options();
  options.set_label_smoothing(problem.options.label_smoothing);
  options.set_z_loss(problem.options.z_loss);
  options.set_softcap(problem.options.softcap);
  options.set_logit_scale(problem.options.logit_scale);
  options.set_use_class_weights(problem.options.use_class_weights);
  options.set_algorithm(WireAlgorithm(problem.options.algorithm));
  options.set_filter_epsilon(problem.options.filter_epsilon);
  options.set_max_dropped_mass(problem.options.max_dropped_mass);
  open.set_reduction(v1::REDUCTION_SUM);
  open.set_grad_output(data.grad_scale);
  open.set_want_grad_hidden(true);
  open.set_accumulate_gradients(true);
  open.set_want_row_loss(true);
  open.set_want_row_lse(true);
  open.set_want_row_entropy(true);
  open.set_want_row_logprob(true);
  open.set_want_row_argmax(true);
  for (const int32_t target : data.targets) {
    open.add_targets(target == kernels::kIgnoredTarget ? kIgnoreIndex : target);
  }
  for (const float weight : data.row_weights) open.add_row_weights(weight);
  return open;
}

// Row ranges that cover [begin, end), in random order.
std::vector<std::pair<int64_t, int64_t>> Cut(int64_t begin, int64_t end, Rng& rng) {
  std::vector<std::pair<int64_t, int64_t>> pieces;
  while (begin < end) {
    const int64_t next = kernels::testing::UniformInt(rng, begin + 1, end);
    pieces.emplace_back(begin, next);
    begin = next;
  }
  std::shuffle(pieces.begin(), pieces.end(), rng);
  return pieces;
}

// Rows [begin, end) of one microbatch on one call, all slices sent before the first answer is read.
LossAnswers Stream(TestClient& client, v1::OpenMicrobatch open, const Problem& problem, const SliceData& data,
                   int64_t begin, int64_t end, Rng rng) {
  open.mutable_rows()->set_begin(static_cast<uint64_t>(begin));
  open.mutable_rows()->set_end(static_cast<uint64_t>(end));
  const std::vector<int32_t> targets(open.targets().begin() + begin, open.targets().begin() + end);
  open.mutable_targets()->Assign(targets.begin(), targets.end());
  if (open.row_weights_size() > 0) {
    const std::vector<float> weights(open.row_weights().begin() + begin, open.row_weights().begin() + end);
    open.mutable_row_weights()->Assign(weights.begin(), weights.end());
  }
  const auto stream = client.OpenLoss();
  stream->SendOpen(open);
  const int64_t width = problem.config.hidden_size;
  for (const auto& [from, to] : Cut(begin, end, rng)) {
    const absl::Span<const float> rows =
        absl::MakeConstSpan(data.hidden)
            .subspan(static_cast<size_t>(from * width), static_cast<size_t>((to - from) * width));
    stream->SendSlice(from, to, Bytes(kernels::testing::Encode(problem.hidden_dtype, rows)));
  }
  return stream->Finish();
}

// Puts the answers of the calls of one microbatch together. Checks their order and that each row came once.
kernels::testing::SliceOutputs Collect(const Problem& problem, const SliceData& data,
                                       const std::vector<LossAnswers>& calls) {
  const auto rows = static_cast<size_t>(data.rows());
  const auto width = static_cast<size_t>(problem.config.hidden_size);
  kernels::testing::SliceOutputs out;
  for (auto* values : {&out.loss, &out.lse, &out.entropy, &out.target_logprob}) values->assign(rows, NAN);
  out.argmax.assign(rows, -7);
  out.grad_hidden.assign(rows * width, NAN);
  size_t answered = 0;
  for (const LossAnswers& call : calls) {
    EXPECT_TRUE(call.status.ok()) << call.status;
    EXPECT_TRUE(call.accepted.has_value() && call.summary.has_value());
    if (!call.summary.has_value()) continue;
    EXPECT_EQ(call.order.front(), "accepted");
    EXPECT_EQ(call.order.back(), "summary");
    for (const LossAnswers::Slice& slice : call.slices) {
      const size_t begin = slice.result.rows().begin();
      answered += slice.result.rows().end() - begin;
      std::copy(slice.result.row_loss().begin(), slice.result.row_loss().end(), out.loss.begin() + begin);
      std::copy(slice.result.row_lse().begin(), slice.result.row_lse().end(), out.lse.begin() + begin);
      std::copy(slice.result.row_entropy().begin(), slice.result.row_entropy().end(),
                out.entropy.begin() + begin);
      std::copy(slice.result.row_logprob().begin(), slice.result.row_logprob().end(),
                out.target_logprob.begin() + begin);
      std::copy(slice.result.row_argmax().begin(), slice.result.row_argmax().end(),
                out.argmax.begin() + begin);
      const absl::Span<const uint8_t> bytes(reinterpret_cast<const uint8_t*>(slice.payload.data()),
                                            slice.payload.size());
      const std::vector<float> grad = kernels::testing::Decode(problem.hidden_dtype, bytes);
      std::copy(grad.begin(), grad.end(), out.grad_hidden.begin() + begin * width);
    }
    out.sums.loss += call.summary->loss_sum();
    out.sums.z_loss += call.summary->z_loss_sum();
    out.sums.entropy += call.summary->entropy_sum();
    out.sums.dropped_mass += call.summary->dropped_mass();
    out.sums.valid_rows += static_cast<int64_t>(call.summary->valid_rows());
    out.sums.correct_rows += static_cast<int64_t>(call.summary->correct_rows());
    EXPECT_EQ(call.summary->accumulated_rows(), call.summary->valid_rows());
    EXPECT_EQ(call.summary->repeated_rows(), 0u);
  }
  EXPECT_EQ(answered, rows);
  return out;
}

double Norm(const std::vector<double>& values) {
  return std::sqrt(std::inner_product(values.begin(), values.end(), values.begin(), 0.0));
}

// As tests/kernels/tolerances.h says, for fp32 accumulators.
void ExpectGradient(TestClient& client, const std::string& head, Param param, const reference::Gradient& want,
                    double max_abs_logit) {
  const auto got = client.Read(head, WireParam(param), v1::ROLE_GRADIENT);
  ASSERT_TRUE(got.ok()) << got.status();
  ASSERT_EQ(got->size(), want.value.size());
  std::vector<double> error(got->size());
  for (size_t i = 0; i < error.size(); ++i) error[i] = double{(*got)[i]} - want.value[i];
  const double limit =
      Norm(want.value) * kernels::testing::GradientTolerance(DType::kFloat32, max_abs_logit) +
      Norm(want.magnitude) * kernels::testing::ToleranceFor(DType::kFloat32).magnitude;
  EXPECT_LE(Norm(error), limit + 1e-30) << kernels::Name(param) << ", norm " << Norm(want.value);
}

void ExpectGradients(TestClient& client, const std::string& head, const kernels::HeadConfig& config,
                     const reference::ParamGradients& want, double max_abs_logit) {
  ExpectGradient(client, head, Param::kWeight, want.weight, max_abs_logit);
  if (config.has_bias) ExpectGradient(client, head, Param::kBias, want.bias, max_abs_logit);
  if (config.norm != kernels::Norm::kNone) {
    ExpectGradient(client, head, Param::kNormGain, want.norm_gain, max_abs_logit);
  }
  if (config.norm == kernels::Norm::kLayerNorm) {
    ExpectGradient(client, head, Param::kNormShift, want.norm_shift, max_abs_logit);
  }
}

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
  spec.options = {.algorithm = kernels::Algorithm::kFiltered, .filter_epsilon = 0.02f};
  RunAndCompare(kernels::testing::MakeProblem(spec, rng_), rng_);
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
}  // namespace lossd::rpc::testing
