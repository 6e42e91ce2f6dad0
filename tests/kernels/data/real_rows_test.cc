// SPDX-License-Identifier: Apache-2.0
#include "kernels/data/real_rows.h"

#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace lossd::data::real_rows_test {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::Ge;
using ::testing::HasSubstr;
using ::testing::Lt;

RealRows Rows(int64_t rows, int64_t hidden_size, int64_t vocab_size, uint64_t seed) {
  auto made = RealRows::Create(rows, hidden_size, vocab_size, seed);
  EXPECT_TRUE(made.ok()) << made.status();
  return *std::move(made);
}

TEST(RealRowsTest, CandidatesAreDistinctClassesWithTheTargetAmongThem) {
  const RealRows rows = Rows(100, 256, 3000, 7);
  for (int64_t i = 0; i < rows.rows(); ++i) {
    const RealRows::Row row = rows.row(i);
    ASSERT_EQ(row.classes.size(), row.logits.size());
    EXPECT_LE(static_cast<int64_t>(row.classes.size()), rows.most_candidates());
    EXPECT_EQ(std::set<int32_t>(row.classes.begin(), row.classes.end()).size(), row.classes.size());
    EXPECT_THAT(row.classes, Each(AllOf(Ge(0), Lt(3000))));
    EXPECT_THAT(row.classes, Contains(row.target));
    EXPECT_GE(row.noise, 0.0f);
  }
}

TEST(RealRowsTest, ARowIsAFunctionOfSeedAndIndex) {
  const RealRows first = Rows(50, 128, 2000, 3), again = Rows(50, 128, 2000, 3),
                 other = Rows(50, 128, 2000, 4);
  EXPECT_EQ(first.class_logits(), again.class_logits());
  EXPECT_NE(first.class_logits(), other.class_logits());
  for (int64_t i : {49, 0, 7}) {
    EXPECT_EQ(first.row(i).classes, again.row(i).classes);
    EXPECT_EQ(first.row(i).logits, again.row(i).logits);
    EXPECT_EQ(first.row(i).target, again.row(i).target);
    EXPECT_NE(first.row(i).classes, other.row(i).classes);
  }
}

TEST(RealRowsTest, MoreDimensionsHaveRoomForMoreCandidates) {
  EXPECT_LT(Rows(1, 64, 8192, 1).most_candidates(), Rows(1, 2048, 8192, 1).most_candidates());
}

TEST(RealRowsTest, RefusesWhatHasNoRoomForSuchRows) {
  for (const auto& [hidden, vocab] : {std::pair<int64_t, int64_t>{63, 1024}, {64, 1023}}) {
    const auto rows = RealRows::Create(10, hidden, vocab, 1);
    EXPECT_EQ(rows.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(rows.status().message(), HasSubstr(std::to_string(hidden == 63 ? hidden : vocab)));
  }
  EXPECT_TRUE(RealRows::Create(0, 64, 1024, 1).ok());
}

}  // namespace
}  // namespace lossd::data::real_rows_test
