// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/staging_plan.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/cuda/heads/head_memory.h"
#include "kernels/cuda/paths/chunk_layout.h"

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
