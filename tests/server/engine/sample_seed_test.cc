// SPDX-License-Identifier: Apache-2.0
#include "server/engine/sample_seed.h"

#include <set>

#include "gtest/gtest.h"

namespace lossd::engine::sample_seed_test {
namespace {

// The same in every process, and in every version from now on.
TEST(SampleSeed, GoldenValues) {
  EXPECT_EQ(SampleSeed("", 0, 0), 0x5a103ecf0aced9f3u);
  EXPECT_EQ(SampleSeed("head", 0, 0), 0xc23ec26e590eac17u);
  EXPECT_EQ(SampleSeed("head", 1, 0), 0x228fbb2d4b1eb1fbu);
  EXPECT_EQ(SampleSeed("head", 0, 1), 0x5367f5d3b94e128u);
  EXPECT_EQ(SampleSeed("head", ~uint64_t{0}, ~uint64_t{0}), 0xccfc09a255cf1dd7u);
}

TEST(SampleSeed, EachMicrobatchHasItsOwn) {
  std::set<uint64_t> seeds;
  for (const char* head : {"", "a", "b", "ab", "lm_head"}) {
    for (uint64_t step = 0; step < 100; ++step) {
      for (uint64_t id = 0; id < 100; ++id) seeds.insert(SampleSeed(head, step, id));
    }
  }
  EXPECT_EQ(seeds.size(), 5u * 100 * 100);
}

}  // namespace
}  // namespace lossd::engine::sample_seed_test
