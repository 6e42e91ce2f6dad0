// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/recomputed_plan.h"

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/heads/head_memory.h"
#include "kernels/cuda/kernels/scratch_sizes.h"
#include "kernels/cuda/paths/chunk_layout.h"
#include "kernels/cuda/paths/sample_plan.h"

namespace lossd::kernels::cuda::recomputed_plan_test {
namespace {

using ::testing::HasSubstr;

constexpr int kMultiprocessors = 132;
constexpr int64_t kServerLimit = int64_t{2} << 30;
constexpr int64_t kManyRows = 16384;

struct Shape {
  int64_t vocab, hidden;
};
constexpr Shape kModels[] = {
    {256'000, 2304}, {128'256, 4096}, {32'064, 3072}, {131'072, 5120}, {152'064, 8192}};
constexpr Shape kOdd[] = {{1, 1},       {7, 3}, {257, 127}, {1031, 2}, {255'999, 5119}, {1'000'003, 1000},
                          {300, 30'000}};

HeadConfig Recomputed(const Shape& shape, DType dtype) {
  return {.hidden_size = shape.hidden,
          .vocab_size = shape.vocab,
          .compute_dtype = dtype,
          .logits = Logits::kRecomputed};
}

HeadSizes SizesOf(const HeadConfig& config, bool fused = true) {
  return SizesFor(config, kServerLimit, kManyRows, kMultiprocessors, fused);
}

std::string Describe(const HeadConfig& config) {
  return absl::StrCat("V ", config.vocab_size, " D ", config.hidden_size, " ", Name(config.compute_dtype));
}

TEST(RecomputedPlan, SixtyFourMebibytesAreEnough) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const Norm norm : {Norm::kNone, Norm::kLayerNorm}) {
      for (const bool bias : {false, true}) {
        for (const Shape& shape : kModels) {
          HeadConfig config = Recomputed(shape, dtype);
          config.norm = norm;
          config.has_bias = config.has_class_weights = bias;
          const HeadSizes sizes = SizesOf(config);
          const MemoryBytes plan = PlanMemory(config, sizes, kMultiprocessors);
          EXPECT_LE(plan[MemoryKind::kWorkspace], int64_t{64} << 20) << Describe(config);
          EXPECT_EQ(sizes.chunk_rows, kRecomputedChunkRows) << Describe(config);
          EXPECT_TRUE(CheckWorkspace(config, sizes, kMultiprocessors).ok());
        }
      }
    }
  }
}

TEST(RecomputedPlan, OddShapesStayWithinTheLimitAndTakeNoMoreThanTheyUse) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const Shape& shape : kOdd) {
      const HeadConfig config = Recomputed(shape, dtype);
      const HeadSizes sizes = SizesOf(config);
      const int64_t workspace = PlanMemory(config, sizes, kMultiprocessors)[MemoryKind::kWorkspace];
      EXPECT_LE(workspace, int64_t{64} << 20) << Describe(config);
      EXPECT_LE(sizes.arena_bytes, LargestArenaBytes(RecomputedShapeOf(config, sizes, kMultiprocessors),
                                                     FilterShapeOf(config, sizes)));
    }
  }
}

TEST(RecomputedPlan, SlotsAreCountedApart) {
  const HeadConfig config = Recomputed(kModels[1], DType::kBFloat16);
  const HeadSizes sizes = SizesOf(config);
  const MemoryBytes plan = PlanMemory(config, sizes, kMultiprocessors);
  // Hidden states of two chunks and the gradients of one.
  const int64_t rows = 3 * sizes.chunk_rows * sizes.padded_hidden * 2;
  EXPECT_GE(plan[MemoryKind::kSlots], rows);
  EXPECT_LE(plan[MemoryKind::kSlots], rows + (int64_t{4} << 20));
}

TEST(RecomputedPlan, BlocksFitTheArenaWhateverTheRows) {
  for (const bool fused : {false, true}) {
    for (const Shape& shape : {kModels[0], kModels[3], kOdd[2], kOdd[4], kOdd[6]}) {
      for (const int64_t megabytes : {1, 8, 64, 300}) {
        HeadConfig config = Recomputed(shape, DType::kBFloat16);
        config.has_bias = true;
        config.workspace_bytes = megabytes << 20;
        const HeadSizes sizes = SizesOf(config, fused);
        for (const int64_t rows : {8, 72, 128, 256, 1152, 4096}) {
          if (rows > sizes.chunk_rows) continue;
          const RecomputedShape shape_of_head =
              RecomputedShapeOf(config, sizes, kMultiprocessors).For(fused && rows > 100);
          const RecomputedBlocks blocks = ChooseRecomputedBlocks(shape_of_head, rows, sizes.arena_bytes);
          EXPECT_LE(RecomputedArena::Carve(shape_of_head, blocks, nullptr).bytes, sizes.arena_bytes)
              << Describe(config);
          EXPECT_EQ(PadRows(blocks.rows), blocks.rows);
          EXPECT_TRUE(blocks.classes % 256 == 0 || blocks.classes == shape_of_head.padded_vocab);
          EXPECT_GE(blocks.classes, 1);
          const FilterShape filter = FilterShapeOf(config, sizes);
          for (const Selection selection : {Selection::kFromLogits, Selection::kInPass}) {
            if (selection != Selection::kFromLogits && !fused) continue;
            const FilterBlock block = ChooseFilterBlock(filter, selection, rows, sizes.arena_bytes);
            EXPECT_GE(block.rows, 8);
            EXPECT_EQ(block.rows % 8, 0);
            EXPECT_LE(FilterArena::Carve(filter, selection, block, nullptr).bytes, sizes.arena_bytes)
                << Describe(config);
          }
          for (const DType elements : {DType::kBFloat16, DType::kFloat32}) {
            const int64_t block_rows = ChooseSampledRows(filter, elements, rows, sizes.arena_bytes);
            EXPECT_GE(block_rows, 8);
            EXPECT_EQ(block_rows % 8, 0);
            EXPECT_LE(SampledBlockArena::Carve(filter, elements, block_rows, nullptr).bytes,
                      sizes.arena_bytes)
                << Describe(config);
          }
          EXPECT_LE(LeastSampledArenaBytes(filter), sizes.arena_bytes) << Describe(config);
        }
      }
    }
  }
}

// What a block needs lies side by side; the statistics share the memory of what comes after them.
TEST(RecomputedPlan, NothingOfABlockOverlaps) {
  auto* const base = reinterpret_cast<uint8_t*>(uintptr_t{1} << 40);
  const RecomputedShape shape = {
      .padded_hidden = 2304, .vocab = 255'999, .padded_vocab = 256'000, .fused = true, .bias = true};
  const RecomputedBlocks blocks = {1024, 4096};
  const RecomputedArena arena = RecomputedArena::Carve(shape, blocks, base);
  EXPECT_EQ(arena.logits, base);
  EXPECT_GE(reinterpret_cast<uint8_t*>(arena.hidden_gradient), base + 1024 * 4096 * 2);
  EXPECT_GE(arena.partials, arena.hidden_gradient + 1024 * 2304);
  EXPECT_GE(base + arena.bytes, reinterpret_cast<uint8_t*>(arena.partials + ColumnSumScratch(4096)));
  EXPECT_GE(base + arena.bytes, reinterpret_cast<uint8_t*>(arena.tiles.target + 1024));
}

TEST(RecomputedPlan, NothingOfASelectionInThePassOverlaps) {
  auto* const base = reinterpret_cast<uint8_t*>(uintptr_t{1} << 40);
  const FilterShape chunk = {
      .chunk_rows = 4096, .vocab = 255'999, .padded_vocab = 256'000, .padded_hidden = 2304};
  Carver own(nullptr), lists(nullptr), scratch(nullptr);
  FilterBuffers::Carve(chunk, own, lists, scratch);
  const FilterArena arena = FilterArena::Carve(chunk, Selection::kInPass, {1024, hopper::kMostListed}, base);
  EXPECT_EQ(arena.logits, nullptr);
  EXPECT_GE(reinterpret_cast<uint8_t*>(arena.tiles.max), base + lists.used());
  EXPECT_GE(reinterpret_cast<uint8_t*>(arena.lists.entries),
            reinterpret_cast<uint8_t*>(arena.tiles.target + 1024));
  EXPECT_GE(arena.lists.counts, reinterpret_cast<int32_t*>(arena.lists.entries + 1024 * hopper::kMostListed));
  EXPECT_GE(arena.lists.sum_bound, reinterpret_cast<float*>(arena.lists.counts + 1024));
  EXPECT_GE(base + arena.bytes, reinterpret_cast<uint8_t*>(arena.lists.sum_bound + 1024));
  EXPECT_GE(arena.bytes, lists.used() + scratch.used());
}

// The lists of a chunk take the place of its blocks when these are done.
TEST(RecomputedPlan, NothingOfSamplesOverlaps) {
  auto* const base = reinterpret_cast<uint8_t*>(uintptr_t{1} << 40);
  const FilterShape chunk = {
      .chunk_rows = 4096, .vocab = 255'999, .padded_vocab = 256'000, .padded_hidden = 2304};
  Carver own(nullptr), hidden(nullptr), arena(base);
  const RecomputedSampleBuffers b = RecomputedSampleBuffers::Carve(chunk, own, hidden, arena);
  EXPECT_EQ(hidden.used(), chunk.entries() * static_cast<int64_t>(sizeof(SampleEntry)));
  EXPECT_GE(reinterpret_cast<uint8_t*>(b.kept.keys), reinterpret_cast<uint8_t*>(b.entries + chunk.entries()));
  EXPECT_LE(arena.used(), LeastSampledArenaBytes(chunk));
  const SampledBlockArena block = SampledBlockArena::Carve(chunk, DType::kBFloat16, 104, base);
  EXPECT_GE(reinterpret_cast<uint8_t*>(block.tiles.max), base + 104 * chunk.padded_vocab * 2);
  EXPECT_GE(base + block.bytes, reinterpret_cast<uint8_t*>(block.tiles.target + 104));
}

// Nearly all of the arena holds logits: 64 MiB are 57 MiB of them.
TEST(RecomputedPlan, TheFiveShapesSampleFromBlocksOfManyRows) {
  for (const Shape& shape : kModels) {
    const HeadConfig config = Recomputed(shape, DType::kBFloat16);
    const HeadSizes sizes = SizesOf(config);
    const FilterShape chunk = FilterShapeOf(config, sizes);
    const int64_t rows = ChooseSampledRows(chunk, DType::kBFloat16, chunk.chunk_rows, sizes.arena_bytes);
    EXPECT_GE(rows * chunk.padded_vocab * 2, sizes.arena_bytes * 85 / 100) << Describe(config);
  }
}

// In few blocks of whole panels, so that weights are read few times; with more room for candidates where the
// statistics of the tiles leave it.
TEST(RecomputedPlan, TheFiveShapesListInFewBlocksOfRows) {
  for (const Shape& shape : kModels) {
    const HeadConfig config = Recomputed(shape, DType::kBFloat16);
    const HeadSizes sizes = SizesOf(config);
    const FilterBlock block =
        ChooseFilterBlock(FilterShapeOf(config, sizes), Selection::kInPass, 4096, sizes.arena_bytes);
    EXPECT_GE(block.rows, 2048) << Describe(config);
    EXPECT_EQ(block.rows % 256, 0) << Describe(config);
    if (shape.vocab > 100'000 && shape.vocab < 200'000) {
      EXPECT_EQ(block.listed, hopper::kMostListed) << Describe(config);
    }
  }
}

// Rows come before classes: dW is read and written once for each block of rows. The logit pass works on
// panels of 256 rows, in rounds of 66 clusters with a tile of 256 classes each.
TEST(RecomputedPlan, TheFiveShapesTakeFewBlocksThatFillTheLogitPass) {
  for (const Shape& shape : kModels) {
    const HeadConfig config = Recomputed(shape, DType::kBFloat16);
    const HeadSizes sizes = SizesOf(config);
    const RecomputedShape shape_of_head = RecomputedShapeOf(config, sizes, kMultiprocessors);
    const RecomputedBlocks blocks = ChooseRecomputedBlocks(shape_of_head, 4096, sizes.arena_bytes);
    EXPECT_GE(blocks.rows, 1024) << Describe(config);
    EXPECT_EQ(blocks.rows % 256, 0) << Describe(config);
    const int64_t tiles = blocks.rows / 256 * ((blocks.classes + 255) / 256);
    EXPECT_LT((tiles + 65) / 66 * 66 - tiles, tiles / 8)
        << Describe(config) << " " << blocks.rows << " x " << blocks.classes;
    const double products = 6.0 * 4096 * static_cast<double>(shape.vocab * shape.hidden) / 790e12;
    EXPECT_LT(PredictRecomputedSeconds(shape_of_head, blocks, 4096), 1.6 * products) << Describe(config);
  }
}

TEST(RecomputedPlan, RefusesALimitThatNoBlockFits) {
  HeadConfig config = Recomputed(kModels[0], DType::kBFloat16);
  config.workspace_bytes = 100'000;
  const absl::Status status = CheckWorkspace(config, SizesOf(config), kMultiprocessors);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("workspace_bytes"));
  EXPECT_THAT(status.message(), HasSubstr("100000"));
}

TEST(RecomputedPlan, AHeadsOwnLimitGoesBeforeTheServers) {
  HeadConfig config = Recomputed(kModels[0], DType::kBFloat16);
  config.logits = Logits::kStored;
  const int64_t rows = SizesOf(config).chunk_rows;
  config.workspace_bytes = kServerLimit / 4;
  const HeadSizes less = SizesOf(config);
  EXPECT_LT(less.chunk_rows, rows / 2);
  EXPECT_TRUE(CheckWorkspace(config, less, kMultiprocessors).ok());
  config.workspace_bytes = 1000;
  EXPECT_FALSE(CheckWorkspace(config, SizesOf(config), kMultiprocessors).ok());
}

}  // namespace
}  // namespace lossd::kernels::cuda::recomputed_plan_test
