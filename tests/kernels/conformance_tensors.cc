// SPDX-License-Identifier: Apache-2.0
// A head's tensors: initial values, reading and writing, gradients from outside, the gradient norm.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/chunk_run.h"

namespace lossd::kernels::testing {
namespace {

HeadConfig WithEveryTensor(HeadConfig config) {
  config.has_bias = config.has_class_weights = true;
  config.norm = Norm::kLayerNorm;
  config.optimizer_state = OptimizerState::kAdam;
  return config;
}

}  // namespace

TEST_P(BackendConformance, NewHeadIsZeroButForGainAndClassWeights) {
  const HeadConfig config = WithEveryTensor(Plain({1}, 7, 9).config);
  auto head = backend().CreateHead(config);
  ASSERT_TRUE(head.ok()) << head.status();
  for (Param param : kAllParams) {
    for (Role role : {Role::kValue, Role::kGradient, Role::kMoment1, Role::kMoment2}) {
      if (!HasTensor(config, {param, role})) continue;
      const bool one = role == Role::kValue && (param == Param::kNormGain || param == Param::kClassWeights);
      const std::vector<float> values = ReadAll(**head, {param, role});
      EXPECT_EQ(values, std::vector<float>(values.size(), one ? 1.0f : 0.0f)) << Name(param) << Name(role);
    }
  }
}

TEST_P(BackendConformance, TensorsRoundTripInRowRanges) {
  HeadConfig config = Plain({1}, 13, 29).config;
  config.optimizer_state = OptimizerState::kAdam;
  auto head = backend().CreateHead(config);
  ASSERT_TRUE(head.ok()) << head.status();
  for (Role role : {Role::kValue, Role::kGradient, Role::kMoment1, Role::kMoment2}) {
    const TensorId id{Param::kWeight, role};
    std::vector<float> want(29 * 13);
    for (float& v : want) v = Uniform(rng(), -3.0f, 3.0f);
    for (int64_t row = 0; row < 29; row += 10) {
      const int64_t rows = std::min<int64_t>(10, 29 - row);
      const absl::Status status = (*head)->WriteTensor(
          id, row, rows, DType::kFloat32,
          AsBytes(want).subspan(static_cast<size_t>(row) * 52, static_cast<size_t>(rows) * 52));
      ASSERT_TRUE(status.ok()) << status;
    }
    EXPECT_EQ(ReadAll(**head, id), want);
    for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      std::vector<uint8_t> bytes(7 * 13 * 2);
      ASSERT_TRUE((*head)->ReadTensor(id, 4, 7, dtype, absl::MakeSpan(bytes)).ok());
      EXPECT_EQ(bytes, Encode(dtype, absl::MakeConstSpan(want).subspan(4 * 13, 7 * 13)));
    }
  }
  const std::vector<float> rows = {0.1f, 1e-7f, 65504.0f, -3.3f, 2.0f, 0.0f, -0.0f,
                                   5.0f, 6.0f,  7.0f,     8.0f,  9.0f, 10.0f};
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const std::vector<uint8_t> bytes = Encode(dtype, rows);
    ASSERT_TRUE((*head)->WriteTensor({Param::kWeight, Role::kValue}, 28, 1, dtype, bytes).ok());
    const std::vector<float> all = ReadAll(**head, {Param::kWeight, Role::kValue});
    EXPECT_EQ(std::vector<float>(all.end() - 13, all.end()), Decode(dtype, bytes));
  }
}

TEST_P(BackendConformance, EveryTensorReadsInAnyRangeAndDType) {
  const HeadConfig config = WithEveryTensor(Plain({1}, 37, 53).config);
  auto head = backend().CreateHead(config);
  ASSERT_TRUE(head.ok()) << head.status();
  for (Param param : kAllParams) {
    for (Role role : {Role::kValue, Role::kGradient, Role::kMoment1, Role::kMoment2}) {
      const TensorId id{param, role};
      if (!HasTensor(config, id)) continue;
      const TensorShape shape = ShapeOf(config, param);
      std::vector<float> values(static_cast<size_t>(shape.elements()));
      for (float& v : values) v = Uniform(rng(), -3.0f, 3.0f);
      ASSERT_TRUE((*head)->WriteTensor(id, 0, shape.rows, DType::kFloat32, AsBytes(values)).ok());
      for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
        const int64_t begin = UniformInt(rng(), 0, shape.rows);
        const int64_t rows = UniformInt(rng(), 0, shape.rows - begin);
        const auto want = absl::MakeConstSpan(values).subspan(static_cast<size_t>(begin * shape.cols),
                                                              static_cast<size_t>(rows * shape.cols));
        std::vector<uint8_t> got(want.size() * SizeOf(dtype), 0xcd);
        ASSERT_TRUE((*head)->ReadTensor(id, begin, rows, dtype, absl::MakeSpan(got)).ok());
        EXPECT_EQ(got, Encode(dtype, want))
            << Name(param) << " " << Name(role) << " rows " << begin << " + " << rows;
      }
    }
  }
}

TEST_P(BackendConformance, TensorAccessRefusesBadRanges) {
  const HeadConfig config = Plain({1}, 4, 6).config;
  auto head = backend().CreateHead(config);
  ASSERT_TRUE(head.ok()) << head.status();
  const TensorId weight{Param::kWeight, Role::kValue};
  std::vector<uint8_t> bytes(6 * 4 * 4);
  const auto read = [&](TensorId id, int64_t begin, int64_t rows, size_t size) {
    return (*head)
        ->ReadTensor(id, begin, rows, DType::kFloat32, absl::MakeSpan(bytes).subspan(0, size))
        .code();
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(read(weight, 0, 6, 96), absl::StatusCode::kOk);
  EXPECT_EQ(read(weight, 6, 0, 0), absl::StatusCode::kOk);
  EXPECT_EQ(read(weight, 0, 6, 92), kInvalid);
  EXPECT_EQ(read(weight, 5, 2, 32), kInvalid);
  EXPECT_EQ(read(weight, -1, 2, 32), kInvalid);
  EXPECT_EQ(read(weight, 1, -1, 0), kInvalid);
  EXPECT_EQ(read(weight, std::numeric_limits<int64_t>::max(), 1, 16), kInvalid);
  EXPECT_EQ(read(weight, 1, std::numeric_limits<int64_t>::max(), 16), kInvalid);
  EXPECT_EQ(read({Param::kBias, Role::kValue}, 0, 6, 24), absl::StatusCode::kNotFound);
  EXPECT_EQ(
      (*head)->WriteTensor(weight, 3, 4, DType::kFloat32, absl::MakeConstSpan(bytes).subspan(0, 64)).code(),
      kInvalid);
  EXPECT_TRUE(AllZero(ReadAll(**head, weight)));
}

TEST_P(BackendConformance, AddGradientAddsScaledRows) {
  HeadConfig config = Plain({1}, 37, 53).config;
  config.has_bias = true;
  config.norm = Norm::kLayerNorm;
  auto head = backend().CreateHead(config);
  ASSERT_TRUE(head.ok()) << head.status();
  for (Param param : {Param::kWeight, Param::kBias, Param::kNormGain, Param::kNormShift}) {
    const TensorShape shape = ShapeOf(config, param);
    std::vector<float> want(static_cast<size_t>(shape.elements()), 0.0f);
    for (int round = 0; round < 12; ++round) {
      const DType dtype = std::vector<DType>{DType::kFloat32, DType::kFloat16, DType::kBFloat16}[round % 3];
      const float scale = round < 3 ? 1.0f : Uniform(rng(), -4.0f, 4.0f);
      const int64_t begin = UniformInt(rng(), 0, shape.rows);
      const int64_t rows = UniformInt(rng(), 0, shape.rows - begin);
      std::vector<float> values(static_cast<size_t>(rows * shape.cols));
      for (float& v : values) v = Uniform(rng(), -3.0f, 3.0f);
      const std::vector<uint8_t> bytes = Encode(dtype, values);
      const absl::Status added = (*head)->AddGradient(param, begin, rows, dtype, scale, bytes);
      ASSERT_TRUE(added.ok()) << added;
      const std::vector<float> sent = Decode(dtype, bytes);
      for (size_t i = 0; i < sent.size(); ++i) {
        const volatile float product = scale * sent[i];  // rounded before it is added
        want[static_cast<size_t>(begin * shape.cols) + i] += product;
      }
    }
    EXPECT_EQ(ReadAll(**head, {param, Role::kGradient}), want) << Name(param);
  }
}

TEST_P(BackendConformance, AddedGradientsAndChunksAddUp) {
  ProblemSpec spec = Plain({24}, 31, 57);
  spec.config.has_bias = true;
  const Problem problem = MakeProblem(spec, rng());
  const auto alone = MakeHead(backend(), problem);
  const auto both = MakeHead(backend(), problem);
  ASSERT_NE(alone, nullptr);
  ASSERT_NE(both, nullptr);
  const std::vector<float> one(31, 1.0f);
  for (int step = 1; step <= 2; ++step) {  // the second one starts where a step zeroed the gradients
    ASSERT_TRUE(both->AddGradient(Param::kWeight, 56, 1, DType::kFloat32, 0.5f, AsBytes(one)).ok());
    ASSERT_TRUE(RunChunk(*alone, problem).done.ok());
    ASSERT_TRUE(RunChunk(*both, problem).done.ok());
    std::vector<float> want = ReadGradient(*alone, Param::kWeight);
    for (size_t i = want.size() - 31; i < want.size(); ++i) want[i] += 0.5f;
    const std::vector<float> got = ReadGradient(*both, Param::kWeight);
    for (size_t i = 0; i < want.size(); ++i)
      ASSERT_NEAR(got[i], want[i], 1e-6 + 1e-6 * std::fabs(want[i])) << i;
    const OptimizerOptions still{.kind = OptimizerOptions::Kind::kSgd, .learning_rate = 0.0};
    ASSERT_TRUE(alone->ApplyStep(still, step).ok());
    ASSERT_TRUE(both->ApplyStep(still, step).ok());
  }
}

TEST_P(BackendConformance, AddGradientRefusesWhatThereIsNot) {
  HeadConfig config = Plain({1}, 4, 6).config;
  config.has_class_weights = true;
  auto head = backend().CreateHead(config);
  ASSERT_TRUE(head.ok()) << head.status();
  const std::vector<uint8_t> bytes(6 * 4 * 4);
  const auto add = [&](HeadKernels& to, Param param, int64_t begin, int64_t rows, size_t size) {
    return to.AddGradient(param, begin, rows, DType::kFloat32, 1.0f, absl::MakeConstSpan(bytes).first(size))
        .code();
  };
  EXPECT_EQ(add(**head, Param::kWeight, 0, 6, 96), absl::StatusCode::kOk);
  EXPECT_EQ(add(**head, Param::kWeight, 6, 0, 0), absl::StatusCode::kOk);
  EXPECT_EQ(add(**head, Param::kWeight, 0, 6, 92), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(add(**head, Param::kWeight, 5, 2, 32), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(add(**head, Param::kBias, 0, 6, 24), absl::StatusCode::kNotFound);
  EXPECT_EQ(add(**head, Param::kClassWeights, 0, 6, 24), absl::StatusCode::kNotFound);
  config.trainable = false;
  auto frozen = backend().CreateHead(config);
  ASSERT_TRUE(frozen.ok()) << frozen.status();
  EXPECT_EQ(add(**frozen, Param::kWeight, 0, 6, 96), absl::StatusCode::kNotFound);
}

TEST_P(BackendConformance, GradNormCoversEveryParameter) {
  ProblemSpec spec = Plain({24}, 31, 57);
  spec.config.has_bias = true;
  spec.config.norm = Norm::kLayerNorm;
  const Problem problem = MakeProblem(spec, rng());
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  EXPECT_EQ(*head->GradNorm(), 0.0);
  ASSERT_TRUE(RunChunk(*head, problem).done.ok());
  double squares = 0.0;
  for (const std::vector<float>& gradient : AllGradients(*head)) squares += std::pow(NormOf(gradient), 2);
  EXPECT_NEAR(*head->GradNorm(), std::sqrt(squares), 1e-9 * std::sqrt(squares));
  ASSERT_TRUE(
      head->WriteTensor({Param::kBias, Role::kGradient}, 5, 1, DType::kFloat32, AsBytes({kInf})).ok());
  EXPECT_FALSE(std::isfinite(*head->GradNorm()));
  ASSERT_TRUE(head->ZeroGradients().ok());
  ExpectZeroGradients(*head);
}

}  // namespace lossd::kernels::testing
