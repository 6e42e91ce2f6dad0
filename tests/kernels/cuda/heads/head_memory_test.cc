// SPDX-License-Identifier: Apache-2.0
// Tests of head_memory.h: the memory of a head, and the plan of its buffers.
#include "kernels/cuda/heads/head_memory.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/device/device_memory.h"

// ---- Head memory ----

namespace lossd::kernels::cuda::head_memory_test {
namespace {

constexpr int kMultiprocessors = 132;
constexpr int64_t kServerLimit = int64_t{2} << 30;

HeadConfig Config(int64_t vocab, int64_t hidden, DType compute, Norm norm, bool bias, bool trainable,
                  Logits logits, int64_t workspace_bytes) {
  return {.hidden_size = hidden,
          .vocab_size = vocab,
          .has_bias = bias,
          .has_class_weights = bias,
          .norm = norm,
          .compute_dtype = compute,
          .trainable = trainable,
          .logits = logits,
          .workspace_bytes = workspace_bytes};
}

HeadSizes SizesOf(const HeadConfig& config, bool fused) {
  return SizesFor(config, kServerLimit, 16384, kMultiprocessors, fused);
}

// A head and what it is planned to have.
struct Case {
  HeadConfig config;
  bool fused;
  int64_t chunk_rows, arena_bytes, workspace, slots;
};
const Case kCases[] = {
    {Config(256'000, 2'304, DType::kBFloat16, Norm::kNone, false, true, Logits::kStored, 0), true, 3'840, 0,
     1'988'100'096, 88'080'384},
    {Config(128'256, 4'096, DType::kBFloat16, Norm::kNone, false, true, Logits::kStored, 0), true, 7'424, 0,
     1'927'282'688, 184'549'376},
    {Config(128'256, 4'096, DType::kFloat16, Norm::kRmsNorm, true, true, Logits::kStored, 0), true, 6'656, 0,
     1'763'704'832, 383'778'816},
    {Config(152'064, 8'192, DType::kFloat32, Norm::kLayerNorm, true, true, Logits::kStored, 0), false, 2'816,
     0, 1'772'093'440, 371'195'904},
    {Config(257, 127, DType::kBFloat16, Norm::kNone, true, true, Logits::kStored, 0), false, 16'384, 0,
     98'566'144, 16'777'216},
    {Config(128'256, 4'096, DType::kBFloat16, Norm::kNone, false, false, Logits::kStored, 0), true, 7'424, 0,
     1'927'282'688, 184'549'376},
    {Config(131'072, 5'120, DType::kBFloat16, Norm::kNone, false, true, Logits::kStored, 8'388'608), true, 8,
     0, 6'291'456, 6'291'456},
    {Config(256'000, 2'304, DType::kBFloat16, Norm::kNone, false, true, Logits::kRecomputed, 0), true, 4'096,
     59'120'384, 67'108'864, 58'720'256},
    {Config(128'256, 4'096, DType::kBFloat16, Norm::kLayerNorm, true, true, Logits::kRecomputed, 0), true,
     4'096, 54'762'240, 67'108'864, 203'423'744},
    {Config(131'072, 5'120, DType::kFloat32, Norm::kNone, true, true, Logits::kRecomputed, 0), false, 4'096,
     59'301'376, 67'108'864, 253'755'392},
    {Config(152'064, 8'192, DType::kFloat16, Norm::kRmsNorm, true, true, Logits::kRecomputed, 314'572'800),
     true, 4'096, 285'317'888, 314'572'800, 471'859'200},
    {Config(7, 3, DType::kBFloat16, Norm::kNone, true, true, Logits::kRecomputed, 0), true, 4'096, 1'903'104,
     4'194'304, 6'291'456},  // room for top classes where dx is smaller than these
};

// These numbers are what operators have seen their heads take: a change of them is a change for operators.
TEST(HeadMemory, PlansTheseBytes) {
  for (const Case& c : kCases) {
    const HeadSizes sizes = SizesOf(c.config, c.fused);
    const MemoryBytes plan = PlanMemory(c.config, sizes, kMultiprocessors);
    EXPECT_EQ(sizes.chunk_rows, c.chunk_rows) << c.config.vocab_size;
    EXPECT_EQ(sizes.arena_bytes, c.arena_bytes) << c.config.vocab_size;
    EXPECT_EQ(plan[MemoryKind::kWorkspace], c.workspace) << c.config.vocab_size;
    EXPECT_EQ(plan[MemoryKind::kSlots], c.slots) << c.config.vocab_size;
  }
}

// What is laid out over real memory ends where the count of bytes does, and no part lies outside.
TEST(HeadMemory, LiesWithinItsBytes) {
  auto* const base = reinterpret_cast<uint8_t*>(uintptr_t{1} << 40);
  auto* const slots = reinterpret_cast<uint8_t*>(uintptr_t{1} << 41);
  for (const Case& c : kCases) {
    const HeadSizes sizes = SizesOf(c.config, c.fused);
    const Workspace counted = Workspace::Carve(c.config, sizes, kMultiprocessors, nullptr, nullptr);
    const Workspace w = Workspace::Carve(c.config, sizes, kMultiprocessors, base, slots);
    EXPECT_EQ(w.bytes, counted.bytes);
    EXPECT_EQ(w.slot_bytes, counted.slot_bytes);
    for (size_t i = 0; i < kRegions; ++i) {
      const auto region = static_cast<Region>(i);
      const bool in_slots = region == Region::kHiddenGradient;
      const uint8_t* const from = in_slots ? slots : base;
      if (w.paths[region] == nullptr) continue;
      EXPECT_GE(w.paths[region], from);
      EXPECT_LT(w.paths[region], from + (in_slots ? w.slot_bytes : w.bytes));
    }
    EXPECT_NE(w.paths[Region::kHiddenGradient], nullptr);
    EXPECT_EQ(w.slots[0].hidden == w.slots[1].hidden, c.config.norm != Norm::kNone);
    EXPECT_EQ(w.mean != nullptr, c.config.norm != Norm::kNone);
  }
}

// Parts of a head plan chunks and blocks alike, whatever classes they have, and pad their own classes alone.
TEST(HeadMemory, PartsOfAHeadHaveTheSameRows) {
  for (const Case& c : kCases) {
    HeadConfig config = c.config;
    config.split = Split::kVocabulary;
    constexpr int kParts = 3;
    const auto part = [&](int i) {
      return SizesFor(config, kServerLimit, 16384, kMultiprocessors, c.fused, {i, kParts});
    };
    int64_t classes = 0;
    for (int i = 0; i < kParts; ++i) {
      const HeadSizes sizes = part(i);
      EXPECT_EQ(sizes.first_class, classes);
      classes += sizes.vocab;
      EXPECT_EQ(sizes.padded_vocab, (sizes.vocab + 7) / 8 * 8);
      EXPECT_EQ(sizes.planned_vocab(), part(0).planned_vocab());
      EXPECT_GE(sizes.planned_vocab(), sizes.padded_vocab);
      EXPECT_EQ(sizes.chunk_rows, part(0).chunk_rows);
      EXPECT_EQ(sizes.arena_bytes, part(0).arena_bytes);
      const MemoryBytes plan = PlanMemory(config, sizes, kMultiprocessors, {i, kParts});
      const MemoryBytes whole = PlanMemory(c.config, SizesOf(c.config, c.fused), kMultiprocessors);
      // A third of the classes, the vectors of the norm and whole pages.
      for (const MemoryKind kind : {MemoryKind::kWeights, MemoryKind::kGradients, MemoryKind::kOptimizer}) {
        EXPECT_LE(plan[kind], whole[kind] / kParts + 3 * kDevicePage) << Name(kind);
      }
    }
    EXPECT_EQ(classes, config.vocab_size);
  }
}

TEST(ParamBlocks, TheComputeWeightOfFp32IsTheWeight) {
  auto* const base = reinterpret_cast<uint8_t*>(uintptr_t{1} << 40);
  HeadConfig config = kCases[0].config;
  HeadSizes sizes = SizesOf(config, true);
  const ValueBuffer half = ValueBuffer::Carve(config, sizes, base);
  EXPECT_NE(half.compute_weight, half.params.weight);
  config.compute_dtype = DType::kFloat32;
  sizes = SizesOf(config, true);
  const ValueBuffer full = ValueBuffer::Carve(config, sizes, base);
  EXPECT_EQ(full.compute_weight, full.params.weight);
  EXPECT_LT(full.bytes, half.bytes);
}

}  // namespace
}  // namespace lossd::kernels::cuda::head_memory_test

// ---- Head plan ----

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

// Room for two chunks in flight and for rows on their way; with logits it takes 2.2 GiB.
TEST(HeadPlan, AnEmbeddingAloneHasNoRoomForALoss) {
  HeadConfig config = Llama();
  config.logits = Logits::kNone;
  for (const int parts : {1, 4}) {
    PlanDevice device = Hopper();
    config.split = parts == 1 ? Split::kAny : Split::kVocabulary;
    device.replica = {parts - 1, parts};
    const auto plan = PlanHead(config, device);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->sizes.chunk_rows, 8192);
    EXPECT_LE(plan->memory[MemoryKind::kWorkspace], int64_t{18} << 20);
    // Of parts rows are added up in fp32.
    EXPECT_LE(plan->memory[MemoryKind::kSlots], int64_t{parts == 1 ? 196 : 260} << 20);
    EXPECT_EQ(ChoiceOf(*plan, "chunk"), "up to 8192 rows");
    EXPECT_EQ(ChoiceOf(*plan, "logits"), "none");
    EXPECT_EQ(ChoiceOf(*plan, "loss"), "");
  }
  config.workspace_bytes = int64_t{40} << 20;
  config.split = Split::kAny;
  const auto small = PlanHead(config, Hopper());
  ASSERT_TRUE(small.ok()) << small.status();
  EXPECT_LT(small->sizes.chunk_rows, 2048);
  EXPECT_LE(small->memory[MemoryKind::kWorkspace] + small->memory[MemoryKind::kSlots], int64_t{42} << 20);
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
