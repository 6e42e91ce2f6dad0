// SPDX-License-Identifier: Apache-2.0
// Tests of the plans of the paths, which need no GPU: filtered, recomputed and staged chunks, and the memory
// that they claim.
#include "kernels/cuda/paths/path_memory.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/heads/head_memory.h"
#include "kernels/cuda/kernels/launch_plan.h"
#include "kernels/cuda/paths/chunk_plan.h"

// ---- Filter plan ----

namespace lossd::kernels::cuda::filter_plan_test {
namespace {

using ::testing::HasSubstr;

constexpr FilterShape kShape = {
    .chunk_rows = 4096, .vocab = 255'999, .padded_vocab = 256'000, .padded_hidden = 2304};

TEST(FilterPlan, SaysWhatTheDeviceCannotDo) {
  DeviceLimits limits;
  EXPECT_THAT(WhyNotFilteredOnDevice(kShape, limits), HasSubstr("driver"));
  limits.has_branches = true;
  EXPECT_EQ(WhyNotFilteredOnDevice(kShape, limits), "");
  FilterShape shape = kShape;
  shape.padded_hidden = 16'384;
  EXPECT_EQ(WhyNotFilteredOnDevice(shape, limits), "");
  shape.dtype = DType::kFloat32;
  EXPECT_THAT(WhyNotFilteredOnDevice(shape, limits), HasSubstr("hidden size"));
  shape.dtype = DType::kBFloat16;
  shape.padded_hidden += 8;
  EXPECT_THAT(WhyNotFilteredOnDevice(shape, limits), HasSubstr("hidden size"));
}

TEST(FilterPlan, HasRoomForEveryClassOfASmallVocabulary) {
  FilterShape shape = kShape;
  EXPECT_EQ(shape.capacity(), 4096 * kPooledCandidates);
  EXPECT_EQ(shape.entries(), 4096 * (kPooledCandidates + 1));
  shape.vocab = 3;
  EXPECT_EQ(shape.capacity(), 4096 * 3);
}

TEST(FilterPlan, HasRoomForFlatRowsIfTheyAreFew) {
  FilterShape shape = kShape;
  shape.chunk_rows = 70;
  shape.vocab = 257;
  EXPECT_EQ(shape.capacity(), 70 * 257);
  shape.vocab = 256'000;
  for (shape.chunk_rows = 1; shape.chunk_rows <= 16; ++shape.chunk_rows) {
    EXPECT_GE(shape.capacity(), shape.chunk_rows * kMaxRowCandidates);
  }
}

// A chunk's lists lie in the memory of the largest chunk's.
TEST(FilterPlan, MoreRowsHaveMoreRoom) {
  for (int64_t vocab : {1, 127, 300, 256'000}) {
    FilterShape less = kShape;
    less.vocab = vocab;
    for (less.chunk_rows = 1; less.chunk_rows <= 4096; ++less.chunk_rows) {
      FilterShape more = less;
      ++more.chunk_rows;
      ASSERT_LE(less.capacity(), more.capacity()) << less.chunk_rows << " rows, " << vocab << " classes";
      ASSERT_LE(FilterBuffers::LogitsBytes(less), FilterBuffers::LogitsBytes(more));
    }
  }
}

// Whatever order keys are compared in, an empty entry comes last and no two elements share a key.
TEST(FilterPlan, KeysHoldEveryClassAndRow) {
  for (int64_t rows : {1, 2, 3, 8, 128, 4095, 4096, 8192}) {
    EXPECT_GT(KeyBits(rows, 0), RowBits(rows)) << "a part without classes has a key to sort by";
    for (int64_t vocab : {1, 2, 7, 8, 256, 255'999, 262'144}) {
      const int row_bits = RowBits(rows);
      EXPECT_GE(int64_t{1} << row_bits, rows);
      const uint64_t largest =
          (static_cast<uint64_t>(vocab - 1) << row_bits) | static_cast<uint64_t>(rows - 1);
      const uint64_t compared = (uint64_t{1} << KeyBits(rows, vocab)) - 1;
      EXPECT_LT(largest, compared) << rows << " rows, " << vocab << " classes";
    }
  }
}

TEST(FilterPlan, ListsFitTheMemoryOfTheLogits) {
  for (int64_t vocab : {1, 500, 32'064, 256'000}) {
    const HeadConfig config = {.hidden_size = 2304, .vocab_size = vocab, .compute_dtype = DType::kBFloat16};
    const HeadSizes sizes = SizesFor(config, int64_t{1} << 30, 4096, 132, false);
    const PathClaims claims = ClaimsOf(config, sizes);
    EXPECT_LE(FilterBuffers::LogitsBytes(FilterShapeOf(config, sizes)), claims[Region::kLogits]);
    EXPECT_LE(sizes.chunk_rows * sizes.padded_vocab * 2, claims[Region::kLogits]);
  }
}

}  // namespace
}  // namespace lossd::kernels::cuda::filter_plan_test

// ---- Recomputed plan ----

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

// ---- Staging plan ----

namespace lossd::kernels::cuda::staging_plan_test {
namespace {

struct Shape {
  int64_t hidden, vocab;
};
constexpr Shape kShapes[] = {{2304, 256'000}, {4096, 128'256}, {3072, 32'064},
                             {1, 7},          {24, 9001},      {8192, 40}};

struct StagingCase {
  HeadConfig config;
  HeadSizes sizes;
};

StagingCase CaseOf(const Shape& shape, DType dtype, int64_t megabytes) {
  HeadConfig config;
  config.hidden_size = shape.hidden;
  config.vocab_size = shape.vocab;
  config.compute_dtype = dtype;
  return {config, SizesFor(config, megabytes << 20, 16'384, 132, true)};
}

// In bytes of a region; [begin, end).
struct Extent {
  int64_t begin, end;
  bool Overlaps(const Extent& other) const { return begin < other.end && other.begin < end; }
};

void ExpectSound(const StagingCase& c, Kept kept, int64_t padded_rows) {
  const auto& [config, sizes] = c;
  SCOPED_TRACE(absl::StrCat("D ", sizes.hidden, " V ", sizes.vocab, " chunk ", sizes.chunk_rows, " rows ",
                            padded_rows, kept == Kept::kGradient ? " kept" : ""));
  const int64_t row_bytes = sizes.padded_vocab * 4;
  int64_t next = 0;
  const std::vector<StagedBlock> blocks = PlanStaging(config, sizes, kept, padded_rows);
  for (const StagedBlock& block : blocks) {
    EXPECT_EQ(block.begin, next);
    ASSERT_GT(block.rows, 0);
    EXPECT_EQ(block.rows % 8, 0);
    next += block.rows;
    const Extent logits = {block.offset, block.offset + block.rows * row_bytes};
    EXPECT_EQ(block.offset % 256, 0);
    if (block.in_spare) {
      EXPECT_LE(logits.end, SpareBytes(config, sizes));
      continue;
    }
    EXPECT_LE(logits.end, sizes.chunk_rows * sizes.padded_vocab * 2);
    // Of the rows so far and of the block itself.
    if (kept == Kept::kGradient) {
      EXPECT_FALSE(logits.Overlaps({0, next * sizes.padded_vocab * 2}));
    }
  }
  EXPECT_EQ(next, padded_rows);
}

TEST(StagingPlan, BlocksCoverTheRowsAndLogitsLieOverNothingThatIsKept) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const Shape& shape : kShapes) {
      for (const int64_t megabytes : {1, 64, 512, 4096}) {
        const StagingCase c = CaseOf(shape, dtype, megabytes);
        for (int64_t rows = 8; rows <= c.sizes.chunk_rows; rows = PadRows(rows + rows / 3 + 1)) {
          ExpectSound(c, Kept::kGradient, rows);
          ExpectSound(c, Kept::kNothing, rows);
        }
        ExpectSound(c, Kept::kGradient, c.sizes.chunk_rows);
        ExpectSound(c, Kept::kNothing, c.sizes.chunk_rows);
      }
    }
  }
}

// Few blocks, so that weights are read few times, and hardly any memory.
TEST(StagingPlan, AFullChunkTakesFewBlocks) {
  for (const Shape& shape : {kShapes[0], kShapes[1], kShapes[2]}) {
    const StagingCase c = CaseOf(shape, DType::kBFloat16, 4096);
    EXPECT_LE(PlanStaging(c.config, c.sizes, Kept::kGradient, c.sizes.chunk_rows).size(), 14u);
    EXPECT_LE(PlanStaging(c.config, c.sizes, Kept::kNothing, c.sizes.chunk_rows).size(), 3u);
    const int64_t gradient = c.sizes.chunk_rows * c.sizes.padded_hidden * 2;
    const int64_t logits = c.sizes.chunk_rows * c.sizes.padded_vocab * 2;
    EXPECT_LE(SpareBytes(c.config, c.sizes), std::max(gradient, logits / 16));
  }
}

TEST(StagingPlan, AThirdOfAChunkIsOneBlock) {
  const StagingCase c = CaseOf(kShapes[1], DType::kFloat16, 4096);
  for (const int64_t rows : {int64_t{8}, int64_t{128}, c.sizes.chunk_rows / 3 / 128 * 128 - 128}) {
    const std::vector<StagedBlock> blocks = PlanStaging(c.config, c.sizes, Kept::kGradient, rows);
    ASSERT_EQ(blocks.size(), 1u) << rows;
    EXPECT_FALSE(blocks.front().in_spare);
  }
}

TEST(StagingPlan, Fp32IsComputedInPlace) {
  const StagingCase c = CaseOf(kShapes[2], DType::kFloat32, 512);
  const std::vector<StagedBlock> blocks = PlanStaging(c.config, c.sizes, Kept::kGradient, c.sizes.chunk_rows);
  ASSERT_EQ(blocks.size(), 1u);
  EXPECT_EQ(blocks.front().rows, c.sizes.chunk_rows);
  EXPECT_EQ(blocks.front().offset, 0);
  EXPECT_FALSE(blocks.front().in_spare);
  EXPECT_EQ(SpareBytes(c.config, c.sizes), 0);
}

}  // namespace
}  // namespace lossd::kernels::cuda::staging_plan_test

// ---- Path claims ----

namespace lossd::kernels::cuda::path_claims_test {
namespace {

constexpr int kMultiprocessors = 132;

HeadConfig Config(Logits logits, DType compute) {
  return {.hidden_size = 2304, .vocab_size = 256'000, .compute_dtype = compute, .logits = logits};
}

PathClaims Claims(const HeadConfig& config, bool fused = true) {
  return ClaimsOf(config, SizesFor(config, int64_t{2} << 30, 16384, kMultiprocessors, fused));
}

TEST(PathClaims, TheLogitsOfAChunkAreClaimedOnlyWhereTheyAreStored) {
  const HeadConfig stored = Config(Logits::kStored, DType::kBFloat16);
  const HeadSizes sizes = SizesFor(stored, int64_t{2} << 30, 16384, kMultiprocessors, true);
  EXPECT_EQ(ClaimsOf(stored, sizes)[Region::kLogits], sizes.chunk_rows * 256'000 * 2);
  EXPECT_EQ(ClaimsOf(stored, sizes)[Region::kRules], 0);
  EXPECT_EQ(ClaimsOf(stored, sizes)[Region::kRunningRows], 0);
  const PathClaims recomputed = Claims(Config(Logits::kRecomputed, DType::kBFloat16));
  EXPECT_LE(recomputed[Region::kLogits], int64_t{64} << 20);
  EXPECT_GT(recomputed[Region::kRules], 0);
}

TEST(PathClaims, FusedRowsAreClaimedWhereLossesCanBeFused) {
  for (const Logits logits : {Logits::kStored, Logits::kRecomputed}) {
    EXPECT_GT(Claims(Config(logits, DType::kBFloat16))[Region::kFusedRows], 0);
    EXPECT_EQ(Claims(Config(logits, DType::kBFloat16), false)[Region::kFusedRows], 0);
  }
}

// The row loss kernel reads the target's logit from stored fp32 logits.
TEST(PathClaims, TargetDotsAreClaimedUnlessLogitsAreStoredInFp32) {
  EXPECT_EQ(Claims(Config(Logits::kStored, DType::kFloat32))[Region::kTargetDots], 0);
  EXPECT_GT(Claims(Config(Logits::kStored, DType::kFloat16))[Region::kTargetDots], 0);
  EXPECT_GT(Claims(Config(Logits::kRecomputed, DType::kFloat32))[Region::kTargetDots], 0);
}

TEST(PathClaims, TheBiasOfStoredLogitsNeedsColumnSums) {
  HeadConfig config = Config(Logits::kStored, DType::kBFloat16);
  EXPECT_EQ(Claims(config)[Region::kColumnSums], 0);
  config.has_bias = true;
  EXPECT_GT(Claims(config)[Region::kColumnSums], 0);
  config.trainable = false;
  EXPECT_EQ(Claims(config)[Region::kColumnSums], 0);
}

}  // namespace
}  // namespace lossd::kernels::cuda::path_claims_test

// ---- Path memory ----

namespace lossd::kernels::cuda::path_memory_test {
namespace {

TEST(PathClaims, ARegionIsAsLargeAsTheLargestClaim) {
  PathClaims claims;
  EXPECT_EQ(claims[Region::kLogits], 0);
  claims.Claim(Region::kLogits, 300);
  claims.Claim(Region::kLogits, 200);
  claims.Claim(Region::kFilter, 7);
  EXPECT_EQ(claims[Region::kLogits], 300);
  EXPECT_EQ(claims[Region::kFilter], 7);
  EXPECT_EQ(claims[Region::kRules], 0);
}

TEST(PathMemory, WhatIsNotClaimedIsNull) {
  PathMemory memory;
  uint8_t bytes[8];
  memory[Region::kTargetDots] = bytes;
  EXPECT_EQ(static_cast<void*>(memory.At<float>(Region::kTargetDots)), bytes);
  EXPECT_EQ(memory.At<float>(Region::kRules), nullptr);
}

}  // namespace
}  // namespace lossd::kernels::cuda::path_memory_test
