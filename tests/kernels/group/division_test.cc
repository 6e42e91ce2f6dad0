// SPDX-License-Identifier: Apache-2.0
// Divisions of random chunks have the properties that division.h promises.
#include "kernels/group/division.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

namespace lossd::kernels::division_test {
namespace {

std::vector<Slice> Slices(const std::vector<int64_t>& rows) {
  std::vector<Slice> slices(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) slices[i].rows = rows[i];
  return slices;
}

std::vector<int64_t> RowsByMember(const std::vector<ChunkPart>& parts, int members) {
  std::vector<int64_t> rows(static_cast<size_t>(members), 0);
  for (const ChunkPart& part : parts) rows[static_cast<size_t>(part.member)] += part.rows;
  return rows;
}

// Of all chunks, whatever they hold.
void ExpectSound(const std::vector<Slice>& slices, const DivisionLimits& limits,
                 const std::vector<ChunkPart>& parts) {
  std::vector<int> seen(slices.size(), 0);
  int last_member = 0;
  for (const ChunkPart& part : parts) {
    ASSERT_GE(part.member, last_member);
    ASSERT_LT(part.member, limits.members);
    last_member = part.member;
    ASSERT_TRUE(std::is_sorted(part.slices.begin(), part.slices.end()));
    int64_t rows = 0;
    for (const size_t slice : part.slices) {
      ASSERT_LT(slice, slices.size());
      ++seen[slice];
      rows += slices[slice].rows;
    }
    EXPECT_EQ(part.rows, rows);
    EXPECT_LE(part.rows, limits.member_rows);
  }
  EXPECT_EQ(seen, std::vector<int>(slices.size(), 1)) << "each slice once";
}

TEST(DivisionTest, RandomChunksAreDividedSoundlyAndEvenly) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const auto up_to = [&rng](uint64_t n) { return static_cast<int64_t>(rng() % (n + 1)); };
  for (int repeat = 0; repeat < 5000; ++repeat) {
    DivisionLimits limits;
    limits.members = 1 + static_cast<int>(up_to(7));
    limits.member_rows = 1 + up_to(100);
    std::vector<int64_t> rows;
    int64_t left = limits.members * limits.member_rows;
    for (int64_t more = up_to(40); more > 0 && left > 0; --more) {
      rows.push_back(up_to(static_cast<uint64_t>(std::min(left, limits.member_rows))));
      left -= rows.back();
    }
    std::vector<Slice> slices = Slices(rows);
    const int first = static_cast<int>(up_to(static_cast<uint64_t>(limits.members - 1)));
    const std::vector<ChunkPart> parts = Divide(slices, limits, first);
    ExpectSound(slices, limits, parts);
    EXPECT_EQ(Divide(slices, limits, first), parts) << "a pure function";
    for (Slice& slice : slices) slice.retained_offset = up_to(1) == 0 ? -1 : up_to(1 << 20);
    EXPECT_EQ(Divide(slices, limits, first), parts) << "of the numbers of rows alone";
    const std::vector<int64_t> by_member = RowsByMember(parts, limits.members);
    const auto [least, most] = std::minmax_element(by_member.begin(), by_member.end());
    const int64_t largest = rows.empty() ? 0 : *std::max_element(rows.begin(), rows.end());
    EXPECT_LE(*most - *least, largest);
  }
}

// Chunks of one slice each, as those of losses alone often are, keep all members busy.
TEST(DivisionTest, WhatIsEvenBeginsWithTheFirstMember) {
  const DivisionLimits limits{.members = 3, .member_rows = 20};
  for (int first = 0; first < 3; ++first) {
    EXPECT_EQ(Divide(Slices({20}), limits, first),
              (std::vector<ChunkPart>{{.member = first, .rows = 20, .slices = {0}}}));
    std::vector<int64_t> want(3, 5);
    want[static_cast<size_t>(first)] = 9;
    EXPECT_EQ(RowsByMember(Divide(Slices({5, 9, 5}), limits, first), 3), want);
  }
}

TEST(DivisionTest, AMemberHasAsManyPartsAsItNeeds) {
  const DivisionLimits limits{.members = 2, .member_rows = 15};
  EXPECT_EQ(Divide(Slices({10, 10, 10}), limits, 1),
            (std::vector<ChunkPart>{{.member = 0, .rows = 10, .slices = {1}},
                                    {.member = 1, .rows = 10, .slices = {0}},
                                    {.member = 1, .rows = 10, .slices = {2}}}));
}

TEST(DivisionTest, FewRowsAreOneMembers) {
  const DivisionLimits limits{.members = 2, .member_rows = 60, .least_rows = 100};
  EXPECT_EQ(Divide(Slices({30, 20}), limits, 1),
            (std::vector<ChunkPart>{{.member = 1, .rows = 50, .slices = {0, 1}}}));
  EXPECT_EQ(Divide(Slices({40, 50}), limits, 1).size(), 2u) << "one member does not take them";
  EXPECT_EQ(Divide(Slices({50, 50}), limits, 1).size(), 2u);
  EXPECT_EQ(Divide({}, limits, 1), (std::vector<ChunkPart>{{.member = 1}}));
  EXPECT_EQ(Divide(Slices({0, 0}), limits, 1),
            (std::vector<ChunkPart>{{.member = 1, .rows = 0, .slices = {0, 1}}}));
}

TEST(DivisionTest, SlicesWithAHomeGoThereAndTheOthersMakeUpForIt) {
  const DivisionLimits limits{.members = 3, .member_rows = 60};
  std::vector<int> homes = {2, -1, 2, -1, -1};
  const auto divide = [&](const DivisionLimits& by, int first) {
    const std::vector<Slice> slices = Slices({20, 10, 30, 15, 5});
    const std::vector<ChunkPart> parts = Divide(slices, by, first, homes);
    ExpectSound(slices, by, parts);
    return RowsByMember(parts, 3);
  };
  EXPECT_EQ(divide(limits, 0), (std::vector<int64_t>{15, 15, 50}));
  EXPECT_EQ(divide(limits, 1), (std::vector<int64_t>{15, 15, 50}));
  const DivisionLimits few{.members = 3, .member_rows = 80, .least_rows = 100};
  EXPECT_EQ(divide(few, 1), (std::vector<int64_t>{0, 0, 80})) << "at home";
  homes = {-1, -1, -1, -1, -1};
  EXPECT_EQ(divide(few, 1), (std::vector<int64_t>{0, 80, 0}));
  homes = {1, 1, 1, 1, 1};
  EXPECT_EQ(divide(limits, 0), (std::vector<int64_t>{0, 80, 0})) << "in two parts";
}

}  // namespace
}  // namespace lossd::kernels::division_test
