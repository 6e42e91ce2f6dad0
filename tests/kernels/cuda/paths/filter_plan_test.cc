// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/filter_plan.h"

#include <cstdint>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/heads/head_memory.h"
#include "kernels/cuda/paths/path_claims.h"

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
