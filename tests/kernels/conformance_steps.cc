// SPDX-License-Identifier: Apache-2.0
// Optimizer steps, against the double-precision reference.
#include <cmath>
#include <map>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/reference/optimizer.h"
#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/chunk_run.h"

namespace lossd::kernels::testing {
namespace {

// Hyper-parameters at random, of every kind of optimizer.
OptimizerOptions RandomOptimizer(Rng& rng) {
  using Kind = OptimizerOptions::Kind;
  OptimizerOptions options;
  options.kind = Chance(rng, 0.5) ? Kind::kAdamW : Kind::kSgd;
  options.learning_rate = std::pow(10.0, Uniform(rng, -4.0f, -1.0f));
  options.weight_decay = Chance(rng, 0.3) ? 0.0 : Uniform(rng, 0.0f, 0.5f);
  options.decay_vectors = Chance(rng, 0.5);
  options.grad_multiplier = Uniform(rng, -2.0f, 2.0f);
  if (options.kind == Kind::kAdamW) {
    options.beta1 = Uniform(rng, 0.0f, 0.99f);
    options.beta2 = Uniform(rng, 0.5f, 0.9999f);
    options.epsilon = std::pow(10.0, Uniform(rng, -9.0f, -2.0f));
  } else {
    options.momentum = Chance(rng, 0.2) ? 0.0 : Uniform(rng, 0.1f, 0.99f);
    options.nesterov = options.momentum > 0 && Chance(rng, 0.5);
    options.dampening = options.nesterov ? 0.0 : Uniform(rng, 0.0f, 0.9f);
  }
  return options;
}

// Runs both for 25 steps on fresh gradients and compares every parameter and moment.
void ExpectSameUpdates(Backend& backend, const Problem& problem, const OptimizerOptions& options, Rng& rng) {
  struct Parameter {
    std::vector<double> values;
    reference::OptimizerMoments moments;
  };
  const auto head = MakeHead(backend, problem);
  ASSERT_NE(head, nullptr);
  std::map<Param, Parameter> parameters;
  for (Param param : {Param::kWeight, Param::kBias, Param::kNormGain, Param::kNormShift}) {
    parameters[param].values.assign(problem.Values(param).begin(), problem.Values(param).end());
  }
  for (int64_t update = 1; update <= 25; ++update) {
    for (auto& [param, want] : parameters) {
      std::vector<float> gradient(want.values.size());
      for (float& g : gradient) g = Uniform(rng, -1.0f, 1.0f);
      const TensorId id{param, Role::kGradient};
      ASSERT_TRUE(
          head->WriteTensor(id, 0, ShapeOf(head->config(), param).rows, DType::kFloat32, AsBytes(gradient))
              .ok());
      reference::ApplyUpdate(options, update, param != Param::kWeight, {gradient.begin(), gradient.end()},
                             want.values, want.moments);
    }
    ASSERT_TRUE(head->ApplyStep(options, update).ok());
  }
  const auto compare = [&](TensorId id, const std::vector<double>& want) {
    const std::vector<float> got = ReadAll(*head, id);
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_NEAR(got[i], want[i], 3e-6 * (1.0 + std::fabs(want[i])))
          << Name(id.param) << " " << Name(id.role) << " " << i;
    }
  };
  for (const auto& [param, want] : parameters) {
    compare({param, Role::kValue}, want.values);
    if (RequiredState(options) >= OptimizerState::kMomentum)
      compare({param, Role::kMoment1}, want.moments.moment1);
    if (RequiredState(options) == OptimizerState::kAdam)
      compare({param, Role::kMoment2}, want.moments.moment2);
  }
  ExpectZeroGradients(*head);
}

}  // namespace

TEST_P(BackendConformance, OptimizersFollowTheReferenceOver25Steps) {
  using Kind = OptimizerOptions::Kind;
  std::vector<OptimizerOptions> cases = {
      {.learning_rate = 1e-2},
      {.learning_rate = 1e-2, .weight_decay = 0.1, .grad_multiplier = 0.25, .beta1 = 0.8, .beta2 = 0.95},
      {.learning_rate = 1e-2, .weight_decay = 0.1, .decay_vectors = true, .epsilon = 1e-4},
      {.learning_rate = 1e-2, .epsilon = 0.0},
      {.kind = Kind::kSgd, .learning_rate = 0.1},
      {.kind = Kind::kSgd, .learning_rate = 0.1, .weight_decay = 0.02, .grad_multiplier = -0.5},
      {.kind = Kind::kSgd, .learning_rate = 0.1, .weight_decay = 0.02, .momentum = 0.9, .dampening = 0.3},
      {.kind = Kind::kSgd, .learning_rate = 0.1, .decay_vectors = true, .momentum = 0.9, .nesterov = true},
  };
  for (int i = 0; i < 8; ++i) cases.push_back(RandomOptimizer(rng()));
  for (size_t i = 0; i < cases.size(); ++i) {
    const OptimizerOptions& o = cases[i];
    SCOPED_TRACE(absl::StrCat("case ", i, ": kind ", static_cast<int>(o.kind), " lr ", o.learning_rate,
                              " decay ", o.weight_decay, " multiplier ", o.grad_multiplier, " betas ",
                              o.beta1, " ", o.beta2, " epsilon ", o.epsilon, " momentum ", o.momentum,
                              " dampening ", o.dampening, " nesterov ", o.nesterov));
    ProblemSpec spec = Plain({1}, 11, 23);
    spec.config.has_bias = true;
    spec.config.norm = Norm::kLayerNorm;
    spec.config.optimizer_state = OptimizerState::kAdam;
    ASSERT_NO_FATAL_FAILURE(ExpectSameUpdates(backend(), MakeProblem(spec, rng()), o, rng()));
  }
}

// A head whose moments are zeroed steps as one that never stepped with the same values, bit for bit.
TEST_P(BackendConformance, ZeroedMomentsAreThoseOfANewHead) {
  using Kind = OptimizerOptions::Kind;
  for (const OptimizerOptions& options :
       {OptimizerOptions{.learning_rate = 1e-2, .weight_decay = 0.1},
        OptimizerOptions{.kind = Kind::kSgd, .learning_rate = 0.1, .momentum = 0.9, .dampening = 0.3}}) {
    ProblemSpec spec = Plain({1}, 11, 23);
    spec.config.has_bias = true;
    spec.config.norm = Norm::kLayerNorm;
    spec.config.optimizer_state = OptimizerState::kAdam;
    const Problem problem = MakeProblem(spec, rng());
    const auto used = MakeHead(backend(), problem);
    const auto fresh = MakeHead(backend(), problem);
    ASSERT_NE(used, nullptr);
    ASSERT_NE(fresh, nullptr);
    const auto step = [&](std::vector<HeadKernels*> heads, int64_t update) {
      for (Param param : kTrainedParams) {
        std::vector<float> gradient(static_cast<size_t>(ShapeOf(used->config(), param).elements()));
        for (float& g : gradient) g = Uniform(rng(), -1.0f, 1.0f);
        for (HeadKernels* head : heads) {
          const absl::Status written =
              head->WriteTensor({param, Role::kGradient}, 0, ShapeOf(head->config(), param).rows,
                                DType::kFloat32, AsBytes(gradient));
          ASSERT_TRUE(written.ok()) << written;
        }
      }
      for (HeadKernels* head : heads) ASSERT_TRUE(head->ApplyStep(options, update).ok());
    };
    for (int64_t update = 1; update <= 3; ++update) ASSERT_NO_FATAL_FAILURE(step({used.get()}, update));
    for (Param param : kTrainedParams) {
      const std::vector<float> values = ReadAll(*used, {param, Role::kValue});
      ASSERT_TRUE(fresh
                      ->WriteTensor({param, Role::kValue}, 0, ShapeOf(fresh->config(), param).rows,
                                    DType::kFloat32, AsBytes(values))
                      .ok());
    }
    ASSERT_TRUE(used->ZeroMoments().ok());
    for (int64_t update = 1; update <= 2; ++update) {
      ASSERT_NO_FATAL_FAILURE(step({used.get(), fresh.get()}, update));
      for (Param param : kTrainedParams) {
        for (const Role role : {Role::kValue, Role::kMoment1, Role::kMoment2}) {
          ASSERT_EQ(ReadAll(*used, {param, role}), ReadAll(*fresh, {param, role}))
              << Name(param) << " " << Name(role);
        }
      }
    }
  }
}

TEST_P(BackendConformance, AHeadWithoutMomentsHasNoneToZero) {
  HeadConfig config = Plain({1}, 3, 4).config;
  for (const bool trainable : {true, false}) {
    config.optimizer_state = OptimizerState::kNone;
    config.trainable = trainable;
    auto head = backend().CreateHead(config);
    ASSERT_TRUE(head.ok()) << head.status();
    EXPECT_TRUE((*head)->ZeroMoments().ok());
  }
}

TEST_P(BackendConformance, WithEpsilonZeroAParameterWithoutGradientStays) {
  const auto head = MakeHead(backend(), [&] {
    ProblemSpec spec = Plain({1}, 5, 9);
    spec.config.optimizer_state = OptimizerState::kAdam;
    return MakeProblem(spec, rng());
  }());
  ASSERT_NE(head, nullptr);
  const std::vector<float> before = ReadAll(*head, {Param::kWeight, Role::kValue});
  ASSERT_TRUE(head->ApplyStep({.learning_rate = 0.1, .epsilon = 0.0}, 1).ok());
  EXPECT_EQ(ReadAll(*head, {Param::kWeight, Role::kValue}), before);
}

// A bias of -infinity masks a class: an update that does not decay biases leaves it there.
TEST_P(BackendConformance, MaskedClassesStayMasked) {
  using Kind = OptimizerOptions::Kind;
  const OptimizerOptions all[] = {
      {.kind = Kind::kSgd, .learning_rate = 0.1},
      {.kind = Kind::kSgd, .learning_rate = 0.1, .weight_decay = 0.1},
      {.kind = Kind::kSgd, .learning_rate = 0.0, .momentum = 0.9},
      {.kind = Kind::kSgd, .learning_rate = 0.1, .weight_decay = 0.1, .momentum = 0.9, .nesterov = true},
      {.learning_rate = 0.1, .weight_decay = 0.1},
      {.learning_rate = 0.1, .weight_decay = 0.1, .decay_vectors = true}};
  for (const OptimizerOptions& options : all) {
    ProblemSpec spec = Plain({3}, 5, 9);
    spec.config.has_bias = true;
    spec.config.optimizer_state = OptimizerState::kAdam;
    Problem problem = MakeProblem(spec, rng());
    problem.bias[4] = -kInf;
    const auto head = MakeHead(backend(), problem);
    ASSERT_NE(head, nullptr);
    for (int64_t update = 1; update <= 2; ++update) ASSERT_TRUE(head->ApplyStep(options, update).ok());
    EXPECT_EQ(ReadAll(*head, {Param::kBias, Role::kValue})[4], -kInf)
        << "momentum " << options.momentum << ", weight decay " << options.weight_decay;
    EXPECT_EQ(ReadAll(*head, {Param::kBias, Role::kMoment1})[4], 0.0f);
  }
}

// The step changes what the next chunk is computed with.
TEST_P(BackendConformance, StepRefreshesTheComputeWeights) {
  ProblemSpec spec = Plain({20}, 17, 41);
  spec.ignored = 0.0;
  Problem problem = MakeProblem(spec, rng());
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  const double before = RunChunk(*head, problem).slices[0].sums.loss;
  ASSERT_TRUE(head->ApplyStep({.kind = OptimizerOptions::Kind::kSgd, .learning_rate = 0.05}, 1).ok());
  const double after = RunChunk(*head, problem).slices[0].sums.loss;
  EXPECT_LT(after, before - 0.1);
}

TEST_P(BackendConformance, StepRefusesWhatTheHeadCannotDo) {
  HeadConfig config = Plain({1}, 3, 4).config;
  config.optimizer_state = OptimizerState::kMomentum;
  auto head = backend().CreateHead(config);
  ASSERT_TRUE(head.ok()) << head.status();
  using Kind = OptimizerOptions::Kind;
  EXPECT_EQ((*head)->ApplyStep({.kind = Kind::kAdamW}, 1).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ((*head)->ApplyStep({.kind = Kind::kSgd, .learning_rate = -1.0}, 1).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*head)->ApplyStep({.kind = Kind::kSgd}, 0).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE((*head)->ApplyStep({.kind = Kind::kSgd, .momentum = 0.9}, 1).ok());
}

}  // namespace lossd::kernels::testing
