// SPDX-License-Identifier: Apache-2.0
// Whichever work goes first on the GPU, a chunk's results are the same bits: dL/dW on a stream of its own
// comes after what it reads and before what overwrites that.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_backend.h"
#include "tests/kernels/chunk_run.h"
#include "tests/kernels/cuda/cuda_test_device.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::testing::stream_priority_test {
namespace {

constexpr int kChunks = 8;

struct Outcome {
  std::vector<std::vector<float>> hidden;  // of each chunk
  std::vector<float> weight;
  double norm = 0.0;
};

Outcome Train(StreamPriority priority, const std::vector<Problem>& problems) {
  Outcome outcome;
  auto backend = CreateCudaBackend({.workspace_bytes = int64_t{256} << 20, .stream_priority = priority});
  EXPECT_TRUE(backend.ok()) << backend.status();
  if (!backend.ok()) return outcome;
  const auto head = MakeHead(**backend, problems.front());
  for (const Problem& problem : problems) {
    const ChunkRun run = RunChunk(*head, problem);
    EXPECT_TRUE(run.done.ok()) << run.done;
    for (const SliceOutputs& slice : run.slices) outcome.hidden.push_back(slice.grad_hidden);
  }
  const auto norm = head->GradNorm();
  EXPECT_TRUE(norm.ok()) << norm.status();
  outcome.norm = norm.value_or(0.0);
  outcome.weight = ReadGradient(*head, Param::kWeight);
  return outcome;
}

TEST(StreamPriority, ResultsAreTheSameBits) {
  LOSSD_SKIP_WITHOUT_GPU();
  Rng rng = FreshRng();
  for (const Logits logits : {Logits::kStored, Logits::kRecomputed}) {
    for (const Gradients gradients : {Gradients::kExact, Gradients::kFiltered, Gradients::kSampled}) {
      SCOPED_TRACE(absl::StrCat(Name(logits), " logits, ", Name(gradients), " gradients"));
      ProblemSpec spec;
      spec.config = {
          .hidden_size = 512, .vocab_size = 16001, .compute_dtype = DType::kBFloat16, .logits = logits};
      spec.hidden_dtype = DType::kBFloat16;
      spec.slice_rows = {700, 324};
      spec.options = {.gradients = gradients};
      std::vector<Problem> problems;
      for (int i = 0; i < kChunks; ++i) problems.push_back(MakeProblem(spec, rng));
      const Outcome expected = Train(StreamPriority::kNone, problems);
      ASSERT_FALSE(expected.weight.empty());
      for (const StreamPriority priority : {StreamPriority::kHiddenGradients, StreamPriority::kAll}) {
        const Outcome outcome = Train(priority, problems);
        EXPECT_EQ(outcome.norm, expected.norm);
        EXPECT_TRUE(outcome.weight == expected.weight);
        EXPECT_TRUE(outcome.hidden == expected.hidden);
      }
    }
  }
}

}  // namespace
}  // namespace lossd::kernels::testing::stream_priority_test
