// SPDX-License-Identifier: Apache-2.0
// How rows are cut into slices for a region of shared memory, and into messages where the region has no room:
// against the rule in plain loops over rows, which share no code with the client, for cases with a name and
// for random ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/loss_plan.h"
#include "lossd/v1/types.pb.h"

namespace lossd::client::region_plan_test {
namespace {

using internal::Rows;
using internal::SliceRule;

constexpr int32_t kIgnored = -100;
constexpr uint64_t kMiB = 1 << 20;

// A run of rows with a target or without.
struct Run {
  uint64_t rows = 0;
  bool valid = true;
};

struct Case {
  std::string name;
  std::vector<Run> runs;
  std::optional<Rows> range;  // of the stream; nullopt: all rows
  uint64_t row_bytes = 32;
  // 0: the server says nothing of it.
  uint64_t max_bytes = 3200, max_bytes_in_region = 12800;  // 100 rows in messages, 400 in a region
  uint64_t max_rows = 0, row_grid = 0;
  std::optional<uint64_t> slice_bytes;
  uint64_t region_bytes = kMiB;
  bool of_gpu = false;
};

std::vector<int32_t> TargetsOf(const Case& c) {
  std::vector<int32_t> targets;
  for (const Run& run : c.runs) targets.insert(targets.end(), run.rows, run.valid ? 3 : kIgnored);
  return targets;
}

// ---- The rule in plain loops ----

struct Most {
  uint64_t in_messages = 0, in_region = 0;  // rows of a slice
};

Most MostRows(const Case& c, uint64_t rows) {
  uint64_t in_messages = c.max_bytes / c.row_bytes;
  uint64_t allowed = c.max_bytes_in_region / c.row_bytes;
  if (c.slice_bytes.has_value()) {
    in_messages = std::min(in_messages, std::max<uint64_t>(1, *c.slice_bytes / c.row_bytes));
    allowed = 0;
  }
  if (c.max_rows != 0) {
    in_messages = std::min(in_messages, c.max_rows);
    allowed = std::min(allowed, c.max_rows);
  }
  const uint64_t share = c.region_bytes / 4;
  const uint64_t wanted = (c.of_gpu ? share : std::min(share, 4 * kMiB)) / c.row_bytes;
  const uint64_t most = std::max(in_messages, std::min(allowed, wanted));
  if (rows <= most) return {in_messages, most};
  uint64_t parts = 1, equal = 1;
  while (parts * most < rows) ++parts;
  while (parts * equal < rows) ++equal;
  return {in_messages, equal};
}

std::vector<Rows> SlicesOf(const Case& c, const std::vector<int32_t>& targets, Rows range, uint64_t most) {
  std::vector<Rows> slices;
  std::optional<Rows> slice;  // that is being made, up to its last valid row
  for (uint64_t row = range.begin; row < range.end; ++row) {
    if (targets[row] == kIgnored) continue;
    const bool fits = slice.has_value() && row - slice->begin < most &&
                      row - slice->end <= std::max<uint64_t>(1, most / 8) &&
                      (c.row_grid == 0 || row / c.row_grid == slice->begin / c.row_grid);
    if (!fits) {
      if (slice.has_value()) slices.push_back(*slice);
      slice = Rows{row, row};
    }
    slice->end = row + 1;
  }
  if (slice.has_value()) slices.push_back(*slice);
  return slices;
}

std::vector<Rows> MessagesOf(const Case& c, const std::vector<Rows>& slices, uint64_t most) {
  std::vector<Rows> messages;
  for (const Rows& slice : slices) {
    uint64_t first = slice.begin;
    for (uint64_t row = first + 1; row <= slice.end; ++row) {
      if (row < slice.end && row - first < most && (c.row_grid == 0 || row % c.row_grid != 0)) continue;
      messages.push_back({first, row});
      first = row;
    }
  }
  return messages;
}

// ---- Cases ----

void Check(const Case& c) {
  SCOPED_TRACE(c.name);
  const std::vector<int32_t> targets = TargetsOf(c);
  const Rows range = c.range.value_or(Rows{0, targets.size()});
  const Most most = MostRows(c, range.size());
  const std::vector<Rows> expected = SlicesOf(c, targets, range, most.in_region);

  v1::SliceLimits limits;
  limits.set_max_bytes(c.max_bytes);
  limits.set_max_bytes_in_region(c.max_bytes_in_region);
  limits.set_max_rows(c.max_rows);
  limits.set_row_grid(c.row_grid);
  const auto rule = internal::MakeSliceRule(c.row_bytes, c.slice_bytes, limits);
  ASSERT_TRUE(rule.ok()) << rule.status();
  const SliceRule in_region =
      internal::InRegion(*rule, range.size(), internal::WantedRows(c.region_bytes, c.of_gpu, c.row_bytes));
  const std::vector<Rows> slices = internal::DivideIntoSlices(targets, kIgnored, range, in_region);
  EXPECT_EQ(slices, expected);
  std::vector<Rows> messages;
  for (const Rows& slice : slices) {
    const std::vector<Rows> cut = internal::CutForMessages(slice, *rule);
    messages.insert(messages.end(), cut.begin(), cut.end());
  }
  EXPECT_EQ(messages, MessagesOf(c, expected, most.in_messages));
}

TEST(RegionPlanTest, CasesWithAName) {
  const Case cases[] = {
      {"no rows", {}},
      {"all rows are ignored", {{900, false}}},
      {"fewer rows than a message may have", {{60}}},
      {"more rows than a message may have, in one slice", {{390}}},
      {"as many as the server allows in a region", {{400}}},
      {"one more: two equal parts", {{401}}},
      {"a multiple of what is allowed", {{1200}}},
      {"parts that are not equal: the last one is shorter", {{1202}}},
      {.name = "max_rows bounds slices in a region too", .runs = {{300}}, .max_rows = 150},
      {.name = "max_rows bounds both", .runs = {{300}}, .max_rows = 70},
      {.name = "a server that says nothing of regions", .runs = {{300}}, .max_bytes_in_region = 0},
      {.name = "slice_bytes is for both", .runs = {{300}}, .slice_bytes = 2048},
      {.name = "slice_bytes above what messages may have", .runs = {{300}}, .slice_bytes = kMiB},
      {.name = "a quarter is less than the server allows", .runs = {{800}}, .region_bytes = 32 * 4 * 150},
      {.name = "a quarter is less than a message", .runs = {{800}}, .region_bytes = 32 * 4 * 40},
      {.name = "smaller than a row", .runs = {{250}}, .region_bytes = 64, .of_gpu = true},
      {.name = "no more than 4 MiB of the host",
       .runs = {{1000}},
       .row_bytes = 8192,
       .max_bytes = 256 << 10,
       .max_bytes_in_region = 64 * kMiB,
       .region_bytes = 64 * kMiB},
      {.name = "all that a quarter holds of a GPU",
       .runs = {{4000}},
       .row_bytes = 8192,
       .max_bytes = 256 << 10,
       .max_bytes_in_region = 64 * kMiB,
       .region_bytes = 64 * kMiB,
       .of_gpu = true},
      {.name = "bytes that no row divides",
       .runs = {{500}},
       .row_bytes = 10,
       .max_bytes = 1001,
       .max_bytes_in_region = 2009},
      {.name = "row_grid below what messages may have", .runs = {{200}}, .row_grid = 64},
      {.name = "row_grid between messages and the region", .runs = {{700}}, .row_grid = 256},
      {.name = "row_grid and max_rows of a deterministic server",
       .runs = {{700}},
       .max_rows = 250,
       .row_grid = 250},
      {.name = "a stream that begins beside the grid",
       .runs = {{700}},
       .range = Rows{130, 690},
       .max_rows = 256,
       .row_grid = 256},
      {"padding between sequences is sent along", {{180}, {20, false}, {180}, {20, false}}},
      {"a gap of an eighth of the slice", {{100}, {50, false}, {250}}},
      {"a longer gap is not sent", {{100}, {51, false}, {249}}},
      {"an ignored prompt", {{300, false}, {500}}},
  };
  for (const Case& c : cases) Check(c);
}

TEST(RegionPlanTest, RandomCases) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const auto draw = [&](uint64_t least, uint64_t most) {
    return std::uniform_int_distribution<uint64_t>(least, most)(random);
  };
  for (int number = 0; number < 2000 && !::testing::Test::HasFailure(); ++number) {
    Case c{.name = "random " + std::to_string(number)};
    const uint64_t rows = draw(1, 1500), longest = std::vector<uint64_t>{3, 30, 300, 3000}[draw(0, 3)];
    bool valid = draw(0, 1) == 1;
    for (uint64_t left = rows; left > 0; left -= c.runs.back().rows, valid = !valid) {
      c.runs.push_back({std::min(left, draw(1, longest)), valid});
    }
    const uint64_t begin = draw(0, 1) == 0 ? 0 : draw(0, rows - 1);
    c.range = Rows{begin, draw(begin, rows)};
    c.row_bytes = draw(1, 400);
    const uint64_t in_messages = draw(20, 200), in_region = in_messages + draw(0, 1) * draw(0, 1000);
    c.max_bytes = in_messages * c.row_bytes + draw(0, c.row_bytes - 1);
    c.max_bytes_in_region = draw(0, 6) == 0 ? 0 : in_region * c.row_bytes + draw(0, c.row_bytes - 1);
    if (draw(0, 4) < 2) c.max_rows = draw(20, 600);
    if (draw(0, 4) < 2) c.row_grid = draw(0, 1) == 0 && c.max_rows != 0 ? c.max_rows : draw(20, 400);
    if (draw(0, 6) == 0) c.slice_bytes = draw(20, 2 * in_messages) * c.row_bytes;
    c.region_bytes = 4 * c.row_bytes * draw(0, 800) + draw(0, 4 * c.row_bytes - 1);
    c.of_gpu = draw(0, 1) == 1;
    Check(c);
  }
}

}  // namespace
}  // namespace lossd::client::region_plan_test
