// SPDX-License-Identifier: Apache-2.0
// What heads and buffers take, and what a backend says that it chose.
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "kernels/staging_adopter.h"
#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/chunk_run.h"

namespace lossd::kernels::testing {
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
    auto adopted = AdoptStaging(&backend(), {static_cast<uint8_t*>(memory), bytes});
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

}  // namespace lossd::kernels::testing
