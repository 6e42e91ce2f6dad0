// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/heads/head_plan.h"

#include <algorithm>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/heads/head_memory.h"

namespace lossd::kernels::cuda::head_plan_test {
namespace {

// An H200.
PlanDevice Hopper() {
  PlanDevice device;
  device.limits.multiprocessors = 132;
  device.limits.has_clusters = true;
  device.limits.is_hopper = true;
  device.limits.fused_clusters = 66;
  device.limits.has_branches = true;
  return device;
}

HeadConfig Llama() { return {.hidden_size = 4096, .vocab_size = 128'256, .compute_dtype = DType::kBFloat16}; }

std::string ChoiceOf(const HeadPlan& plan, const std::string& what) {
  const auto it = std::find_if(plan.choices.begin(), plan.choices.end(),
                               [&](const Choice& choice) { return choice.what == what; });
  return it == plan.choices.end() ? "" : it->choice;
}

TEST(HeadPlan, IsTheMemoryThatAHeadAllocates) {
  const auto plan = PlanHead(Llama(), Hopper());
  ASSERT_TRUE(plan.ok()) << plan.status();
  const HeadSizes sizes = SizesFor(Llama(), kDefaultWorkspace, 16384, 132, true);
  EXPECT_EQ(plan->sizes.chunk_rows, sizes.chunk_rows);
  EXPECT_EQ(plan->memory.by_kind, PlanMemory(Llama(), sizes, 132).by_kind);
  EXPECT_EQ(ChoiceOf(*plan, "chunk"), "up to 8192 rows");
  EXPECT_EQ(ChoiceOf(*plan, "loss"), "in the logits product");
  EXPECT_EQ(ChoiceOf(*plan, "blocks"), "");
}

TEST(HeadPlan, SaysTheBlocksOfRecomputedLogits) {
  HeadConfig config = Llama();
  config.logits = Logits::kRecomputed;
  const auto plan = PlanHead(config, Hopper());
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->memory[MemoryKind::kWorkspace], int64_t{64} << 20);
  EXPECT_THAT(ChoiceOf(*plan, "blocks"), ::testing::ContainsRegex("^[0-9]+ rows, [0-9]+ classes$"));
  EXPECT_EQ(ChoiceOf(*plan, "weight gradient"), "library product");
}

TEST(HeadPlan, OfAnotherGpuDoesNotFuseTheLoss) {
  PlanDevice device = Hopper();
  device.limits.is_hopper = false;
  device.limits.fused_clusters = 0;
  const auto plan = PlanHead(Llama(), device);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(ChoiceOf(*plan, "loss"), "after the logits product");
}

TEST(HeadPlan, PartsOfAVocabularyHaveTheSameRowsAndTheirShareOfTheWeights) {
  HeadConfig config = Llama();
  config.split = Split::kVocabulary;
  const auto whole = PlanHead(config, Hopper());
  PlanDevice part = Hopper();
  part.replica = {0, 2};
  const auto first = PlanHead(config, part);
  part.replica = {1, 2};
  const auto second = PlanHead(config, part);
  ASSERT_TRUE(whole.ok() && first.ok() && second.ok());
  EXPECT_EQ(first->sizes.chunk_rows, second->sizes.chunk_rows);
  const int64_t sum = first->memory[MemoryKind::kWeights] + second->memory[MemoryKind::kWeights];
  EXPECT_GE(sum, whole->memory[MemoryKind::kWeights]);
  EXPECT_LE(sum, whole->memory[MemoryKind::kWeights] + 2 * kDevicePage);  // each is whole pages
}

// Of a GPU without classes there is only padding: what it holds of the head is next to nothing, and what it
// computes chunks with is what the others do.
TEST(HeadPlan, APartMayHaveNoClasses) {
  for (const Logits logits : {Logits::kStored, Logits::kRecomputed}) {
    HeadConfig config = Llama();
    config.split = Split::kVocabulary;
    config.has_bias = true;
    config.logits = logits;
    config.shares = {0, 3, 0, 1, 0};
    PlanDevice part = Hopper();
    part.replica = {1, 5};
    const auto most = PlanHead(config, part);
    ASSERT_TRUE(most.ok()) << most.status();
    for (const int index : {0, 2, 4}) {
      SCOPED_TRACE(index);
      part.replica = {index, 5};
      const auto none = PlanHead(config, part);
      ASSERT_TRUE(none.ok()) << none.status();
      EXPECT_EQ(none->sizes.vocab, 0);
      EXPECT_EQ(none->sizes.padded_vocab, 8);
      EXPECT_EQ(none->sizes.chunk_rows, most->sizes.chunk_rows);
      EXPECT_EQ(none->sizes.planned_vocab(), most->sizes.planned_vocab());
      EXPECT_EQ(none->sizes.arena_bytes, most->sizes.arena_bytes);
      EXPECT_EQ(none->memory[MemoryKind::kWeights], kDevicePage);
      EXPECT_EQ(none->memory[MemoryKind::kGradients], kDevicePage);
      EXPECT_EQ(ChoiceOf(*none, "loss"), ChoiceOf(*most, "loss"));
      EXPECT_EQ(ChoiceOf(*none, "chunk"), ChoiceOf(*most, "chunk"));
    }
  }
}

TEST(HeadPlan, RefusesWhatTheBackendRefuses) {
  HeadConfig config = Llama();
  config.vocab_size = 0;
  EXPECT_THAT(PlanHead(config, Hopper()).status().message(), ::testing::HasSubstr("vocab_size"));
  config = Llama();
  config.workspace_bytes = 1024;
  EXPECT_THAT(PlanHead(config, Hopper()).status().message(), ::testing::HasSubstr("workspace_bytes"));
}

}  // namespace
}  // namespace lossd::kernels::cuda::head_plan_test
