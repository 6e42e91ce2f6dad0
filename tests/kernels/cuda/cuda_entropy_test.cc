// SPDX-License-Identifier: Apache-2.0
// Gradients of entropies, as the entropy bonus of reinforcement learning has them, in chunks as large as
// those for which a backend fuses losses on its own accord.
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/cuda_backend.h"
#include "tests/kernels/chunk_run.h"
#include "tests/kernels/cuda/cuda_test_device.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::testing::cuda_entropy_test {
namespace {

struct Case {
  Logits logits;
  Gradients gradients;
  float softcap;
};

constexpr Case kCases[] = {
    {Logits::kStored, Gradients::kExact, 0.0f},      {Logits::kStored, Gradients::kExact, 30.0f},
    {Logits::kStored, Gradients::kFiltered, 0.0f},   {Logits::kStored, Gradients::kSampled, 0.0f},
    {Logits::kStored, Gradients::kSampled, 30.0f},   {Logits::kRecomputed, Gradients::kExact, 0.0f},
    {Logits::kRecomputed, Gradients::kExact, 30.0f}, {Logits::kRecomputed, Gradients::kSampled, 30.0f},
};

ProblemSpec SpecOf(const Case& c) {
  ProblemSpec spec;
  spec.config = {.hidden_size = 520,
                 .vocab_size = 30'001,
                 .compute_dtype = DType::kBFloat16,
                 .optimizer_state = OptimizerState::kNone,
                 .logits = c.logits};
  spec.hidden_dtype = DType::kBFloat16;
  spec.slice_rows = {1024};
  spec.ignored = 0.0;
  spec.options = {.softcap = c.softcap, .gradients = c.gradients};
  spec.grad_loss = spec.grad_lse = spec.grad_entropy = true;
  return spec;
}

std::map<std::string, Choice> ChoicesOf(const ChunkRun& run) {
  std::map<std::string, Choice> choices;
  for (const Choice& choice : run.choices) choices[choice.what] = choice;
  return choices;
}

class CudaEntropy : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    LOSSD_SKIP_WITHOUT_HOPPER_GPU();
    auto backend = CreateCudaBackend({.workspace_bytes = int64_t{256} << 20});
    ASSERT_TRUE(backend.ok()) << backend.status();
    backend_ = *std::move(backend);
    Rng rng = FreshRng();
    problem_ = MakeProblem(SpecOf(GetParam()), rng);
    head_ = MakeHead(*backend_, problem_);
    ASSERT_NE(head_, nullptr);
  }

  std::unique_ptr<Backend> backend_;
  Problem problem_;
  std::unique_ptr<HeadKernels> head_;
};

TEST_P(CudaEntropy, IsInTheLogitsProduct) {
  const Case& c = GetParam();
  const auto choices = ChoicesOf(RunChunk(*head_, problem_));
  const bool exact = c.gradients == Gradients::kFiltered;  // the entropy's gradient cannot be filtered
  EXPECT_EQ(choices.at("gradients").choice, Name(exact ? Gradients::kExact : c.gradients));
  EXPECT_EQ(choices.at("loss").choice, "in the logits product") << choices.at("loss").reason;
  EXPECT_EQ(choices.at("weight gradient").choice,
            c.logits == Logits::kStored ? "own product" : "library product");
}

TEST_P(CudaEntropy, GivesTheSameBits) {
  const ChunkRun first = RunChunk(*head_, problem_, {.independent = true});
  const std::vector<float> gradient = ReadGradient(*head_, Param::kWeight);
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(head_->ZeroGradients().ok());
    const ChunkRun run = RunChunk(*head_, problem_, {.independent = true});
    ASSERT_EQ(run.slices[0].entropy, first.slices[0].entropy);
    ASSERT_EQ(run.slices[0].grad_hidden, first.slices[0].grad_hidden);
    ASSERT_EQ(ReadGradient(*head_, Param::kWeight), gradient);
  }
}

std::string CaseName(const ::testing::TestParamInfo<Case>& test) {
  const Case& c = test.param;
  return std::string(Name(c.logits)) + "_" + std::string(Name(c.gradients)) +
         (c.softcap > 0.0f ? "_capped" : "");
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaEntropy, ::testing::ValuesIn(kCases), CaseName);

}  // namespace
}  // namespace lossd::kernels::testing::cuda_entropy_test
