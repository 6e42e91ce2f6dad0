// SPDX-License-Identifier: Apache-2.0
// Conformance tests of backends (backend_conformance.h) about what a head holds: its memory, optimizer steps,
// and its tensors.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "kernels/backend.h"
#include "kernels/reference/reference.h"
#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/chunk_run.h"

namespace lossd::kernels::testing {

// ---- Memory ----
// What heads and buffers take, and what a backend says that it chose.

namespace {

using ::testing::HasSubstr;

}  // namespace

TEST_P(BackendConformance, PlanIsWhatAHeadHolds) {
  for (int i = 0; i < 8; ++i) {
    HeadConfig config = Random(1, UniformInt(rng(), 1, 90), UniformInt(rng(), 1, 300)).config;
    config.optimizer_state = static_cast<OptimizerState>(UniformInt(rng(), 0, 2));
    config.trainable = Chance(rng(), 0.7);
    // Ranks keep memory for chunks of their largest head.
    ASSERT_TRUE(backend().CreateHead(config).ok());
    const MemoryBytes before = backend().memory().current;
    const auto plan = backend().PlanHead(config);
    ASSERT_TRUE(plan.ok()) << plan.status();
    {
      auto head = backend().CreateHead(config);
      ASSERT_TRUE(head.ok()) << head.status();
      EXPECT_GE((*head)->chunk_rows(), 1);
      EXPECT_EQ((*head)->config(), config);
      EXPECT_GE(plan->by_kind[0], config.vocab_size * config.hidden_size * 4);
      for (size_t kind = 0; kind < kMemoryKinds; ++kind) {
        EXPECT_EQ((*head)->memory().by_kind[kind], plan->by_kind[kind]);
        EXPECT_EQ(backend().memory().current.by_kind[kind] - before.by_kind[kind], plan->by_kind[kind]);
      }
      EXPECT_GE(backend().memory().peak_total, backend().memory().current.Total());
    }
    EXPECT_EQ(backend().memory().current.by_kind, before.by_kind);
  }
}

TEST_P(BackendConformance, RefusesBadHeads) {
  HeadConfig config = Plain({1}, 0, 4).config;
  EXPECT_EQ(backend().PlanHead(config).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(backend().CreateHead(config).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_P(BackendConformance, AHeadKeepsToItsOwnWorkspaceLimit) {
  HeadConfig config = Plain({1}, 24, 5000).config;
  for (const int64_t limit : {int64_t{8} << 20, int64_t{64} << 20}) {
    config.workspace_bytes = limit;
    const auto plan = backend().PlanHead(config);
    ASSERT_TRUE(plan.ok()) << plan.status();
    constexpr int64_t kPages = int64_t{4} << 20;  // two buffers may be rounded up
    EXPECT_LE((*plan)[MemoryKind::kWorkspace] / GetParam().devices,
              recomputes_logits() ? limit : limit + kPages);
  }
  config.workspace_bytes = 10;
  EXPECT_FALSE(backend().PlanHead(config).ok());
  EXPECT_FALSE(backend().CreateHead(config).ok());
  config.workspace_bytes = -1;
  EXPECT_EQ(backend().PlanHead(config).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_P(BackendConformance, StagingIsCountedAndAligned) {
  const int64_t before = backend().memory().current[MemoryKind::kStaging];
  {
    auto staging = backend().AllocateStaging(1001);
    ASSERT_TRUE(staging.ok()) << staging.status();
    EXPECT_EQ((*staging)->bytes().size(), 1001u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>((*staging)->bytes().data()) % 64, 0u);
    std::fill((*staging)->bytes().begin(), (*staging)->bytes().end(), uint8_t{7});
    EXPECT_GE(backend().memory().current[MemoryKind::kStaging] - before, 1001);
  }
  EXPECT_EQ(backend().memory().current[MemoryKind::kStaging], before);
  EXPECT_EQ(backend().AllocateStaging(-1).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_P(BackendConformance, TakesMemoryOfOthersAsStaging) {
  const size_t bytes = size_t{1} << 20;
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const int64_t before = backend().memory().current[MemoryKind::kStaging];
  for (int round = 0; round < 2; ++round) {
    auto adopted = backend().AdoptStaging({static_cast<uint8_t*>(memory), bytes}, {});
    ASSERT_TRUE(adopted.ok()) << adopted.status();
    EXPECT_EQ((*adopted)->bytes().data(), memory);
    EXPECT_EQ((*adopted)->bytes().size(), bytes);
    EXPECT_EQ(backend().memory().current[MemoryKind::kStaging] - before, static_cast<int64_t>(bytes));
  }
  EXPECT_EQ(backend().memory().current[MemoryKind::kStaging], before);
  munmap(memory, bytes);
}

TEST_P(BackendConformance, RetainedMemoryIsCountedAndBounded) {
  const int64_t before = backend().memory().current[MemoryKind::kRetained];
  const Problem problem = MakeProblem(Plain({5}, 16, 9), rng());
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  {
    auto retained = backend().AllocateRetained(RetainedBytes(problem) - 4);
    ASSERT_TRUE(retained.ok()) << retained.status();
    EXPECT_EQ((*retained)->size(), RetainedBytes(problem) - 4);
    EXPECT_GE(backend().memory().current[MemoryKind::kRetained] - before, (*retained)->size());
    EXPECT_EQ(RunChunk(*head, problem, {.retained = retained->get()}).results.code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(RunChunk(*head, problem, {.retained = retained->get(), .take_retained = true}).results.code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(backend().memory().current[MemoryKind::kRetained], before);
  EXPECT_EQ(backend().AllocateRetained(-1).status().code(), absl::StatusCode::kInvalidArgument);
  ExpectZeroGradients(*head);
}

// Beside a trainer that takes what it finds free: whatever is computed, read or stepped, a head holds what it
// was planned with, at no time more.
TEST_P(GradientsConformance, AHeadNeverGrows) {
  ProblemSpec spec = Plain({40, 24}, 24, 300);
  spec.config.has_bias = spec.config.has_class_weights = true;
  spec.config.norm = Norm::kLayerNorm;
  spec.config.optimizer_state = OptimizerState::kAdam;
  const Problem first = MakeProblem(spec, rng());
  const auto head = MakeHead(backend(), first);
  ASSERT_NE(head, nullptr);
  auto retained = backend().AllocateRetained(RetainedBytes(first));
  ASSERT_TRUE(retained.ok()) << retained.status();
  RunChunk(*head, first);  // ranks keep memory for chunks of their largest head
  const MemoryBytes held = head->memory();
  const MemoryStats before = backend().memory();
  int64_t update = 0;
  for (const Gradients gradients :
       {Gradients::kExact, Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
    spec.options.gradients = gradients;
    for (const ProblemSpec& with_option : EachOptionAlone(spec)) {
      EXPECT_TRUE(RunChunk(*head, MakeProblem(with_option, rng())).done.ok());
    }
    ProblemSpec largest = spec;
    largest.slice_rows.assign(static_cast<size_t>(head->chunk_rows() / head->slice_rows()),
                              head->slice_rows());
    EXPECT_TRUE(RunChunk(*head, MakeProblem(largest, rng())).done.ok());
    const Problem deferred = MakeProblem(spec, rng());
    EXPECT_TRUE(RunChunk(*head, deferred, {.retained = retained->get()}).done.ok());
    EXPECT_TRUE(RunChunk(*head, deferred, {.retained = retained->get(), .take_retained = true}).done.ok());
    EXPECT_TRUE(head->GradNorm().ok());
    for (const Role role : {Role::kGradient, Role::kMoment2}) ReadAll(*head, {Param::kWeight, role});
    EXPECT_TRUE(head->ApplyStep({.learning_rate = 1e-3}, ++update).ok());
  }
  EXPECT_EQ(head->memory().by_kind, held.by_kind);
  EXPECT_EQ(backend().memory().current.by_kind, before.current.by_kind);
  EXPECT_EQ(backend().memory().peak.by_kind, before.peak.by_kind);
  EXPECT_EQ(backend().memory().peak_total, before.peak_total);
}

TEST_P(GradientsConformance, SaysWhatItChose) {
  Problem problem = MakeProblem(Plain({12}, 24, 300), rng());
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  const std::vector<Choice> of_head = head->Describe();
  EXPECT_FALSE(of_head.empty());
  EXPECT_EQ(of_head.front().what, "chunk");
  EXPECT_THAT(of_head.front().choice, HasSubstr(absl::StrCat(head->chunk_rows())));
  for (const Choice& choice : of_head) {
    EXPECT_NE(choice.what, "");
    EXPECT_NE(choice.choice, "");
    EXPECT_LE(choice.workspace_bytes, head->memory()[MemoryKind::kWorkspace]) << choice.what;
  }
  const ChunkRun exact = RunChunk(*head, problem);
  ExpectGradients(exact, Gradients::kExact);
  EXPECT_EQ(RunChunk(*head, problem).choices, exact.choices);
  problem.options.gradients = Gradients::kFiltered;
  ExpectGradients(RunChunk(*head, problem), Gradients::kFiltered);
  problem.options.label_smoothing = -1.0f;
  EXPECT_TRUE(RunChunk(*head, problem).choices.empty()) << "it was refused";
}

// ---- Steps ----
// Optimizer steps, against the double-precision reference.

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

// ---- Lazy rows ----
// Steps that leave rows of the weight alone whose gradient is 0.

namespace {

ProblemSpec WithState(ProblemSpec spec) {
  spec.config.has_bias = true;
  spec.config.norm = Norm::kLayerNorm;
  spec.config.optimizer_state = OptimizerState::kAdam;
  return spec;
}

// A gradient [rows, cols] and which of its rows are idle: every element +0, or each +0 or -0. Other rows have
// one element that is not 0, or all.
struct LazyGradient {
  std::vector<float> values;
  std::vector<bool> idle;
};

LazyGradient DrawLazyGradient(int64_t rows, int64_t cols, Rng& rng) {
  LazyGradient gradient{std::vector<float>(static_cast<size_t>(rows * cols)),
                        std::vector<bool>(static_cast<size_t>(rows))};
  for (int64_t row = 0; row < rows; ++row) {
    float* const values = gradient.values.data() + row * cols;
    const int64_t kind = UniformInt(rng, 0, 3);
    gradient.idle[static_cast<size_t>(row)] = kind <= 1;
    for (int64_t c = 0; c < cols; ++c) {
      if (kind == 1 || kind == 2) values[c] = Chance(rng, 0.5) ? -0.0f : 0.0f;
      if (kind == 3) values[c] = Uniform(rng, 0.01f, 1.0f) * (Chance(rng, 0.5) ? -1.0f : 1.0f);
    }
    if (kind == 2) values[UniformInt(rng, 0, cols - 1)] = Uniform(rng, 0.01f, 1.0f);
  }
  return gradient;
}

void WriteGradient(HeadKernels& head, Param param, const std::vector<float>& values) {
  const absl::Status written = head.WriteTensor(
      {param, Role::kGradient}, 0, ShapeOf(head.config(), param).rows, DType::kFloat32, AsBytes(values));
  ASSERT_TRUE(written.ok()) << written;
}

std::vector<uint32_t> Bits(const std::vector<float>& values) {
  std::vector<uint32_t> bits(values.size());
  std::memcpy(bits.data(), values.data(), values.size() * sizeof(float));
  return bits;
}

// What a step may change: values and moments, [role][element].
std::vector<std::vector<float>> StateOf(HeadKernels& head, Param param) {
  std::vector<std::vector<float>> state;
  for (const Role role : {Role::kValue, Role::kMoment1, Role::kMoment2})
    state.push_back(ReadAll(head, {param, role}));
  return state;
}

void ExpectPlainZeroGradients(HeadKernels& head) {
  ExpectZeroGradients(head);
  for (const uint32_t bits : Bits(ReadGradient(head, Param::kWeight))) ASSERT_EQ(bits, 0u) << "a -0 is left";
}

// Some steps on fresh gradients, compared with the reference; idle rows keep every bit.
void ExpectLazyUpdates(Backend& backend, const Problem& problem, const OptimizerOptions& options, Rng& rng) {
  const auto head = MakeHead(backend, problem);
  ASSERT_NE(head, nullptr);
  std::map<Param, std::vector<double>> values;
  std::map<Param, reference::OptimizerMoments> moments;
  for (const Param param : kTrainedParams) {
    values[param].assign(problem.Values(param).begin(), problem.Values(param).end());
  }
  for (int64_t update = 1; update <= 4; ++update) {
    std::vector<bool> idle;
    for (const Param param : kTrainedParams) {
      const TensorShape shape = ShapeOf(head->config(), param);
      const LazyGradient gradient = DrawLazyGradient(shape.rows, shape.cols, rng);
      if (param == Param::kWeight) idle = gradient.idle;
      ASSERT_NO_FATAL_FAILURE(WriteGradient(*head, param, gradient.values));
      reference::ApplyUpdate(options, update, param != Param::kWeight,
                             {gradient.values.begin(), gradient.values.end()}, values[param], moments[param],
                             static_cast<size_t>(shape.cols));
    }
    const std::vector<std::vector<float>> before = StateOf(*head, Param::kWeight);
    ASSERT_TRUE(head->ApplyStep(options, update).ok());
    const std::vector<std::vector<float>> after = StateOf(*head, Param::kWeight);
    const auto cols = static_cast<size_t>(problem.config.hidden_size);
    for (size_t role = 0; role < before.size(); ++role) {
      const std::vector<uint32_t> was = Bits(before[role]), is = Bits(after[role]);
      for (size_t i = 0; i < is.size(); ++i) {
        if (!idle[i / cols]) continue;
        ASSERT_EQ(is[i], was[i]) << "update " << update << ", idle row " << i / cols;
      }
    }
    ASSERT_NO_FATAL_FAILURE(ExpectPlainZeroGradients(*head));
  }
  const auto compare = [&](TensorId id, const std::vector<double>& want) {
    const std::vector<float> got = ReadAll(*head, id);
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_NEAR(got[i], want[i], 3e-6 * (1.0 + std::fabs(want[i])))
          << Name(id.param) << " " << Name(id.role) << " " << i;
    }
  };
  for (const Param param : kTrainedParams) {
    compare({param, Role::kValue}, values[param]);
    if (RequiredState(options) >= OptimizerState::kMomentum)
      compare({param, Role::kMoment1}, moments[param].moment1);
    if (RequiredState(options) == OptimizerState::kAdam)
      compare({param, Role::kMoment2}, moments[param].moment2);
  }
}

// AdamW, SGD, and SGD with momentum, with decay, lazy.
std::vector<OptimizerOptions> LazyOptimizers() {
  using Kind = OptimizerOptions::Kind;
  std::vector<OptimizerOptions> all = {
      {.learning_rate = 1e-2, .weight_decay = 0.1},
      {.kind = Kind::kSgd, .learning_rate = 0.1, .weight_decay = 0.02},
      {.kind = Kind::kSgd, .learning_rate = 0.1, .weight_decay = 0.02, .momentum = 0.9, .dampening = 0.3}};
  for (OptimizerOptions& options : all) options.lazy_rows = true;
  return all;
}

}  // namespace

TEST_P(BackendConformance, LazyRowsFollowTheReference) {
  std::vector<OptimizerOptions> cases = LazyOptimizers();
  cases.push_back({.learning_rate = 1e-2, .epsilon = 0.0, .lazy_rows = true});
  for (int i = 0; i < 2; ++i) {
    cases.push_back(RandomOptimizer(rng()));
    cases.back().lazy_rows = true;
  }
  // Rows of one element, of less than a block of threads takes at once and of more.
  const int64_t shapes[][2] = {{1, 40}, {11, 23}, {130, 67}, {1100, 9}};
  for (const auto& [hidden_size, vocab_size] : shapes) {
    for (size_t i = 0; i < cases.size(); ++i) {
      const OptimizerOptions& o = cases[i];
      SCOPED_TRACE(absl::StrCat("D ", hidden_size, " V ", vocab_size, " case ", i, ": kind ",
                                static_cast<int>(o.kind), " lr ", o.learning_rate, " decay ", o.weight_decay,
                                " multiplier ", o.grad_multiplier, " betas ", o.beta1, " ", o.beta2,
                                " epsilon ", o.epsilon, " momentum ", o.momentum, " dampening ", o.dampening,
                                " nesterov ", o.nesterov));
      const Problem problem = MakeProblem(WithState(Plain({1}, hidden_size, vocab_size)), rng());
      ASSERT_NO_FATAL_FAILURE(ExpectLazyUpdates(backend(), problem, o, rng()));
    }
  }
}

// Where every row has a gradient a lazy step is a dense one, bit for bit, and rows are computed with the new
// weights afterwards.
TEST_P(BackendConformance, LazyStepsWithoutIdleRowsAreDense) {
  for (const OptimizerOptions& options : LazyOptimizers()) {
    ProblemSpec spec = WithState(Plain({20}, 83, 41));
    spec.ignored = 0.0;
    Problem problem = MakeProblem(spec, rng());
    const auto lazy = MakeHead(backend(), problem), dense = MakeHead(backend(), problem);
    ASSERT_NE(lazy, nullptr);
    ASSERT_NE(dense, nullptr);
    OptimizerOptions dense_options = options;
    dense_options.lazy_rows = false;
    for (int64_t update = 1; update <= 3; ++update) {
      for (const Param param : kTrainedParams) {
        std::vector<float> gradient(static_cast<size_t>(ShapeOf(lazy->config(), param).elements()));
        for (float& g : gradient) g = Uniform(rng(), 0.1f, 1.0f);
        ASSERT_NO_FATAL_FAILURE(WriteGradient(*lazy, param, gradient));
        ASSERT_NO_FATAL_FAILURE(WriteGradient(*dense, param, gradient));
      }
      ASSERT_TRUE(lazy->ApplyStep(options, update).ok());
      ASSERT_TRUE(dense->ApplyStep(dense_options, update).ok());
      for (const Param param : kTrainedParams) EXPECT_EQ(StateOf(*lazy, param), StateOf(*dense, param));
    }
    problem.accumulate_gradients = false;
    const double loss = RunChunk(*lazy, problem).slices[0].sums.loss;
    EXPECT_NEAR(loss, RunChunk(*dense, problem).slices[0].sums.loss, 1e-5 * std::fabs(loss));
  }
}

// What counts as a gradient: subnormal numbers, whatever multiplies them, and numbers that are not finite,
// which do to their row what they do in a dense step.
TEST_P(BackendConformance, LazyRowsTakeEveryGradientButZero) {
  constexpr int64_t kHidden = 9, kVocab = 12;
  for (const OptimizerOptions& options : LazyOptimizers()) {
    const Problem problem = MakeProblem(WithState(Plain({1}, kHidden, kVocab)), rng());
    const auto lazy = MakeHead(backend(), problem), dense = MakeHead(backend(), problem);
    ASSERT_NE(lazy, nullptr);
    ASSERT_NE(dense, nullptr);
    std::vector<float> gradient(kHidden * kVocab);
    gradient[1 * kHidden + 8] = 1e-42f;
    gradient[4 * kHidden + 3] = -std::numeric_limits<float>::denorm_min();
    gradient[7 * kHidden] = kNan;
    gradient[11 * kHidden + 2] = -kInf;
    OptimizerOptions dense_options = options;
    dense_options.lazy_rows = false;
    for (int64_t update = 1; update <= 2; ++update) {
      const std::vector<std::vector<float>> before = StateOf(*lazy, Param::kWeight);
      for (HeadKernels* const head : {lazy.get(), dense.get()}) {
        ASSERT_NO_FATAL_FAILURE(WriteGradient(*head, Param::kWeight, gradient));
        OptimizerOptions own = head == lazy.get() ? options : dense_options;
        own.grad_multiplier = update == 1 ? 0.0 : 1.0;
        ASSERT_TRUE(head->ApplyStep(own, update).ok());
      }
      const std::vector<std::vector<float>> after = StateOf(*lazy, Param::kWeight);
      const std::vector<std::vector<float>> want = StateOf(*dense, Param::kWeight);
      for (size_t role = 0; role < after.size(); ++role) {
        for (size_t i = 0; i < after[role].size(); ++i) {
          const size_t row = i / kHidden;
          const bool updated = row == 1 || row == 4 || row == 7 || row == 11;
          const float wanted = updated ? want[role][i] : before[role][i];
          if (std::isnan(wanted)) {
            EXPECT_TRUE(std::isnan(after[role][i])) << "row " << row;
          } else {
            EXPECT_EQ(after[role][i], wanted) << "row " << row;
          }
        }
      }
      EXPECT_NE(after[0][1 * kHidden], before[0][1 * kHidden]) << "it decays";
    }
    ExpectPlainZeroGradients(*lazy);
  }
}

// Rows of a chunk give gradients to their targets alone, because filtered gradients leave out all other
// classes. Of several devices one computes rows of a target that another one updates.
TEST_P(GradientsConformance, LazyRowsAreThoseOfAllDevices) {
  constexpr int64_t kHidden = 24, kVocab = 60;
  ProblemSpec spec = Plain({90, 70}, kHidden, kVocab);
  spec.config.optimizer_state = OptimizerState::kAdam;
  spec.ignored = 0.0;
  spec.options.gradients = Gradients::kFiltered;
  spec.options.filter_epsilon = 0.5f;  // p is 1 / V
  Problem problem = MakeProblem(spec, rng());
  std::fill(problem.weight.begin(), problem.weight.end(), 0.0f);
  for (SliceData& slice : problem.slices) {
    for (size_t row = 0; row < slice.targets.size(); ++row)
      slice.targets[row] = row < slice.targets.size() / 2 ? kVocab - 1 : 3;
  }
  const auto head = MakeHead(backend(), problem);
  ASSERT_NE(head, nullptr);
  // Moments that are not 0, of all classes.
  ASSERT_NO_FATAL_FAILURE(WriteGradient(*head, Param::kWeight, std::vector<float>(kHidden * kVocab, 0.5f)));
  ASSERT_TRUE(head->ApplyStep({.learning_rate = 0.0}, 1).ok());
  const std::vector<std::vector<float>> before = StateOf(*head, Param::kWeight);
  EXPECT_TRUE(RunChunk(*head, problem).done.ok());
  ASSERT_TRUE(head->ApplyStep({.learning_rate = 0.1, .weight_decay = 0.1, .lazy_rows = true}, 2).ok());
  const std::vector<std::vector<float>> after = StateOf(*head, Param::kWeight);
  for (size_t role = 0; role < after.size(); ++role) {
    for (int64_t row = 0; row < kVocab; ++row) {
      const auto row_of = [&](const std::vector<float>& all) {
        return Bits({all.begin() + row * kHidden, all.begin() + (row + 1) * kHidden});
      };
      const bool is_target = row == 3 || row == kVocab - 1;
      EXPECT_EQ(row_of(after[role]) != row_of(before[role]), is_target) << "row " << row;
    }
  }
  ExpectPlainZeroGradients(*head);
}

// ---- Tensors ----
// Initial values, reading and writing, gradients from outside, the gradient norm.

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
