// SPDX-License-Identifier: Apache-2.0
#include "server/engine/range_allocator.h"

#include <memory>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace lossd::engine::range_allocator_test {
namespace {

constexpr int64_t kUnit = RangeAllocator::kAlignment;

TEST(RangeAllocatorTest, GivesAndTakesBack) {
  RangeAllocator allocator(4 * kUnit + 17);
  EXPECT_EQ(allocator.size(), 4 * kUnit);
  auto a = allocator.Allocate(1);
  auto b = allocator.Allocate(3 * kUnit);
  ASSERT_TRUE(a != nullptr && b != nullptr);
  EXPECT_NE(a->offset(), b->offset());
  EXPECT_EQ(allocator.Allocate(1), nullptr);
  EXPECT_EQ(allocator.used(), 4 * kUnit);
  a.reset();
  b.reset();
  EXPECT_EQ(allocator.used(), 0);
  EXPECT_NE(allocator.Allocate(4 * kUnit), nullptr);  // joined again
}

TEST(RangeAllocatorTest, RefusesWhatCannotFit) {
  RangeAllocator empty(0);
  EXPECT_EQ(empty.Allocate(0), nullptr);
  RangeAllocator allocator(kUnit);
  EXPECT_EQ(allocator.Allocate(kUnit + 1), nullptr);
  EXPECT_EQ(allocator.Allocate(INT64_MAX), nullptr);
}

// Random allocations never overlap or leave the memory, and all of it can be had again at the end.
TEST(RangeAllocatorTest, BlocksNeverOverlap) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  constexpr int64_t kUnits = 64;
  RangeAllocator allocator(kUnits * kUnit);
  std::vector<std::shared_ptr<const RangeAllocator::Block>> blocks;
  for (int i = 0; i < 5000; ++i) {
    if (!blocks.empty() && rng() % 2 == 0) {
      const size_t victim = rng() % blocks.size();
      blocks[victim] = blocks.back();
      blocks.pop_back();
    } else if (auto block = allocator.Allocate(static_cast<int64_t>(rng() % (9 * kUnit)))) {
      blocks.push_back(block);
    }
    std::vector<bool> taken(kUnits, false);
    int64_t used = 0;
    for (const auto& block : blocks) {
      ASSERT_EQ(block->offset() % kUnit, 0);
      for (int64_t unit = block->offset() / kUnit; unit < (block->offset() + block->bytes()) / kUnit;
           ++unit) {
        ASSERT_LT(unit, kUnits);
        ASSERT_FALSE(taken[static_cast<size_t>(unit)]);
        taken[static_cast<size_t>(unit)] = true;
      }
      used += block->bytes();
    }
    ASSERT_EQ(allocator.used(), used);
  }
  blocks.clear();
  EXPECT_NE(allocator.Allocate(kUnits * kUnit), nullptr);
}

}  // namespace
}  // namespace lossd::engine::range_allocator_test
